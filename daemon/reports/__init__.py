"""What the store tells of itself: status, pages of entries, why an entry stayed or went, hit ratios, removed entries.

May import daemon/store, daemon/replacement, shm and ipc; nothing of actors, sockets or threads. Owns counters, records
and the form of answers. Does not own entries. A query changes nothing.
"""
