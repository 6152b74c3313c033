"""The inbox against a plain table of regions: nothing overlaps, and nothing is reused while anybody may look at it."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
import time
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensord.client.core.inbox import Inbox, Region
from tensord.client.core.reservation import Reservation
from tensord.shm.inbox import INBOX_SEALS
from tensord.shm.layout import aligned

from ...interruptions import interrupt

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
INBOX_BYTES = 4096


class Taken:
    """A region as the test knows it: `region` until the daemon acknowledged it, `array` until its owner let go."""

    def __init__(self, number: int, region: Region, size_bytes: int) -> None:
        self.fill = number % 251 + 1
        self.offset = region.offset
        self.size_bytes = size_bytes
        self.region: Region | None = region
        self.array: Bytes | None = None
        assert region.memory is not None
        region.memory[:] = self.fill


class InboxAgainstTable(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.inbox = Inbox(INBOX_BYTES)
        self.table: dict[int, Taken] = {}
        self.made = 0

    def some(self, data: st.DataObject, wanted: str) -> Taken:
        return self.table[data.draw(st.sampled_from(self.those(wanted)))]

    def those(self, wanted: str) -> list[int]:
        return [n for n, taken in self.table.items() if getattr(taken, wanted) is not None]

    def settle(self) -> None:
        self.table = {n: t for n, t in self.table.items() if t.region is not None or t.array is not None}

    @rule(size_bytes=st.one_of(st.integers(1, 700), st.sampled_from([0, 2048, INBOX_BYTES, INBOX_BYTES + 1])))
    def take(self, size_bytes: int) -> None:
        # In the past: no test waits for room.
        region = self.inbox.take(size_bytes, time.monotonic() - 1)
        if region is None:
            assert self.largest_gap() < aligned(max(1, size_bytes)), "there was room"
            return
        assert not region.offset % 64
        assert region.memory is not None
        assert region.memory.shape == (size_bytes,)
        self.made += 1
        self.table[self.made] = Taken(self.made, region, size_bytes)

    def largest_gap(self) -> int:
        ends = [0]
        gaps = []
        for taken in sorted(self.table.values(), key=lambda taken: taken.offset):
            gaps.append(taken.offset - ends[-1])
            ends.append(taken.offset + aligned(max(1, taken.size_bytes)))
        return max([*gaps, INBOX_BYTES - ends[-1]])

    @precondition(lambda self: self.those("region"))
    @rule(data=st.data())
    def hand_out(self, data: st.DataObject) -> None:
        taken = self.some(data, "region")
        if taken.array is None and taken.region is not None and taken.region.memory is not None:
            taken.array = taken.region.hand_out()

    @precondition(lambda self: self.those("region"))
    @rule(data=st.data(), from_finalizer=st.booleans())
    def the_daemon_acknowledges(self, data: st.DataObject, from_finalizer: bool) -> None:
        taken = self.some(data, "region")
        region, taken.region = taken.region, None
        assert region is not None
        if from_finalizer:
            region.abandon_from_finalizer()
        else:
            region.release()
        self.settle()

    @precondition(lambda self: self.those("array"))
    @rule(data=st.data(), of_it=st.booleans())
    def the_owner_drops_the_array(self, data: st.DataObject, of_it: bool) -> None:
        taken = self.some(data, "array")
        assert taken.array is not None
        if of_it and taken.size_bytes > 1:
            # A view of the array is as good as the array.
            taken.array = taken.array[: max(1, taken.size_bytes // 2)]
            return
        taken.array = None
        self.settle()

    @rule()
    def the_cycle_collector_runs(self) -> None:
        # The younger generations: whatever this test made stands there, and Hypothesis' own is much.
        gc.collect(1)

    @invariant()
    def every_byte_has_one_owner(self) -> None:
        if not hasattr(self, "inbox"):
            return
        owned = [(t.offset, aligned(max(1, t.size_bytes))) for t in self.table.values()]
        assert self.inbox.used_bytes == sum(size for _, size in owned)
        memory = np.frombuffer(os.pread(self.inbox.fd, INBOX_BYTES, 0), np.uint8)
        for taken in self.table.values():
            assert (memory[taken.offset : taken.offset + taken.size_bytes] == taken.fill).all()

    def teardown(self) -> None:
        if not hasattr(self, "inbox"):
            return
        for taken in self.table.values():
            taken.array = None
            if taken.region is not None:
                taken.region.release()
        self.table.clear()
        assert self.inbox.used_bytes == 0, "room was lost for good"
        assert not self.inbox.watches
        self.inbox.close()


TestInboxAgainstTable = InboxAgainstTable.TestCase
TestInboxAgainstTable.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_an_array_keeps_its_region_though_all_else_of_it_was_collected() -> None:
    inbox = Inbox(4096)
    region = inbox.take(1000, 0)
    assert region is not None
    array = region.hand_out()
    region.release()
    del region
    gc.collect()
    assert inbox.used_bytes == 1024
    del array
    assert inbox.used_bytes == 0
    inbox.close()


@pytest.mark.parametrize("kind", ["region", "array", "reservation"])
def test_a_signal_handlers_exception_keeps_no_region_taken_while_its_last_holder_is_collected(kind: str) -> None:
    inbox = Inbox(4096)

    def never(*_: object) -> Any:
        raise AssertionError("nothing is committed")

    for number in count():
        region = inbox.take(1000, 0)
        assert region is not None
        held: list[object] = [region]
        if kind == "array":
            held = [region.hand_out()]
            region.release()
        elif kind == "reservation":
            held = [Reservation(region.hand_out(), region, never, object())]
        del region
        place = interrupt(number, held.clear)
        assert inbox.used_bytes == 0, place
        if not place:
            break
    assert not inbox.watches
    inbox.close()


def test_nobody_can_resize_an_inbox() -> None:
    inbox = Inbox(1000)
    assert inbox.size_bytes == 1024
    assert os.fstat(inbox.fd).st_size == 1024
    assert fcntl.fcntl(inbox.fd, fcntl.F_GET_SEALS) == INBOX_SEALS
    inbox.prefault()
    inbox.close()


def test_a_caller_that_waits_for_room_gets_it_when_a_region_is_freed() -> None:
    inbox = Inbox(1024)
    first = inbox.take(1024, 0)
    assert first is not None
    got: list[Region | None] = []
    waiter = threading.Thread(target=lambda: got.append(inbox.take(512, time.monotonic() + 60)))
    waiter.start()
    first.release()
    waiter.join()
    assert got[0] is not None
    inbox.close()


def test_a_caller_that_waits_for_room_gets_it_when_the_last_array_is_collected() -> None:
    inbox = Inbox(1024)
    first = inbox.take(1024, 0)
    assert first is not None
    arrays = [first.hand_out()]
    first.release()
    got: list[Region | None] = []
    waiter = threading.Thread(target=lambda: got.append(inbox.take(512, time.monotonic() + 60)))
    waiter.start()
    arrays.clear()
    waiter.join()
    assert got[0] is not None
    inbox.close()


def test_arrays_outlive_the_inbox() -> None:
    inbox = Inbox(1024)
    region = inbox.take(8, 0)
    assert region is not None
    array = region.hand_out()
    array[:] = 7
    inbox.close()
    del inbox, region
    gc.collect()
    assert array.tolist() == [7] * 8
