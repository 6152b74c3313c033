"""A whole store with a remote store behind it, whose answers the test gives one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tensord.daemon.forms.events import RemoteEntry
from tensord.daemon.remote.remote import Remote
from tensord.errors import TensordError, TierUnavailable
from tensord.ipc.messages import control as messages
from tensord.shm.index.generations import GenerationWriter
from tensord.shm.ring.layout import SpanHeader

from ..core.stand import SPAN as SPAN
from ..core.stand import Stand, key

REMOTE: dict[str, Any] = {"remote_s": 2.0, "remote_writes": True}
FOUND = RemoteEntry(64, 16, tokens=3, cost_ms=8.0, checksum=7)


class RemoteStand(Stand):
    """One host with clients 1, 2 and 3. `reached`: whether its remote store has answered it already."""

    answers_remote = True
    """Whether `settle` lets the remote store answer."""

    def __init__(self, ring_bytes: int = 1 << 16, *, reached: bool = True, **limits: Any) -> None:
        super().__init__(ring_bytes, **limits)
        self.join(1, 2, 3)
        if reached:
            self.settle()

    @property
    def room(self) -> Remote:
        return self.store.parts.remote

    @property
    def generations(self) -> GenerationWriter:
        return self.index.generations

    @property
    def counted(self) -> Counter[str]:
        return self.store.counters.remote.copy()

    def state(self) -> dict[str, Any]:
        """What status says of the remote store."""
        state = self.room.state(self.now)
        assert state is not None
        return state

    def header_of(self, name: bytes) -> SpanHeader:
        """The header of a stored key."""
        table = self.store.parts.table
        return self.header(table.offsets[table.by_key[name]])

    def put(self, number: int | bytes, *args: Any, settles: bool = True, **more: Any) -> str:
        """As in `Stand`. `settles=False`: the remote store answers nothing meanwhile."""
        self.answers_remote = settles
        try:
            return super().put(number, *args, **more)
        finally:
            self.answers_remote = True

    @property
    def remote_waits(self) -> bool:
        return self.answers_remote and super().remote_waits

    def settle_remote(self) -> None:
        if self.answers_remote:
            super().settle_remote()


def ask(stand: RemoteStand, client: int = 1, number: int = 1, within_s: float = 0.5) -> messages.Claimed:
    """A client asks for the claim on a missing key. What it is answered at once."""
    request = stand.next_request()
    stand.send(client, messages.RequestClaim(request, key(number), within_s))
    answer: messages.Claimed = stand.last(client)
    assert answer.id == request
    return answer


def verdicts(stand: RemoteStand, client: int = 1) -> list[str]:
    return [answer.answer for answer in stand.answers[client] if isinstance(answer, messages.Claimed)]


def fail(stand: RemoteStand, number: int, error: TensordError | None = None) -> None:
    """A client's read fails, and it computes."""
    assert ask(stand, number=number).answer == "wait"
    stand.seek(error=error or TierUnavailable("connection refused"))
    assert verdicts(stand)[-1] == "compute"


def publish(stand: RemoteStand, count: int, payload_bytes: int = 64) -> None:
    """Publishes entries that are worth their write, with the keys of 0 to `count` - 1. Nothing is written yet."""
    for number in range(count):
        stand.put(number, payload_bytes, cost_ms=9.0, settles=False)
