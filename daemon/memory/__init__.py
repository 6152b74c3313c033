"""The shared memory of an instance: ring, index and lanes, found as the daemon before has left them or made anew.

May import shm, daemon/forms, process, config, claims and replacement; no actor. Owns the segments, the threads
that copy and check what is in them, and what a policy learned between two daemons. Does not own which entries
are where, which the core decides.
"""
