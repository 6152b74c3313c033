"""Who may have what: claims on missing keys, so that one client computes and others wait; quotas, rates, turns of uids.

May import ipc, shm and the daemon's log. Owns claims and their waiters, values that cannot be stored, and the
rules of sharing. Does not own what is shared: entries, memory and sockets.
"""
