"""The store as one: events and records of clients in, effects out, in a fixed order of steps.

    store.handle(event) → dispatch → the rooms (store, room, claims, prefix, lifetimes, host_memory, remote) → effects

Owns: that order, the events and effects, and the creation of all parts (`parts`). Imports no loop, socket or clock.
"""
