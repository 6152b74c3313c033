"""The parts of a put by themselves: places are asked for ahead of need, an inbox returns pages, outcomes are right."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tensord.client.writing.arena import Arena
from tensord.client.writing.memory import Inbox
from tensord.client.writing.outcomes import Outcomes, Put
from tensord.client.writing.wire import Granted
from tensord.errors import DaemonUnavailable, LimitReached
from tensord.shm.ring.layout import LANE_BYTES, PAGE_BYTES

from ...daemon_process import PATIENCE_S
from ...memory_bench import key


def soon() -> float:
    return time.monotonic() + PATIENCE_S


class Asked:
    """A wire that keeps what is asked, and answers when a test says so."""

    def __init__(self) -> None:
        self.bells = self.requests = 0
        self.asked: list[tuple[int, list[int], list[int]]] = []
        self.answer: Any = None

    def next_request(self) -> int:
        self.requests += 1
        return self.requests

    def ask_for_grants(
        self,
        request: int,
        sizes: Sequence[int],
        returned: Sequence[int],
        timeout_s: float = 0.0,
        *,
        ahead: bool = False,
    ) -> bool:
        self.asked.append((request, list(sizes), list(returned)))
        if self.answer is not None and sizes:
            self.answer(request, sizes)
            self.bells += 1
        return True

    def wait_for_bell(self, seen: int, timeout_s: float) -> None:
        if self.bells == seen:
            # What was asked before, and is answered now.
            assert self.answer is not None and self.asked, "nothing answers"
            self.answer(*next(each[:2] for each in reversed(self.asked) if each[1]))
            self.bells += 1


def arena(size_bytes: int = 1 << 20, share_bytes: int = 1 << 20) -> tuple[Arena, Asked]:
    wire = Asked()
    return Arena(Inbox(size_bytes), cast(Any, wire), share_bytes), wire


def test_a_client_that_waits_for_a_large_place_gives_its_small_ones_back() -> None:
    """The daemon lends it nothing as long as it has more unused than its share, and than it asks for."""
    places, wire = arena(1 << 20, share_bytes=3000)
    places.granted(9, [Granted(number, number * 4096, 1024) for number in range(1, 9)])
    places._ahead_request = 1 << 40
    assert places.take(1024) is not None

    def answer(request: int, sizes: Sequence[int]) -> None:
        if len(wire.asked) == 1:
            # What was asked ahead comes first.
            places.granted(1 << 40, [Granted(number, number * 4096, 2048) for number in range(10, 20)])
        else:
            places.granted(request, [Granted(100, 1 << 16, sizes[0])])

    wire.answer = answer
    assert places.wait_for(4096, soon())[0].number == 100
    assert [len(returned) for *_, returned in wire.asked[:2]] == [4, 12]
    # The last of the small ones; and a place ahead of need, since no more than half was left.
    assert places.left_bytes == 4096 + 4096


def test_a_place_that_a_large_put_waits_for_is_not_taken_by_a_small_one_of_another_thread() -> None:
    places, wire = arena()
    smaller: list[int] = []

    def answer(request: int, sizes: Sequence[int]) -> None:
        # The answer comes to the thread of the connection, and a third thread is faster than the one that waits.
        places.granted(request, [Granted(request, 65536 * request, sizes[0])])
        if not smaller:
            smaller.append(0)
            assert places.take(256) is None
            smaller.append(places.wait_for(256, soon())[1])

    wire.answer = answer
    assert places.wait_for(4096, soon())[1] == 65536
    assert smaller[0] == 0 and 65536 not in smaller


def test_a_connection_may_end_while_a_put_asks_for_further_places(monkeypatch: pytest.MonkeyPatch) -> None:
    places, _ = arena()
    places.granted(1, [Granted(1, 0, 1024), Granted(2, 1024, 4096)])
    looks = 0

    def looked(grants: list[Any], key: tuple[int]) -> int:
        nonlocal looks
        looks += 1
        found = bisect_left(grants, key)
        if looks == 2:
            places.end(DaemonUnavailable("it went away"))
        return found

    monkeypatch.setattr("tensord.client.writing.arena.bisect_left", looked)
    assert places.take(4096) is not None
    assert looks == 2, "the second one is for further places, and finds a grant that is too small"
    with pytest.raises(DaemonUnavailable):
        places.wait_for(4096, soon())


def test_a_payload_stays_until_its_record_was_carried_out_whenever_its_put_ends() -> None:
    written = settled = 5
    places: list[object] = []

    def progress() -> tuple[int, int]:
        """Another thread ends its put, record 6, right after the numbers are read."""
        nonlocal written
        found = written, settled
        if places:
            written = 6
            places.clear()
        return found

    inbox = Inbox(16 * PAGE_BYTES, progress)
    places.append(inbox.hold(Granted(1, 0, 4 * PAGE_BYTES)))
    inbox.bytes[: 4 * PAGE_BYTES] = b"x" * (4 * PAGE_BYTES)
    for _ in range(3):
        inbox.tidy()
        assert bytes(inbox.bytes[: 4 * PAGE_BYTES]) == b"x" * (4 * PAGE_BYTES)
    assert not places
    settled = 6
    inbox.tidy()
    assert not any(inbox.bytes[: 4 * PAGE_BYTES])
    inbox.close()


LANE = 3


def test_a_refusal_that_comes_before_the_put_is_noted_is_not_lost() -> None:
    settled, refusals, lane = (memoryview(bytearray(size)).cast("Q") for size in (64, 64, LANE_BYTES))
    outcomes = Outcomes(lane, settled, refusals, LANE, cast(Any, Asked()))
    refusals[LANE] += 1
    outcomes.refused(1, LimitReached("full"))
    settled[LANE] = 1
    put = Put(key(1))
    outcomes.note(put, 1)
    assert put.state == "refused"


def test_more_is_asked_for_as_soon_as_half_is_left() -> None:
    """Of two large places the daemon makes the next two while the first one is written, not only the second."""
    places, wire = arena()
    places.granted(1, [Granted(number, number * 4096, 4096) for number in (1, 2)])
    assert places.take(4096) is not None
    assert len(wire.asked) == 1
