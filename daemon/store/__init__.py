"""The entries of one ring, as columns of numbers: commits, grants, spans, and the index's slots.

May import the policies (daemon/replacement), shm and ipc; nothing of actors, sockets or threads. Owns which bytes of
the ring belong to what, and the slots of the index.
"""
