"""Places never overlap, grants are asked for ahead of need, and each is returned once."""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Sequence
from mmap import mmap
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tensord.client.writing.arena import LEAST_BYTES, Arena
from tensord.client.writing.memory import RingMemory, WritableMemory
from tensord.client.writing.wire import Granted
from tensord.errors import DaemonUnavailable, StoreFull, TensordError
from tensord.shm.index.index import IndexReader
from tensord.shm.ring.layout import LANE_WORDS

from ...daemon_process import PATIENCE_S
from ...memory_bench import MemoryBench, key, memory_file


def soon() -> float:
    return time.monotonic() + PATIENCE_S


class Asked:
    """A wire that keeps what is asked, and answers when a test says so."""

    def __init__(self) -> None:
        self.bells = self.requests = 0
        self.takes = True
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
        if not self.takes:
            return False
        self.asked.append((request, list(sizes), list(returned)))
        if self.answer is not None and sizes:
            self.answer(request, sizes)
            self.bells += 1
        return True

    def ring_to_wait(self) -> None:
        raise AssertionError("the arena rings no bell")

    def ring_bell(self) -> bool:
        raise AssertionError("the arena rings no bell")

    def wait_for_bell(self, seen: int, timeout_s: float) -> None:
        if self.bells == seen:
            # What was asked before, and is answered now.
            assert self.answer is not None and self.asked, "nothing answers"
            self.answer(*next(each[:2] for each in reversed(self.asked) if each[1]))
            self.bells += 1


def arena(size_bytes: int = 1 << 20, share_bytes: int = 1 << 20) -> tuple[Arena, Asked]:
    wire = Asked()
    return Arena(WritableMemory(memory_file(size_bytes)), cast(Any, wire), share_bytes), wire


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
    assert [len(returned) for *_, returned in wire.asked] == [4, 12]
    assert places.left_bytes == 4096


def test_a_put_joins_a_request_that_is_under_way_and_asks_by_itself_once_that_is_refused() -> None:
    """Else the requests of puts that found their place otherwise would pile up at the daemon."""
    places, wire = arena()
    places.granted(9, [Granted(1, 0, 4096)])
    while places.take(1024) is not None:
        pass
    [(ahead, _, _)] = wire.asked
    wire.answer = lambda request, sizes: places.granted(request, [Granted(2, 8192, 4096)])
    assert places.wait_for(1024, soon())[1] == 8192
    assert [request for request, *_ in wire.asked] == [ahead]
    wire.answer = None
    while places.take(1024) is not None:
        pass
    wire.answer = lambda request, sizes: places.granted(request, [], StoreFull(f"request {request}"))
    with pytest.raises(StoreFull, match=f"request {wire.asked[-1][0] + 1}"):
        places.wait_for(1024, soon())


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


def test_a_client_that_is_asked_for_unused_places_gives_back_all_of_them() -> None:
    places, wire = arena()
    places.granted(1, [Granted(number, 4096 * number, 4096) for number in range(1, 9)])
    in_use = places.take(1024)
    places.give_back()
    assert in_use is not None and places.left_bytes == 0
    assert sorted(number for *_, numbers in wire.asked for number in numbers) == sorted(
        {*range(1, 9)} - {in_use[0].number}
    )


def test_twice_the_places_taken_in_the_last_second_are_kept_and_the_others_go_back() -> None:
    places, wire = arena()
    places.granted(1, [Granted(number, 4096 * number, 4096) for number in range(1, 9)])
    taken = [places.take(4096) for _ in range(2)]
    for given_back in (2, 6):
        places.rest()
        assert len([number for *_, numbers in wire.asked for number in numbers]) == given_back
    assert all(taken) and places.left_bytes == 0


def test_a_place_of_the_ring_is_pinned_unless_it_was_taken_back_or_its_lane_is_full_or_frozen() -> None:
    with MemoryBench() as bench:
        slot = bench.write(key(1), np.zeros(100))
        assert slot is not None
        granted = Granted(1, slot.offset, 1024, slot.span_id, slot.number, slot.seq)
        lane = bench.lane()
        index = IndexReader(mmap(bench.index_fd, bench.geometry.index_bytes), bench.geometry)
        memory = RingMemory(bench.ring_fd, lane, index)
        pins = [memory.hold(granted) for _ in range(LANE_WORDS)]
        assert all(pin is not None for pin in pins)
        with pytest.raises(IndexError):
            memory.hold(granted)
        pins.clear()
        bench.slots.revoke(slot.number)
        assert memory.hold(granted) is None
        gc.collect()
        assert not bench.pins()
        lane.freeze()
        assert memory.hold(granted) is None, "a frozen lane is not taken for a full one"


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


class Places(RuleBasedStateMachine):
    """Grants and places against a model: every byte is lent once, taken once, and returned once."""

    @initialize()
    def begin(self) -> None:
        self.places, self.wire = arena(1 << 24)
        self.next = 0
        self.number = 0
        self.lent: dict[int, tuple[int, int]] = {}
        self.taken: list[tuple[int, int, int]] = []
        self.answered = 0

    @rule(sizes=st.lists(st.integers(4, 200), min_size=0, max_size=5))
    def grant(self, sizes: list[int]) -> None:
        grants = []
        for size in sizes:
            self.number += 1
            grants.append(Granted(self.number, self.next, size * 64))
            self.lent[self.number] = (self.next, self.next + size * 64)
            self.next += size * 64
        request = self.wire.asked[-1][0] if self.wire.asked else 1
        self.places.granted(request, grants)

    @rule(size=st.integers(4, 120))
    def take(self, size: int) -> None:
        taken = self.places.take(size * 64)
        if taken is not None:
            self.taken.append((taken[1], taken[1] + size * 64, taken[0].number))

    @rule()
    def quiet(self) -> None:
        self.places.rest()
        self.places.rest()

    @rule(size=st.integers(4, 120))
    def wait(self, size: int) -> None:
        self.wire.answer = lambda request, sizes: self.places.granted(request, [], StoreFull("no room"))
        try:
            # Not for long: a request under way may never be answered here.
            grant, offset = self.places.wait_for(size * 64, time.monotonic() + 0.1)
            self.taken.append((offset, offset + size * 64, grant.number))
        except TensordError:
            pass
        self.wire.answer = None

    @invariant()
    def places_lie_in_their_grants_and_beside_each_other(self) -> None:
        end = 0
        for low, high, number in sorted(self.taken):
            assert end <= low
            end = high
            assert self.lent[number][0] <= low < high <= self.lent[number][1]
        returned = [number for *_, numbers in self.wire.asked for number in numbers]
        returned += [self.places._numbers[each] for each in self.places._over]
        held = [number for _, number, _ in self.places._grants]
        assert sorted(returned + held) == sorted(self.lent)
        assert self.places.left_bytes == sum(left for left, *_ in self.places._grants)
        assert self.places._grants == sorted(self.places._grants, key=lambda each: each[:2])
        assert all(left >= LEAST_BYTES for left, *_ in self.places._grants)


Places.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPlaces = Places.TestCase
