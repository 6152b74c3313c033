"""The settings: their names, bounds and defaults, where values come from, and the limits that follow from them.

May import ipc, shm and the names that other packages offer for choice; the actors and the app import it. Owns the check
of a configuration before anything is started. Does not own the effect of a setting.
"""
