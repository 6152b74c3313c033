"""The interface of neighbours: servers on the host that are no clients, and can be asked for their card's memory.

Owns: these types, and the registration of adapters. Does not own any adapter, nor when a neighbour is asked (the
governor's core), nor in which thread (the governor's actor).

An adapter registers itself by one call of `offer` in its module.

Invariant: whatever a neighbour does ends as a NeighbourFailed or a result, within the time of its `Http`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from .http import Http, NeighbourFailed

__all__ = ["ADAPTERS", "Neighbour", "NeighbourFailed", "NeighbourKind", "offer"]


class Neighbour(Protocol):
    """A server that can give memory of its card back. Both methods block; a thread calls them, once each."""

    def busy(self) -> str:
        """Why the neighbour is to be left alone; "" if it is idle and has something to give back.

        Raises:
            NeighbourFailed: it did not say.
        """
        ...

    def free(self) -> str:
        """Has it give its memory back. What it has freed, and when, only the card's gauge shows.

        Returns:
            What it was not asked to give back, and what to do; "" if it was asked for all.

        Raises:
            NeighbourFailed: it refused, or did not answer.
        """
        ...


@dataclass(frozen=True, slots=True)
class NeighbourKind:
    """A kind of neighbour. `port`: the usual one. `make`: makes the neighbour behind a server."""

    kind: str
    port: int
    make: Callable[[Http], Neighbour]


ADAPTERS: Final[dict[str, NeighbourKind]] = {}
"""By kind: the adapters imported so far. `registry` imports all of them."""


def offer(kind: str, port: int, make: Callable[[Http], Neighbour]) -> None:
    """Registers an adapter. The arguments are those of `NeighbourKind`."""
    assert kind not in ADAPTERS, f"two adapters are named {kind}"
    ADAPTERS[kind] = NeighbourKind(kind, port, make)
