"""What is read from a remote store and written to it: missing keys that are sought there, entries that are worth it.

May import daemon/store, room, claims, forms, shm and ipc; nothing of actors, sockets or threads. Owns the fetches,
writes and removals under way, and when a store is left alone. Its door is `remote`; the stores are
daemon/remote_stores.
"""
