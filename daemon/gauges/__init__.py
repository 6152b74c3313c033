"""How full each GPU and the host's memory are, by drivers, the kernel, clients or a file.

May import ipc, shm, and the governor's forms of samples; no other room. Owns a thread for each source, and the choice
of the source that counts for a gauge. Does not own what follows from a reading.
"""
