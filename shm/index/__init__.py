"""Keys, and the index in shared memory that maps them to spans of the ring.

It may import `shm.ring` and `tensord.errors`. It owns the hash table that the daemon writes and clients read without
a lock, the generations of namespaces, and how a key is made.
"""
