"""What all rooms of the governor share: the forms of its events, effects and limits, its counters, and its outbox.

It imports messages and the store's forms of effects, and no other room of the governor. It owns the counters and the
connected clients' names.
"""
