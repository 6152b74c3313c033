"""Cached sequences: which of the store's entries are their blocks, and the longest cached prefix of a query.

May import daemon/store, daemon/forms, shm and ipc; nothing of actors, sockets or threads. Owns the index of blocks.
Does not own entries, nor the links between them (daemon/store/families).
"""
