"""`tensorctl doctor`: what is around a daemon, and what to do about it.

It may import the daemon, `show/` and the leftovers of `orders/`. It owns the facts that are read from this machine, the
checks (pure functions of facts); it changes nothing.
"""
