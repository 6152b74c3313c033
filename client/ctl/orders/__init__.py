"""The commands that change something: limits, entries, cards, a reload, the memory of an ended daemon.

It may import the daemon, the arguments and the output of tensorctl, and `show/` for a text that both need. It owns the
orders' arguments and what they print; what an order does is the daemon's.
"""
