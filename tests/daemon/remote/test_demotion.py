"""What is evicted so that the host gets memory back is written to the remote store first, if it can be in time.

The whole core with deadlines, full stores and pressure that ends: tests/daemon/core/test_demotion.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.forms.effects import SaveRemote
from tensord.daemon.remote import writes
from tensord.ipc.messages import control as messages

from ..core.stand import key
from .stand import FOUND, REMOTE, Make, RemoteStand


def staying(stand: RemoteStand, *numbers: int) -> set[int]:
    """Those of the victims that stay for now."""
    outbox = stand.store.parts.outbox
    outbox.now = stand.now
    rows = [stand.store.parts.table.by_key[key(number)] for number in numbers]
    stay = stand.room.writes.staying(rows, stand.now)
    stand.take(outbox.take())
    return {number for number, row in zip(numbers, rows, strict=True) if row in stay}


def waits(stand: RemoteStand) -> bool:
    """Whether giving memory back waits for the store."""
    return stand.room.writes.waits


def full(make: Make, count: int = 8, **limits: Any) -> RemoteStand:
    """Entries of which nobody knows what computing costs."""
    stand = make(**{**REMOTE, **limits})
    for number in range(count):
        stand.put(number)
    assert not stand.remote
    return stand


def written(stand: RemoteStand) -> list[bytes]:
    """The keys that are being written."""
    return [write.key for write, _ in stand.writes if isinstance(write, SaveRemote)]


@pytest.mark.parametrize("why", ["written", "not worth it", "fetched", "child", "no writes", "no store"])
def test_nothing_for_the_store_goes_at_once(make: Make, why: str) -> None:
    off: dict[str, dict[str, Any]] = {"no writes": {"remote_writes": False}, "no store": {"remote_s": 0.0}}
    stand = make(**{**REMOTE, **off.get(why, {})})
    if why == "fetched":
        stand.remote[key(1)] = FOUND
        stand.send(1, messages.RequestClaim(1, key(1), 0.5))
        stand.settle()
    elif why == "child":
        stand.put(0)
        stand.put(1, parent=key(0))
    elif why == "not worth it":
        stand.remote[key(2)] = FOUND
        stand.send(1, messages.RequestClaim(1, key(2), 0.5))
        stand.seek(answer_s=0.1)
        stand.put(1, cost_ms=1.0)
    else:
        stand.put(1, cost_ms=9.0 if why == "written" else 0.0)
    assert staying(stand, 1) == set() and not written(stand)
    assert not waits(stand)


def test_more_than_the_queue_holds_is_written_in_parts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "QUEUED_MAX", 3)
    stand = full(make)
    rest = list(range(8))
    while stay := staying(stand, *rest):
        stand.settle()
        rest = [number for number in rest if number not in stay or key(number) not in stand.remote]
    assert set(stand.remote) == {key(number) for number in range(8)}


def test_what_is_about_to_go_is_written_before_what_waits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "QUEUED_MAX", 4)
    stand = full(make)
    for number in range(10, 15):
        stand.put(number, cost_ms=9.0, settles=False)
    waits = len(stand.room.writes.queue)
    assert waits == 4
    assert staying(stand, 0, 1) == {0, 1}
    assert len(stand.room.writes.queue) == waits and stand.counted["dropped"] == 2, "the newest make room"
    stand.write_remote()
    assert written(stand) == [key(0)]
    stand.write_remote()
    assert written(stand) == [key(1)]
