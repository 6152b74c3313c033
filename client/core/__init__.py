"""The client: the connection to the daemon, puts, gets, leases, claims and the memory pressure of this host.

Owns: all code that talks to the daemon or reads shared memory, and every message that a client sends (`requests.py`).
Does not own: the caches on top. It imports no other package of `client/`.
"""
