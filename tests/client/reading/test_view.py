"""Every way to read, over ring, index and lane in this process, with a hook wherever a writer may come between."""

from __future__ import annotations

import os
from collections.abc import Callable
from mmap import mmap
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tensord.client.reading.lease import Lease
from tensord.client.reading.view import View
from tensord.daemon.store.slots import Slots
from tensord.errors import BadKey, Corrupt, LayoutMismatch
from tensord.shm.index.index import IndexReader
from tensord.shm.lanes.lane import VIEW_WORDS
from tensord.shm.ring.layout import PAGE_BYTES, SPAN_HEADER_BYTES, Superblock, unix_at_boot_s
from tensord.shm.ring.segments import punch

from ...daemon_process import some
from ...memory_bench import MemoryBench, key, memory_file, slots_for


def payload(number: int, generation: int = 0) -> np.ndarray[Any, Any]:
    """What stands under key `number` in its `generation`; no two are alike, and no two parts of one."""
    return (np.arange(40 + number % 7, dtype=np.uint64) + np.uint64(number * 1000)) * np.uint64(generation * 2 + 1)


def as_keys(*numbers: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(map(key, numbers)), np.uint8).reshape(-1, 32)


def gets(view: View) -> dict[str, Callable[[int], Lease | None]]:
    """All ways to a lease on key `number`."""
    return {
        "get": lambda number: view.get(key(number)),
        "get_many": lambda number: view.get_many(as_keys(number))[0],
        "verified": lambda number: view.verified(key(number)),
    }


WAYS = ["get", "get_many", "verified"]


@pytest.mark.parametrize("way", WAYS)
def test_a_hit_is_what_was_put_pinned_until_its_last_view_dies(bench: MemoryBench, way: str) -> None:
    tree: dict[str, Any] = {"x": payload(1), "y": [np.ones((2, 3), "f4"), (1, "two", None)]}
    slot = bench.put(key(1), tree)
    view = bench.view()
    lease = some(gets(view)[way](1))
    found = lease.tree
    assert np.array_equal(found["x"], tree["x"])
    assert np.array_equal(found["y"][0], np.ones((2, 3)))
    assert found["y"][1] == (1, "two", None)
    assert not found["x"].flags.writeable
    assert bench.pins() == {slot.span_id}
    lease.release()
    del lease
    assert bench.pins() == {slot.span_id}
    bench.evict(key(1))
    assert not bench.reclaim()
    last = found["y"][0][1:]
    del found
    assert not bench.reclaim()
    assert last.sum() == 3
    del last
    assert bench.reclaim() == {slot.span_id}
    assert view.lane.in_use == 0


@pytest.mark.parametrize("way", WAYS)
def test_hits_and_misses_are_logged_once_each(bench: MemoryBench, way: str) -> None:
    slot = bench.put(key(1), payload(1))
    get = gets(bench.view())[way]
    assert get(1) is not None
    assert get(2) is None
    assert get(1) is not None
    drained = some(bench.readers[0].drain())
    assert drained.span_ids.tolist() == [slot.span_id] * 2
    assert drained.misses == 1


@pytest.mark.parametrize("full", [False, True])
def test_a_hold_pins_as_a_get_does_and_is_counted_as_nothing(bench: MemoryBench, full: bool) -> None:
    slot = bench.put(key(1), payload(1))
    bench.put(key(3), payload(3), unverified=True, corrupt=True)
    view = bench.view()
    words = view.lane.take_many(VIEW_WORDS) if full else []
    lease = some(view.hold(key(1)))
    assert np.array_equal(lease.tree, payload(1))
    assert view.hold(key(2)) is None
    assert view.hold(key(3)) is None
    assert bench.readers[0].drain() is None
    assert bench.pins() == (set() if full else {slot.span_id})
    del lease
    assert not bench.pins()
    assert view.lane.in_use == len(words)
    with pytest.raises(BadKey):
        view.hold(b"short")


