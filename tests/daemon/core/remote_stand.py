"""Clients that ask for keys of a core with a remote store."""

from __future__ import annotations

from typing import Any

from tensord.daemon.core.events import RemoteFound
from tensord.errors import TierUnavailable
from tensord.ipc import messages

from .stand import Stand, key

REMOTE: dict[str, Any] = {"remote_s": 2.0, "remote_writes": True, "remote_queue_bytes": 1000}
FOUND = RemoteFound(64, 16, tokens=3, cost_ms=8.0)


def ask(stand: Stand, client: int = 1, number: int = 1, within_s: float = 0.5) -> messages.Claimed:
    """A client asks for the claim on a missing key. What it is answered at once."""
    request = 1000 + len(stand.answers[client])
    stand.send(client, messages.RequestClaim(request, key(number), within_s))
    answer: messages.Claimed = stand.last(client)
    assert answer.id == request
    return answer


def verdicts(stand: Stand, client: int = 1) -> list[str]:
    return [answer.answer for answer in stand.answers[client] if isinstance(answer, messages.Claimed)]


def publish(stand: Stand, count: int, payload_bytes: int = 64) -> None:
    """Publishes entries that are worth their write, with the keys of 0 to `count` - 1. Nothing is written yet."""
    for number in range(count):
        stand.commit(1, number, key(number), payload_bytes, cost_ms=9.0, at=0)
        stand.copy()


def fail(stand: Stand, number: int, error: Any = None) -> None:
    """A client's read fails, and it computes."""
    assert ask(stand, number=number).answer == "wait"
    stand.seek(error=error or TierUnavailable("connection refused"))
    assert verdicts(stand)[-1] == "compute"
