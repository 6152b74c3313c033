"""The remote store behind the ring: which missing keys are sought there, which entries are written to it, and when it
is left alone.

May import daemon/store, shm and ipc; nothing of actors, sockets or threads. Its door is `remote`.
"""