@pytest.mark.parametrize("way", WAYS)
def test_a_full_lane_costs_a_copy_and_never_an_error(bench: MemoryBench, way: str) -> None:
    slot = bench.put(key(1), {"x": payload(1)})
    view = bench.view()
    words = view.lane.take_many(VIEW_WORDS)
    assert len(words) == VIEW_WORDS
    lease = gets(view)[way](1)
    assert not bench.pins()
    assert lease is not None and lease.handle() is None and lease.span() is None, "a copy is nobody else's"
    drained = some(bench.readers[0].drain())
    assert drained.span_ids.tolist() == [slot.span_id]
    bench.evict(key(1))
    assert bench.reclaim()
    assert np.array_equal(lease.tree["x"], payload(1))
    assert not lease.tree["x"].flags.writeable
    assert gets(view)[way](1) is None


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_entry_that_nobody_checked_is_checked_before_its_first_use(bench: MemoryBench, way: str, full: bool) -> None:
    bench.put(key(1), payload(1), unverified=True)
    bench.put(key(2), payload(2), unverified=True, corrupt=True)
    view = bench.view()
    words = view.lane.take_many(VIEW_WORDS) if full else []
    get = gets(view)[way]
    sound = some(get(1))
    assert np.array_equal(sound.tree, payload(1))
    if way == "verified":
        with pytest.raises(Corrupt, match=key(2).hex()):
            get(2)
    else:
        assert get(2) is None
    del sound
    assert view.lane.in_use == len(words)


def test_a_read_without_a_pin_allocates_no_page_that_was_returned(bench: MemoryBench) -> None:
    bench.put(key(1), payload(1))
    view = bench.view()
    words = view.lane.take_many(VIEW_WORDS)
    punch(bench.ring_fd, 0, bench.superblock.ring_bytes)
    assert view.peek(key(1)) is None
    assert view.get(key(1)) is None
    assert os.fstat(bench.ring_fd).st_blocks == 0
    assert view.lane.in_use == len(words)


def test_get_verify_finds_corruption_that_get_does_not_look_for(bench: MemoryBench) -> None:
    bench.put(key(1), payload(1), corrupt=True)
    view = bench.view()
    assert view.get(key(1)) is not None
    with pytest.raises(Corrupt, match="checksum"):
        view.verified(key(1))
    assert view.lane.in_use == 0


def test_peek_and_contains_leave_no_trace(bench: MemoryBench) -> None:
    bench.put(key(1), payload(1), unverified=True)
    view = bench.view()
    entry = some(view.peek(key(1)))
    assert (entry.key, entry.tokens, entry.expires_unix_s) == (key(1), 5, 0.0)
    assert entry.created_unix_s == pytest.approx(unix_at_boot_s() + 100.0, abs=1.0)
    assert view.contains(key(1))
    assert view.peek(key(2)) is None
    assert not view.contains(key(2))
    assert bench.readers[0].drain() is None
    assert not bench.pins()


def hooked(index: IndexReader, kind: type[IndexReader]) -> Any:
    """A copy of `index` as a `kind`, whose properties stand in for its parts."""
    made = object.__new__(kind)
    for name in IndexReader.__slots__:
        member = IndexReader.__dict__[name]
        member.__set__(made, member.__get__(index))
    return made


def interrupting(view: View, act: Callable[[], object]) -> None:
    """Runs `act` between every read of a slot and the second look at its seq."""
    real = view.index.words

    class Paused(IndexReader):
        __slots__ = ()

        @property
        def words(self) -> Any:  # type: ignore[override]
            act()
            return real

    view.index = hooked(view.index, Paused)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_entry_replaced_between_slot_and_pin_is_never_shown(bench: MemoryBench, way: str, full: bool) -> None:
    view = bench.view()
    bench.put(key(1), payload(1, 0))
    generation = [0]

    def replace() -> None:
        # As often as a view tries, and for its last attempt not any more.
        if generation[0] < 2:
            generation[0] += 1
            bench.evict(key(1))
            bench.put(key(1), payload(1, generation[0]))
            bench.reclaim()

    interrupting(view, replace)
    words = view.lane.take_many(VIEW_WORDS) if full and way != "get_many" else []
    lease = gets(view)[way](1)
    if lease is None:
        assert way == "get_many", "a view tries again"
    else:
        assert np.array_equal(lease.tree, payload(1, 2))
    del lease
    assert view.lane.in_use == len(words)
    assert len(set(view.lane.free)) == VIEW_WORDS - len(words)


