"""The client: the connection to the daemon, puts, gets, leases, claims and the pressure on this host.

Owns: everything that talks to the daemon or touches shared memory, and every message that a client sends
(`requests.py`). Imports none of the other rooms of `client/`.
"""
