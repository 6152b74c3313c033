"""The processes of a soak: a daemon with workers that make all calls of a client while any of them is killed.

May import tensord and its tests' processes. Owns the ledger of what each worker has stored, by which a loss is told.
"""
