"""What the store's packages say to each other and to their actor: events, effects, limits, and the outbox of an event.

May import ipc, shm, and of these only claims and reports, whose verdicts and counters the outbox has. Owns the
fields of these forms. Does not own who makes or handles them (daemon/core).
"""
