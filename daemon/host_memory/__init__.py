"""How much of the ring is in memory: pages given back to the system and taken back, and the entries that go for that.

May import daemon/store, replacement, remote, forms and shm; nothing of actors. Owns the target of resident bytes, and
which pages and entries go to reach it. The governor says what it wants (Pressed), and learns what there is (HostHolds).
"""
