"""Entries that go for host memory are written to the remote store first, through the whole core.

What the remote store does meanwhile is in tests/daemon/remote/test_writes.py, which pages go in
tests/daemon/core/test_host_memory.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tensord.daemon.forms.effects import SaveRemote
from tensord.daemon.forms.events import LimitsChanged, Pressed, Tick
from tensord.daemon.remote.writes import DEMOTION_S
from tensord.errors import TierFull, TierTimedOut
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import PAGE_BYTES, SPAN_HEADER_BYTES

from .blocks import block
from .stand import Make, Stand, key

RING = 16 * PAGE_BYTES
PAYLOAD = PAGE_BYTES - SPAN_HEADER_BYTES
QUEUE: dict[str, Any] = {"remote_s": 2.0, "remote_writes": True}
STORED = set(range(15))


def full(make: Make, **limits: Any) -> Stand:
    """Fifteen entries of a page each, whose costs nobody knows, the first the coldest. One page is free."""
    stand = make(RING, **{**QUEUE, **limits})
    for number in (99, *range(15)):
        assert stand.put(number, PAYLOAD) == "stored"
    stand.send(1, messages.Evict(1, [key(99)]))
    stand.settle()
    assert not stand.remote and stand.stored() == STORED
    stand.store.counters.evictions.clear()
    return stand


def give_back(stand: Stand, pages: int) -> None:
    """The governor wants so many pages. Nothing that follows is carried out yet, but for the page that is free."""
    stand.do(Pressed(RING - pages * PAGE_BYTES))
    stand.go_on()


def keys(*numbers: int) -> set[bytes]:
    return set(map(key, numbers))


def written(stand: Stand) -> set[bytes]:
    """The keys that are being written."""
    return {write.key for write, _ in stand.writes if isinstance(write, SaveRemote)}


@pytest.mark.parametrize("how", ["pressure", "limit", "reload"])
def test_what_is_evicted_for_memory_is_written_before_it_goes(make: Make, how: str) -> None:
    stand = full(make)
    if how == "pressure":
        give_back(stand, 3)
    elif how == "limit":
        stand.send(2, messages.Limit(1, RING - 3 * PAGE_BYTES))
    else:
        stand.do(LimitsChanged(replace(stand.limits, max_bytes=RING - 3 * PAGE_BYTES)))
    while stand.punches:
        stand.punch()
    assert not stand.scans and written(stand) == keys(0)
    assert stand.stored() == STORED, "they serve while they are written"
    assert stand.holds is None or not stand.holds.settled
    stand.settle()
    assert set(stand.remote) == keys(0, 1)
    assert stand.stored() == STORED - {0, 1}
    status = stand.store.status()
    assert status["remote"] == {"written": 2, "demoted": 2}
    assert status["evictions"] == {"pressure" if how == "pressure" else "capacity": 2}
    assert status["resident_bytes"] == RING - 3 * PAGE_BYTES
    stand.press()
    stand.send(1, messages.RequestClaim(1, key(0), 30.0))
    assert stand.last().answer == "wait"
    stand.settle()
    assert stand.last().answer == "hit" and stand.find(key(0)) is not None, "it comes back"


def test_children_and_blocks_of_sequences_go_at_once_and_their_root_is_written(make: Make) -> None:
    stand = make(RING, **QUEUE)
    assert stand.put(1, PAYLOAD) == "stored"
    assert stand.put(2, PAYLOAD, parent=key(1)) == "stored"
    assert stand.put_block(block([1])) == "stored"
    give_back(stand, 16)
    assert written(stand) == keys(1)
    stand.settle()
    assert not stand.stored()
    assert set(stand.remote) == keys(1)


def test_memory_is_held_up_no_longer_than_its_deadline(make: Make) -> None:
    stand = full(make)
    give_back(stand, 5)
    while stand.punches:
        stand.punch()
    reading = len(written(stand))
    stand.now = DEMOTION_S - 0.01
    stand.do(Tick())
    assert (stand.scans, stand.stored()) == (0, STORED)
    stand.now = DEMOTION_S
    assert stand.store.next_timer() == DEMOTION_S
    stand.go_on()
    assert stand.scans
    stand.scan()
    while stand.punches:
        stand.punch()
    # What a thread reads stays, whatever for.
    assert len(stand.stored()) <= 15 - (4 - reading)
    stand.settle()
    assert stand.store.status()["resident_bytes"] == RING - 5 * PAGE_BYTES


def test_a_full_store_holds_nothing_up(make: Make) -> None:
    stand = full(make)
    give_back(stand, 5)
    while stand.punches:
        stand.punch()
    stand.write_remote(error=TierFull("full"))
    assert not stand.writes and stand.scans
    stand.settle()
    assert stand.stored() == STORED - {0, 1, 2, 3}
    assert stand.store.status()["remote"] == {"write_failed": 1, "dropped": 3}


def test_an_entry_whose_write_fails_goes_unwritten(make: Make) -> None:
    stand = full(make)
    give_back(stand, 3)
    while stand.punches:
        stand.punch()
    stand.write_remote(error=TierTimedOut("slow"))
    stand.settle()
    assert stand.stored() == STORED - {0, 1}
    assert set(stand.remote) == keys(1)
