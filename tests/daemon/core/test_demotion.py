"""What is evicted so that the host gets memory back is written to the remote store first, if it can be in time.

| victims                                | disturbance                  | test                                  |
|----------------------------------------|------------------------------|---------------------------------------|
| for pages: pressure, a lowered limit   | none                         | is_written_before_it_goes             |
| idle entries in an emergency           | none                         | idle_entries_are_written              |
| for a put                              | none                         | puts_wait_for_no_store                |
| nothing for the store                  | none                         | nothing_for_the_store_goes_at_once    |
| any                                    | store does not answer        | is_held_up_no_longer                  |
| any                                    | … and then neither           | has_ended_no_write_since              |
| any                                    | store is full, fails, opens  | is_tried_once, left_alone             |
| more than the queue holds              | none                         | in_parts, larger_than_the_queue       |
| any                                    | pressure ends, key evicted   | pressure_that_ends, evicted_by_name   |
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tensord.daemon.core.effects import SaveRemote
from tensord.daemon.core.events import LimitsChanged, Tick
from tensord.daemon.core.host_memory import Pressed
from tensord.daemon.core.remote.breaker import FAILURES_MAX
from tensord.daemon.core.remote.demotion import DEMOTION_S
from tensord.daemon.core.remote.writes import WRITES_MAX
from tensord.errors import TierFull, TierUnavailable
from tensord.ipc import messages
from tensord.shm.layout import SPAN_HEADER_BYTES

from .blocks import block
from .remote_stand import REMOTE, ask
from .stand import Make, Stand, key

PAGE = 256
RING = 64 * PAGE
PAYLOAD = 4 * PAGE - SPAN_HEADER_BYTES
QUEUE: dict[str, Any] = {**REMOTE, "remote_queue_bytes": RING}
REASON = "the host is at 97 %, and 96 % is the limit"


def full(make: Make, **limits: Any) -> Stand:
    """Sixteen entries of four times PAGE, whose costs nobody knows, the first the coldest; and nothing else."""
    stand = make(RING, page_bytes=PAGE // 4, **{**QUEUE, **limits})
    for number in range(16):
        assert stand.put(number, PAYLOAD) == "stored"
    assert not stand.remote
    return stand


def give_back(stand: Stand, pages: int) -> None:
    """The governor wants so many times PAGE. Nothing that follows is carried out yet."""
    stand.do(Pressed(RING - pages * PAGE))
    stand.go_on()


def keys(*numbers: int) -> set[bytes]:
    return set(map(key, numbers))


def written(stand: Stand) -> list[bytes]:
    """The keys that are being written."""
    return [write.key for write, _ in stand.writes if isinstance(write, SaveRemote)]


def counted(stand: Stand) -> dict[str, int]:
    found: dict[str, int] = stand.store.status()["remote"]
    return found


@pytest.mark.parametrize("how", ["pressure", "limit", "reload"])
def test_what_is_evicted_for_memory_is_written_before_it_goes(make: Make, how: str) -> None:
    stand = full(make)
    if how == "pressure":
        give_back(stand, 8)
    elif how == "limit":
        stand.send(2, messages.Limit(1, RING - 8 * PAGE))
    else:
        stand.do(LimitsChanged(replace(stand.limits, max_bytes=RING - 8 * PAGE)))
    assert not stand.scans and set(written(stand)) == keys(0, 1)
    assert stand.stored() == set(range(16)), "they serve while they are written"
    assert stand.holds is None or not stand.holds.settled
    stand.settle()
    assert set(stand.remote) == keys(0, 1)
    assert stand.stored() == set(range(2, 16))
    assert counted(stand) == {"written": 2, "demoted": 2}
    assert stand.store.status()["evictions"] == {"pressure" if how == "pressure" else "capacity": 2}
    assert stand.store.status()["resident_bytes"] == RING - 8 * PAGE
    stand.press()
    assert ask(stand, number=0).answer == "wait"
    stand.settle()
    assert stand.find(key(0)) is not None, "it comes back"


def test_idle_entries_are_written_before_an_emergency_ends_them(make: Make) -> None:
    stand = full(make)
    stand.now = 40.0
    stand.send(1, messages.Touch(1, [key(3)]))
    stand.do(Pressed(None, 30.0, refuse=True, reason=REASON))
    stand.go_on()
    assert stand.stored() == set(range(16))
    stand.settle()
    assert stand.stored() == {3}
    assert set(stand.remote) == keys(*range(16)) - keys(3)
    assert stand.store.status()["evictions"] == {"emergency": 15}
    assert counted(stand)["demoted"] == 15


def test_more_idle_entries_than_one_slice_are_written(make: Make) -> None:
    stand = make(1 << 18, max_entries=1000, **{**REMOTE, "remote_queue_bytes": 1 << 18})
    for number in range(600):
        assert stand.put(number) == "stored"
    stand.now = 40.0
    stand.press(None, idle_s=30.0, refuse=True, reason=REASON)
    assert not stand.stored()
    assert len(stand.remote) == counted(stand)["demoted"] == 600


def test_an_entry_that_the_store_has_goes_at_once(make: Make) -> None:
    stand = full(make)
    stand.recorded.append(stand.pin(0).span_id)
    stand.views.clear()
    stand.drain()
    stand.settle()
    assert set(stand.remote) == keys(0)
    for number in range(1, 16):
        stand.send(1, messages.Touch(1, [key(number)]))
    give_back(stand, 4)
    assert stand.scans and not stand.writes
    stand.settle()
    assert stand.stored() == set(range(1, 16))
    assert counted(stand) == {"written": 1}


@pytest.mark.parametrize("why", ["off", "reads only", "left alone", "generation", "quick"])
def test_nothing_for_the_store_goes_at_once(make: Make, why: str) -> None:
    changed: dict[str, dict[str, Any]] = {"off": {"remote_s": 0.0}, "reads only": {"remote_writes": False}}
    stand = make(RING, page_bytes=PAGE // 4, **{**QUEUE, **changed.get(why, {})})
    generation = 77 if why == "generation" else 0
    for number in range(16):
        assert stand.put(key(number, generation=generation), PAYLOAD) == "stored"
    if why == "left alone":
        for _ in range(FAILURES_MAX):
            stand.store.link.failed(TierUnavailable("refused"), stand.now, probe=False)
    if why == "quick":
        stand.store.link.speed.answer_s.add(0.5, stand.now)
        for entry in stand.store.memory.entries:
            entry.cost_ms = 100.0
    give_back(stand, 8)
    assert stand.scans and not stand.writes
    stand.settle()
    assert stand.store.status()["evictions"] == {"pressure": 2}
    assert not counted(stand).keys() - {"not_worth"}


def test_children_and_blocks_of_sequences_go_at_once_and_their_root_is_written(make: Make) -> None:
    stand = make(RING, page_bytes=PAGE // 4, **QUEUE)
    assert stand.put(1, PAYLOAD) == "stored"
    assert stand.put(2, PAYLOAD, parent=key(1)) == "stored"
    assert stand.put_block(block([1])) == "stored"
    stand.do(Pressed(0))
    stand.go_on()
    assert written(stand) == [key(1)]
    stand.scan()
    assert stand.stored() == {1}
    stand.settle()
    assert not stand.stored()
    assert set(stand.remote) == keys(1)


@pytest.mark.parametrize("writes", ["waits", "is under way"])
def test_a_child_whose_write_waits_does_not_outlast_its_parent(make: Make, writes: str) -> None:
    stand = make(RING, page_bytes=PAGE // 4, **QUEUE)
    assert stand.put(1, PAYLOAD, cost_ms=9.0) == "stored"
    stand.settle()
    assert key(1) in stand.remote, "nothing holds the parent"
    for number in range(2, 9 if writes == "waits" else 3):
        stand.commit(1, number, key(number), 64, cost_ms=9.0, at=0, parent=key(1))
        stand.copy()
    assert key(2) in written(stand) and (key(8) not in written(stand)), "several writes are under way, and others wait"
    stand.do(Pressed(0))
    stand.go_on()
    stand.settle()
    assert not stand.stored()


def test_puts_wait_for_no_store(make: Make) -> None:
    stand = full(make)
    stand.commit(1, 100, key(100), PAYLOAD, at=0)
    stand.scan()
    stand.copy()
    assert stand.ended(1, 100) == "stored" and not stand.writes


def test_memory_is_held_up_no_longer_than_its_deadline(make: Make) -> None:
    stand = full(make)
    give_back(stand, 16)
    held = list(stand.writes)
    stand.writes.clear()
    stand.now = DEMOTION_S - 0.01
    stand.do(Tick())
    assert not stand.scans and stand.stored() == set(range(16))
    stand.now = DEMOTION_S
    assert stand.store.next_timer() == DEMOTION_S
    stand.go_on()
    stand.settle()
    # What a thread reads stays, whatever for; others go for it.
    assert stand.stored() == {0, 1, *range(6, 16)}
    assert stand.store.status()["resident_bytes"] == RING - 16 * PAGE
    assert counted(stand) == {"dropped": 4}
    assert stand.store.status()["remote_state"]["queued"] == 0
    stand.writes.extend(held)
    stand.settle()
    assert counted(stand) == {"written": 2, "dropped": 4}


def test_the_next_time_that_memory_is_given_back_has_a_deadline_of_its_own(make: Make) -> None:
    stand = full(make)
    give_back(stand, 4)
    stand.now = 2 * DEMOTION_S
    stand.go_on()
    stand.settle()
    stand.now += 10 * DEMOTION_S
    give_back(stand, 8)
    assert not stand.scans and stand.writes
    stand.settle()
    assert counted(stand)["demoted"] == 1


def test_a_store_that_has_ended_no_write_since_it_was_late_holds_nothing_up(make: Make) -> None:
    stand = full(make)
    give_back(stand, 8)
    held = list(stand.writes)
    stand.writes.clear()
    stand.now = DEMOTION_S
    stand.go_on()
    stand.settle()
    give_back(stand, 16)
    assert stand.scans, "it goes at once"
    stand.settle()
    assert counted(stand) == {"dropped": 4}
    stand.writes.extend(held)
    stand.settle()
    give_back(stand, 24)
    assert not stand.scans and stand.writes
    stand.settle()
    assert counted(stand)["demoted"] == 2


def test_a_full_store_holds_nothing_up(make: Make) -> None:
    stand = full(make)
    give_back(stand, 16)
    for _ in range(2):
        stand.write_remote(error=TierFull("full"))
    assert not stand.writes and stand.scans
    stand.settle()
    assert stand.stored() == set(range(4, 16))
    assert counted(stand) == {"write_failed": 2, "dropped": 2}
    give_back(stand, 24)
    assert not stand.writes


def test_a_store_that_is_left_alone_meanwhile_holds_nothing_up(make: Make) -> None:
    stand = full(make)
    give_back(stand, 8 * 4)
    for _ in range(FAILURES_MAX):
        stand.write_remote(error=TierUnavailable("connection refused"))
    assert stand.scans
    stand.settle()
    assert len(stand.stored()) == 8


def test_more_than_the_queue_holds_is_written_in_parts(make: Make) -> None:
    stand = full(make, remote_queue_bytes=3 * PAYLOAD)
    give_back(stand, 40)
    assert stand.store.status()["remote_state"]["queued"] == 1, "two are under way, and none was dropped for the others"
    stand.settle()
    assert set(stand.remote) == keys(*range(10))
    assert stand.stored() == set(range(10, 16))
    assert counted(stand) == {"written": 10, "demoted": 10}


def test_an_entry_that_is_larger_than_the_queue_goes_at_once(make: Make) -> None:
    stand = full(make, remote_queue_bytes=PAYLOAD - 1)
    give_back(stand, 8)
    assert stand.scans and not stand.writes
    assert counted(stand) == {"dropped": 2}


def test_what_is_about_to_go_is_written_before_what_waits(make: Make) -> None:
    stand = full(make, remote_queue_bytes=4 * PAYLOAD)
    for number in range(4, 10):
        # They are warm, and wait for their write.
        stand.recorded.append(stand.pin(number).span_id)
    stand.views.clear()
    stand.drain()
    assert stand.store.status()["remote_state"]["queued"] == 4
    give_back(stand, 12)
    for _ in range(WRITES_MAX):
        stand.write_remote()
    assert set(written(stand)) == keys(0, 1)
    assert counted(stand)["dropped"] == 3
    stand.settle()
    assert keys(0, 1, 2) <= set(stand.remote) and not stand.stored() & {0, 1, 2}


def test_pressure_that_ends_spares_what_waited(make: Make) -> None:
    stand = full(make)
    give_back(stand, 16)
    stand.do(Pressed())
    stand.settle()
    assert stand.stored() == set(range(16))
    assert counted(stand) == {"written": 4}


def test_a_key_that_is_evicted_by_name_while_it_waits_is_not_written(make: Make) -> None:
    stand = full(make)
    give_back(stand, 16)
    stand.send(1, messages.Evict(3, [key(number) for number in range(4)]))
    stand.settle()
    assert not stand.remote
    assert stand.stored() == set(range(4, 16))


def test_what_is_of_a_generation_that_the_store_does_not_have_is_not_counted_as_demoted(make: Make) -> None:
    stand = make(RING, page_bytes=PAGE // 4, **QUEUE)
    stand.remote_generations[key(0)[:8]] = 3
    for number in range(16):
        # Nothing has asked the store for its generation yet.
        stand.commit(1, number, key(number), PAYLOAD, at=0)
        stand.copy()
    give_back(stand, 8)
    assert len(stand.writes) == WRITES_MAX
    stand.settle()
    assert not stand.remote and not stand.stored()
    assert "demoted" not in counted(stand)
