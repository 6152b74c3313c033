"""The governor's outbox: the effects of one event, the connected clients, and the counters.

Owns the log effects and the clients' names and pids. Does not own collecting and sending (`daemon.core.outbox`, whose
invariant holds here too).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...core.outbox import Outbox
from .counters import GovernorCounters
from .effects import Effect, GovernorLog


@dataclass(frozen=True, slots=True)
class GovernorClient:
    """The peer of a connection. `pid`: as it sees itself; `peer_pid`: as the daemon sees it, 0 if it does not."""

    name: str
    pid: int


class GovernorOutbox(Outbox[GovernorClient, Effect]):
    """The governor's outbox, with its counters."""

    def __init__(self) -> None:
        self.counters = GovernorCounters()
        super().__init__(self.counters.refused)

    def owned_elsewhere(self, owner: int, key: bytes, device: str) -> str:
        """Why a key cannot be registered, and what its second process can do."""
        peer = self.clients.get(owner)
        who = f"client {owner}" if peer is None else f"client {owner} ({peer.name}, pid {peer.pid})"
        return (
            f"{who} has registered key {key.hex()} on {device}, where a key has one entry: share the payload by "
            "Client.put, which both processes read, or register this copy under a key with a parameter of this process"
        )

    def log(self, level: str, event: str, **fields: Any) -> None:
        """Writes one log line for the operator."""
        self.add(GovernorLog(level, event, fields))
