"""How much of the ring is in memory: pages given back to the system and taken back, and the entries that go for that.

May import the store's room and shm; nothing of actors. The governor says what it wants (Pressed), and learns what there
is (HostHolds).
"""