def test_memory_of_another_layout_is_refused(bench: MemoryBench) -> None:
    small = memory_file(100)
    wrong = memory_file(bench.geometry.index_bytes + 4096)
    os.pwrite(wrong, Superblock(1, 1, 4096, bench.geometry, 4096, 16).pack(), 0)
    lane = bench.lane()
    for fd in (small, wrong):
        with pytest.raises(LayoutMismatch):
            View.open(bench.ring_fd, fd, lane)
        os.close(fd)
    assert bench.view(lane).is_over(bench.index_fd)


@pytest.mark.parametrize("way", WAYS)
def test_an_entry_beyond_the_mapped_ring_is_a_miss(bench: MemoryBench, way: str) -> None:
    """As for a client whose daemon was started again with a larger ring."""
    os.pwrite(bench.index_fd, replace(bench.superblock, ring_bytes=PAGE_BYTES).pack(), 0)
    view = bench.view()
    os.pwrite(bench.index_fd, bench.superblock.pack(), 0)
    slots = [bench.put(key(number), payload(number)) for number in range(20)]
    fits = [slot.offset + SPAN_HEADER_BYTES + slot.payload_bytes <= PAGE_BYTES for slot in slots]
    assert not view.is_whole and set(fits) == {True, False}
    for number, within in enumerate(fits):
        lease = gets(view)[way](number)
        assert (lease is not None) is within is view.contains(key(number))
        assert lease is None or np.array_equal(lease.tree, payload(number))


class Moved(mmap):
    """An index whose daemon moves an entry to its key's first bucket just after a reader has looked there."""

    writer: Slots
    slots: tuple[int, int]
    looks: int

    def find(self, *what: Any) -> int:
        found = super().find(*what)
        self.looks += 1
        if self.looks == 1:
            assert found < 0, "the entry is in the first bucket already"
            self.writer.move(*self.slots)
        return found


@pytest.mark.parametrize("way", ["get", "verified", "contains", "peek"])
def test_an_entry_that_is_moved_while_it_is_looked_up_is_found(bench: MemoryBench, way: str) -> None:
    at = next(key(n) for n in range(100) if len({slot // 8 for slot in slots_for(key(n), bench.geometry)}) == 2)
    # A slot is taken in the bucket with fewer of them, and of equal ones in the first.
    buckets = [slot // 8 for slot in slots_for(at, bench.geometry)]
    first = bench.write(at, payload(1))
    second = bench.write(at, payload(1))
    assert first is not None and second is not None
    assert (first.number // 8, second.number // 8) == (buckets[0], buckets[-1])
    bench.slots.publish(second.number)
    view = bench.view()
    moved = Moved(bench.index_fd, bench.geometry.index_bytes)
    moved.writer, moved.slots, moved.looks = bench.slots, (second.number, first.number), 0
    view.index.memory = moved
    if way == "contains":
        assert view.contains(at)
    elif way == "peek":
        assert view.peek(at) is not None
    else:
        lease = getattr(view, way)(at)
        assert lease is not None and np.array_equal(lease.tree, payload(1))
        assert bench.pins() == {first.span_id}
        lease.release()


def test_an_entry_that_is_moved_while_many_are_looked_up_is_found(
    bench: MemoryBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put(key(1), payload(1))
    moved = some(bench.write(key(2), payload(2)))
    probe = IndexReader._probe_many

    def moved_meanwhile(index: IndexReader, keys: Any) -> Any:
        found = probe(index, keys)
        if not bench.index.read(moved.number).published:
            bench.slots.publish(moved.number)
        return found

    monkeypatch.setattr(IndexReader, "_probe_many", moved_meanwhile)
    batch = bench.view().get_many(as_keys(1, 2, 3))
    assert [lease is not None for lease in batch] == [True, True, False]
    lease = batch[1]
    assert lease is not None and np.array_equal(lease.tree, payload(2))
