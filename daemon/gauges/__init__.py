"""How full each GPU and the host's memory are: the readings of all sources, and which of them counts.

May import ipc, the governor's forms of samples, and `sources/`; no other package. Owns a thread for each source, and
the choice of the source that counts for a gauge. Does not own what a source reads, nor what follows from a reading.
"""
