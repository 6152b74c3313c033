"""`tensorctl install`: puts the service's files in place under systemd, and removes them again.

Owns: the files that it installed. Does not own: the package, the user tensord, the shared memory, nor files that the
operator has changed.
"""
