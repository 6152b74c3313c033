"""Leases and batches by themselves, over plain memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensord.client.reading.lease import Lease, lease_over
from tensord.shm.payloads.packing import pack
from tensord.shm.payloads.recipe import recipe

from ...memory_bench import MemoryBench, key


def lease_on(tree: Any) -> Lease:
    """A lease over a read-only payload of `tree`."""
    payload = pack(tree)
    memory = bytearray(payload.payload_bytes)
    payload.write(memoryview(memory), 0)
    whole = np.frombuffer(bytes(memory), np.uint8)
    known = recipe(payload.header)
    return lease_over(whole, 0, payload.payload_bytes, known)


TREES: list[Any] = [
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.array(3.5),
    np.empty((0, 4), np.float32),
    {"a": np.ones(3), "b": [np.zeros(2, bool), "text", None, 7]},
    [],
    "only a string",
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_a_released_lease_says_so_and_views_taken_before_stay(tree: Any) -> None:
    lease = lease_on(tree)
    with lease as same:
        assert same is lease
        before = lease.tree
    np.testing.assert_equal(before, tree)
    for use in (lambda: lease.tree, lambda: lease.value, lease.torch, lease.handle, lease.span):
        with pytest.raises(ValueError, match="was released"):
            use()
    lease.release()


def test_a_batch_is_indexed_by_its_keys_places() -> None:
    with MemoryBench() as bench:
        for number in (0, 2):
            bench.put(key(number), np.full(5, number))
        view = bench.view()
        keys = np.frombuffer(b"".join(map(key, range(3))), np.uint8).reshape(-1, 32)
        with view.get_many(keys) as batch:
            assert len(batch) == 3
            assert batch.found.tolist() == [True, False, True]
            assert [lease is None for lease in batch] == [False, True, False]
            third = batch[-1]
            assert third is not None
            assert third.tree.tolist() == [2] * 5
            with pytest.raises(IndexError):
                batch[3]
        with pytest.raises(ValueError, match="was released"):
            batch[0]
        assert third.tree.tolist() == [2] * 5
        assert len(bench.pins()) == 2
        del third, batch
        assert not bench.pins()
