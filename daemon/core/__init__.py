"""The store as one: events and records of clients in, effects out, in a fixed order of steps.

    store.handle(event) → dispatch → packages (store, room, claims, prefix, lifetimes, host_memory, remote) → effects

Owns: that order, the creation of all parts (`parts`), and what is told of them (`reports`). May import all pure
packages; no loop, socket or clock. The events and effects are daemon/forms.
"""
