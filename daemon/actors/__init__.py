"""The tasks that run the cores: an inbox, a core and a dispatcher of effects each, for the store and the governor.

May import every package that it runs and daemon/memory; no socket. Owns the order of messages, the slices of long jobs,
and the threads that carry effects out. Does not own decisions: these are the cores'.
"""
