"""Leases, batches and handles: what one process pins, read by itself and by another that has its name only."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.client.reading.lease import Lease
from tensord.client.reading.ring_mapping import Handle
from tensord.client.reading.view import View
from tensord.shm.ring.segments import punch

from ...daemon_process import some
from ...memory_bench import MemoryBench, key
from .test_view import WAYS, as_keys, gets

TREES: list[Any] = [
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.array(3.5),
    np.empty((0, 4), np.float32),
    {"a": np.ones(3), "b": [np.zeros(2, bool), "text", None, 7]},
    [],
    "only a string",
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_a_released_lease_says_so_and_views_taken_before_stay(bench: MemoryBench, tree: Any) -> None:
    bench.put(key(1), tree)
    lease = some(bench.view().get(key(1)))
    with lease as same:
        assert same is lease
        before = lease.tree
    np.testing.assert_equal(before, tree)
    for use in (lambda: lease.tree, lambda: lease.value, lease.torch, lease.handle, lease.span):
        with pytest.raises(ValueError, match="was released"):
            use()
    lease.release()


def test_a_batch_is_indexed_by_its_keys_places(bench: MemoryBench) -> None:
    for number in (0, 2):
        bench.put(key(number), np.full(5, number))
    with bench.view().get_many(as_keys(0, 1, 2)) as batch:
        assert batch.found.tolist() == [True, False, True]
        assert [lease is None for lease in batch] == [False, True, False]
        third = batch[-1]
        with pytest.raises(IndexError):
            batch[3]
    with pytest.raises(ValueError, match="was released"):
        batch[0]
    assert third is not None and third.tree.tolist() == [2] * 5
    assert len(bench.pins()) == 2
    del third, batch
    assert not bench.pins()


def ways(view: View) -> dict[str, Any]:
    return {**gets(view), "hold": lambda number: view.hold(key(number))}


def handle_of(lease: Lease | None) -> bytes:
    return some(some(lease).handle())


@pytest.mark.parametrize("way", [*WAYS, "hold"])
@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_a_borrowed_entry_is_the_entry_that_was_put_read_only(bench: MemoryBench, tree: Any, way: str) -> None:
    bench.put(key(7), np.arange(100))
    bench.put(key(1), tree)
    lender, borrower = bench.view(), bench.view()
    lease = ways(lender)[way](1)
    borrowed = some(borrower.ring.borrow(handle_of(lease)))
    assert borrowed.payload_bytes == lease.payload_bytes
    np.testing.assert_equal(borrowed.tree, tree)
    np.testing.assert_equal(borrowed.value, tree)
    if isinstance(tree, np.ndarray):
        assert not borrowed.tree.flags.writeable
    assert borrower.lane.in_use == 0
    assert handle_of(borrowed) == lease.handle(), "what was borrowed can be lent on"


def test_a_span_that_was_reused_is_refused_though_it_holds_the_same_key_and_size(bench: MemoryBench) -> None:
    bench.put(key(1), np.arange(50))
    lender, borrower = bench.view(), bench.view()
    handle = handle_of(lender.get(key(1)))
    bench.evict(key(1))
    assert bench.reclaim()
    bench.put(key(1), np.arange(50))
    again = lender.get(key(1))
    before, now = Handle.unpack(handle), Handle.unpack(handle_of(again))
    assert before is not None and now is not None
    assert (before.offset, before.payload_bytes, before.key) == (now.offset, now.payload_bytes, now.key)
    assert borrower.ring.borrow(handle) is None


def test_an_invalid_handle_allocates_no_page_that_was_returned(bench: MemoryBench) -> None:
    bench.put(key(1), np.arange(50))
    view = bench.view()
    handle = handle_of(view.get(key(1)))
    punch(bench.ring_fd, 0, bench.superblock.ring_bytes)
    assert view.ring.borrow(handle) is None
    assert os.fstat(bench.ring_fd).st_blocks == 0


def test_garbage_is_refused(bench: MemoryBench) -> None:
    bench.put(key(1), np.arange(50))
    view = bench.view()
    lease = view.get(key(1))
    handle = handle_of(lease)
    numbers = st.integers(0, 2**64 - 1)

    @settings(max_examples=300, deadline=None)
    @given(
        st.integers(0, len(handle) - 1),
        st.integers(1, 255),
        st.tuples(numbers, numbers, numbers),
        st.binary(max_size=100),
    )
    def check(at: int, bit: int, made: tuple[int, int, int], some: bytes) -> None:
        flipped = bytes([*handle[:at], handle[at] ^ bit, *handle[at + 1 :]])
        made_up = Handle(view.ring.identity, *made, key(1)).pack()
        for garbage in (flipped, made_up, handle[:at], handle + b"\0", some):
            assert view.ring.borrow(garbage) is None
        assert view.ring.borrow(handle) is not None

    check()
