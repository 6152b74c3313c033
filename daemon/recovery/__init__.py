"""What a daemon finds of the one before it: entries, and bytes that somebody may still look at.

May import the store's room, the policies and shm. Runs once, before the store serves.
"""
