"""What a daemon finds of the one before it: entries, and bytes that somebody may still look at.

May import daemon/store, the policies and shm. Runs once, before the store serves.
"""
