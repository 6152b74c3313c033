"""Trees become the very payloads that the first encoder made of them, refused with the same words, at a lower price."""

from __future__ import annotations

import collections
import enum
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.errors import BadTree, ObjectTooLarge, TensordError, UnsupportedLeaf
from tensord.shm.dtypes import dtype_named
from tensord.shm.header import NODES_MAX
from tensord.shm.packed import write
from tensord.shm.packing import pack
from tensord.shm.recipe import recipe
from tensord.shm.tree import Spec, encode

from .test_recipe import ARRAYS, KEYS, NAMES, SCALARS, array_of, assert_same, trees

LEAF_CALLS_MAX = 12
SINGLE_CALLS_MAX = 10
NUMBERS = st.integers(60, 70).flatmap(
    lambda length: (
        st.lists(st.integers(-(1 << 63), (1 << 64) - 1), min_size=length, max_size=length)
        | st.lists(st.floats(), min_size=length, max_size=length)
    )
)
REFUSED = (
    st.sampled_from(
        [object(), {1}, 1j, bytearray(b"x"), memoryview(b"x"), 1 << 64, -(1 << 63) - 1, True, Spec((1,), "f4")]
    )
    | st.sampled_from([msgpack.ExtType(5, b"x"), msgpack.Timestamp(1), collections.OrderedDict(a=1)])
    | st.sampled_from([np.zeros(2, "f4,f4"), np.zeros(2, "V3"), np.ma.masked_array([1], [False]), np.str_("x")])
    | st.sampled_from([{1.5: 0}, {True: 0}, {None: 1}, {(1,): 2}, {1 << 64: 3}, np.array([object()])])
)


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


def packed(tree: Any) -> tuple[bytes, np.ndarray[Any, Any]]:
    """A tree's header, and its payload, written over memory that held something else, between bytes of others."""
    payload = pack(tree)
    memory = np.full(payload.payload_bytes + 128, 0xA5, np.uint8)
    write(payload, memory.data, 64)
    assert (memory[:64] == 0xA5).all() and (memory[64 + payload.payload_bytes :] == 0xA5).all(), "beside the payload"
    return payload.header, memory[64 : 64 + payload.payload_bytes].copy()


def before(tree: Any) -> tuple[bytes, np.ndarray[Any, Any]]:
    """The same by the first encoder."""
    payload = encode(tree)
    memory = np.full(payload.payload_bytes, 0xA5, np.uint8)
    payload.write_into(memory)
    return payload.header, memory


def outcome(make: Callable[[Any], tuple[bytes, np.ndarray[Any, Any]]], tree: Any) -> object:
    try:
        header, memory = make(tree)
    except TensordError as error:
        return type(error), str(error)
    return header, memory.tobytes()


@settings(max_examples=300, deadline=None)
@given(trees(SCALARS | ARRAYS | NUMBERS))
def test_a_tree_comes_back_as_it_was_put(tree: Any) -> None:
    header, root = packed(tree)
    made = recipe(header)
    assert_same(made.view(root), tree)
    assert_same(made.value(root), tree)
    assert outcome(packed, tree) == outcome(before, tree)


@settings(max_examples=300, deadline=None)
@given(trees(SCALARS | ARRAYS | REFUSED), KEYS)
def test_what_is_refused_is_refused_with_the_same_words(tree: Any, key: Any) -> None:
    assert outcome(packed, {key: tree}) == outcome(before, {key: tree})


@settings(max_examples=300, deadline=None)
@given(trees(SCALARS | ARRAYS), st.data())
def test_a_damaged_header_is_a_bad_tree_or_another_tree(tree: Any, data: st.DataObject) -> None:
    header, root = packed(tree)
    damaged = bytearray(header)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    try:
        recipe(bytes(damaged)).view(root)
    except BadTree:
        pass


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 3)])
def test_every_dtype_comes_back_whatever_the_shape(name: str, shape: tuple[int, ...]) -> None:
    array = array_of(name, shape, 7)
    for tree in (array, [array, array.T], {"again": array}, array.T):
        header, root = packed(tree)
        assert_same(recipe(header).view(root), tree)
        assert outcome(packed, tree) == outcome(before, tree)


