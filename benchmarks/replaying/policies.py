"""Every policy that replays a trace, by the name in its rows.

The store's policy has three rows: in the store (`tensord`), there with the ends of agents' calls (`tensord+steps`), and
in a cache without fragmentation (`tensord-ideal`).
"""

from __future__ import annotations

from typing import Final

from replaying.counts import Counts
from replaying.ideal import Ideal
from replaying.peers import PEERS
from replaying.real import Real
from replaying.traces import Request, Restart, Step, Trace

OURS: Final = ("tensord", "tensord+steps", "tensord-ideal")
NAMES: Final = (*OURS, *PEERS)


def suits(name: str, trace: Trace) -> bool:
    """True if the policy can differ from the others on this trace."""
    return name != "tensord+steps" or tells_steps(trace)


def tells_steps(trace: Trace) -> bool:
    """True if the trace records the ends of agents' calls."""
    return any(isinstance(event, Step) for event in trace.events)


def replay(name: str, trace: Trace, capacity_bytes: int, policy: str) -> Counts:
    """Replays a trace through a cache of `capacity_bytes`. `policy`: the store's, by its name in the configuration."""
    peer = PEERS.get(name)
    if peer is not None:
        return peer(trace, capacity_bytes)
    store = (Ideal if name == "tensord-ideal" else Real)(trace, policy, capacity_bytes)
    for event in trace.events:
        if isinstance(event, Request):
            store.ask(event)
        elif isinstance(event, Restart):
            store.restart(event)
        elif name == "tensord+steps":
            store.step(event)
    return store.counts
