"""`tensorctl doctor`: checks the environment of a daemon, and says what to do.

Owns: the checks (pure functions of facts), the collection of facts, the output. Does not own: any setting. Invariants:
it changes nothing.
"""
