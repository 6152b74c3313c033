"""The remote store behind the ring: which missing keys are sought there, which entries are written to it, and when it
is left alone."""
