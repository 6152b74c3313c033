"""The governor decides which clients must give memory back, and when: events in, effects out, and time is an argument.

It imports its rooms below this one, the store's forms of effects, and messages, and no loop, socket or clock. It owns
the order of the steps of an event, status, and how much of the ring may be kept under pressure.
"""
