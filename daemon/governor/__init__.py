"""The governor: which clients must give memory back, and when. Events in, effects out; time is an argument.

    from .governor import Governor; Governor(limits).handle(event, now)

Owns: the order of the steps of an event, limits, effects, drills, and what the ring may keep under pressure. Its parts
are in `policy` (modes of gauges), `devices` (entries on cards) and `reservations`. Imports no loop, socket or clock.
"""
