"""Entries from their publication to their end: uses, time to live, pins by message, and removal by key or namespace.

May import daemon/store, replacement, reports, claims, forms, shm and ipc; nothing of actors, sockets or threads. Owns
when and why an entry ends. Does not own victims for room (daemon/room), nor what becomes of the bytes (`store.spans`).
"""
