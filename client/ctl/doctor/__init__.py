"""`tensorctl doctor`: what around a daemon keeps it from serving well, and what to do about it.

Owns: the checks (pure functions of facts), the gathering of facts, their presentation. Changes nothing.
"""