@pytest.mark.parametrize(
    "tree",
    [
        Colour.RED,
        Point(1),
        [[1, 1 << 64]],
        [0, 1 << 63],
        list(range(100)),
        tuple(float(i) for i in range(64)),
        [*range(63), (1 << 64) - 1],
        [*range(63), 1 << 64],
        [*range(63), 1.0],
        [True] * 64,
        ["é" * 100],
        {"k" * 300: 1},
        ["x" * 256, b"y" * 257, "z" * 257],
        {f"key {i}" * 5: np.zeros(1) for i in range(2000)},
        {f"key {i}" * 15: np.zeros(1) for i in range(16_000)},
        {i: [i] for i in range(NODES_MAX)},
        [*[None] * (NODES_MAX - 2), np.zeros(1)],
        [*[None] * (NODES_MAX - 1), np.zeros(1)],
        [None] * 60_000,
        ["x"] * 140_000,
        np.broadcast_to(np.zeros(1), (1 << 30, 1 << 20)),
        [np.broadcast_to(np.uint8(0), (1 << 47,))] * 2,
        np.empty((0, 1 << 50)),
        [np.empty((0, 1 << 50))],
        np.float32(1),
        np.bool_(True),
        np.datetime64("2020"),
    ],
    ids=lambda tree: f"{type(tree).__name__}",
)
def test_odd_trees_end_as_with_the_first_encoder(tree: Any) -> None:
    def made(make: Callable[[Any], Any], tree: Any) -> object:
        # Without the payload: some are larger than memory.
        try:
            payload = make(tree)
        except TensordError as error:
            return type(error), str(error)
        return payload.header, payload.payload_bytes

    assert made(pack, tree) == made(encode, tree)


def test_a_tree_that_contains_itself_or_is_too_deep_is_refused() -> None:
    inner: list[Any] = []
    inner.append({"a": [0, inner]})
    with pytest.raises(UnsupportedLeaf, match=r"^tree\[0\]\['a'\]\[1\] is a list that contains itself"):
        pack(inner)
    deep: Any = []
    for _ in range(63):
        deep = [deep]
    pack(deep)
    with pytest.raises(UnsupportedLeaf, match=r"^tree(\[0\]){64} is nested deeper .* of 64"):
        pack([deep])
    with pytest.raises(UnsupportedLeaf, match="of 2; flatten"):
        pack([[[]]], 2)
    doubling: Any = [np.zeros(1)]
    for _ in range(60):
        doubling = [doubling, doubling]
    with pytest.raises(ObjectTooLarge, match=f"more than {NODES_MAX} nodes"):
        pack(doubling)


def test_a_long_header_is_the_first_leaf() -> None:
    tree = {f"the tensor number {i}": np.full(3, i, np.int16) for i in range(8000)}
    header, root = packed(tree)
    assert len(header) < 64
    assert_same(recipe(header).view(root), tree)
    assert outcome(packed, tree) == outcome(before, tree)


def test_an_array_that_changes_its_shape_before_the_copy_writes_nothing_beside_its_place() -> None:
    array = np.zeros(1000, np.uint8)
    payload = pack([array])
    array.resize(5000, refcheck=False)
    memory = np.full(payload.payload_bytes + 64, 0xA5, np.uint8)
    with pytest.raises(ValueError, match="broadcast"):
        write(payload, memory.data, 0)
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
        write(pack(tree), memory, 0)
    assert calls(lambda: write(pack(single), memory, 0)) <= SINGLE_CALLS_MAX
    assert calls(lambda: write(pack(leaves), memory, 0)) <= LEAF_CALLS_MAX * len(leaves)
