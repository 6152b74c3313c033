"""Every policy that replays a trace, by the name in its rows.

The store's policy has three rows: in the store (`tensord`), there with the ends of agents' calls (`tensord+steps`), and
in a cache without fragmentation (`tensord-ideal`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from replaying.counts import Counts
from replaying.ideal import Ideal
from replaying.peers import PEERS
from replaying.real import Real
from replaying.traces import Step, Trace

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
    stores: dict[str, Callable[[], Ideal | Real]] = {
        "tensord": lambda: Real(trace, policy, capacity_bytes),
        "tensord+steps": lambda: Real(trace, policy, capacity_bytes, steps=True),
        "tensord-ideal": lambda: Ideal(trace, policy, capacity_bytes),
    }
    return stores[name]().run()
