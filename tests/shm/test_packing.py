"""Trees come back as they were put, a put of them costs few calls, and nothing beside a payload is written."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tensord.shm.payloads.dtypes import dtype_named
from tensord.shm.payloads.packing import pack
from tensord.shm.payloads.recipe import recipe

from ..daemon_process import PATIENCE_S
from .test_recipe import ARRAYS, SCALARS, assert_same, packed, trees

LEAF_CALLS_MAX = 12
SINGLE_CALLS_MAX = 10


@settings(max_examples=300, deadline=None)
@given(trees(SCALARS | ARRAYS))
def test_a_tree_comes_back_as_it_was_put(tree: Any) -> None:
    header, root = packed(tree)
    made = recipe(header)
    assert_same(made.view(root), tree)
    assert_same(made.value(root), tree)


def test_a_long_header_is_the_first_leaf() -> None:
    tree = {f"the tensor number {i}": np.full(3, i, np.int16) for i in range(8000)}
    header, root = packed(tree)
    assert len(header) < 64
    assert_same(recipe(header).view(root), tree)


def test_an_array_that_changes_its_shape_before_the_copy_writes_nothing_beside_its_place() -> None:
    array = np.zeros(1000, np.uint8)
    payload = pack([array])
    array.resize(5000, refcheck=False)
    memory = np.full(payload.payload_bytes + 64, 0xA5, np.uint8)
    with pytest.raises(ValueError, match="broadcast"):
        payload.write(memory.data, 0)
    assert (memory[payload.payload_bytes :] == 0xA5).all()


def calls(do: Callable[[], object]) -> int:
    """Python and C calls of `do`, without its own."""
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event.endswith("call")

    sys.setprofile(profile)
    try:
        do()
    finally:
        sys.setprofile(None)
    return count - 2


@pytest.mark.parametrize("name", ["<f4", "bfloat16", ">i2"])
def test_an_array_costs_ten_calls_and_a_leaf_twelve(name: str) -> None:
    dtype = dtype_named(name)
    memory = memoryview(bytearray(1 << 20))
    single = np.zeros(4096, dtype)
    leaves = {f"layer{i}": np.zeros((16, 10), dtype) for i in range(40)}
    for tree in (single, leaves):
        pack(tree).write(memory, 0)
    assert calls(lambda: pack(single).write(memory, 0)) <= SINGLE_CALLS_MAX
    assert calls(lambda: pack(leaves).write(memory, 0)) <= LEAF_CALLS_MAX * len(leaves)


@pytest.mark.parametrize("strided", [False, True])
def test_other_threads_run_while_a_large_leaf_is_copied(strided: bool) -> None:
    array = np.zeros((2048, 8192), np.uint8)
    payload = pack(array[:, ::2] if strided else array)
    memory = memoryview(bytearray(payload.payload_bytes))
    gate = threading.Lock()
    gate.acquire()
    ran: list[bool] = []

    def run() -> None:
        with gate:
            ran.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody gets the GIL from a thread that does not give it
    try:
        gate.release()
        deadline = time.monotonic() + PATIENCE_S
        while not ran and time.monotonic() < deadline:
            payload.write(memory, 0)
        seen = bool(ran)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert seen
