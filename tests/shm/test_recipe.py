"""What is put is what comes back, for as long as anyone looks at it."""

from __future__ import annotations

import gc
import math
import struct
import weakref
from collections.abc import Callable
from mmap import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from tensord.errors import BadTree
from tensord.shm.payloads.dtypes import dtype_named
from tensord.shm.payloads.packing import pack
from tensord.shm.payloads.recipe import recipe

Array = np.ndarray[Any, Any]

NAMES = [
    *("|b1", "|i1", "|u1", "<i2", ">i2", "<i4", ">u4", "<i8", "<u8", ">f2", "<f2", "<f4", ">f8"),
    *("<c8", "<c16", np.dtype(np.longdouble).str, "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "|S5", "<U3", ">U2"),
    *("<M8[ns]", ">M8[D]", "<m8[7s]", "<M8"),
]
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
STRIDES: dict[str, Callable[[Array], Array]] = {
    "contiguous": lambda a: a,
    "transposed": lambda a: a.T,
    "every other": lambda a: a[..., ::2] if a.ndim else a,
    "backwards": lambda a: a[::-1] if a.ndim else a,
    "repeated": lambda a: np.broadcast_to(a, (2, *a.shape)),
    "shifted": lambda a: a[1:, ...] if a.ndim else a,
}


def array_of(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """An array of any bits that its dtype can have: NaNs of every kind, NaT, -0.0."""
    dtype = dtype_named(name)
    assert dtype is not None
    random = np.random.default_rng(seed)
    count = math.prod(shape)
    if name == "|b1":
        return random.integers(0, 2, shape).astype(bool)
    if dtype.kind == "U":
        points = random.integers(32, 0xD7FF, count * dtype.itemsize // 4, np.uint32)
        return points.astype(dtype.byteorder + "u4").view(dtype).reshape(shape)
    return np.frombuffer(random.bytes(count * dtype.itemsize), dtype).reshape(shape)


ARRAYS = st.builds(
    lambda name, shape, seed, strides: STRIDES[strides](array_of(name, shape, seed)),
    st.sampled_from(NAMES),
    SHAPES,
    st.integers(0, 1 << 32),
    st.sampled_from(sorted(STRIDES)),
)
NUMBERS = (
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=3)
    | st.lists(st.floats(), min_size=1, max_size=3)
    | st.lists(st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1), min_size=1, max_size=2)
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(st.characters(), max_size=80)
    | st.binary(max_size=80)
    | st.binary(min_size=250, max_size=300)
    | st.text("aé\ud800😀", min_size=60, max_size=120)
    | st.builds(lambda some, count: (some * count)[:count], NUMBERS, st.integers(60, 70))
    | st.builds(lambda some, count: tuple(some * count), NUMBERS, st.integers(30, 70))
)
KEYS = st.text(max_size=5) | st.integers(-9, 9) | st.binary(max_size=5)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda children: (
            st.lists(children, max_size=4)
            | st.lists(children, max_size=4).map(tuple)
            | st.dictionaries(KEYS, children, max_size=4)
        ),
        max_leaves=12,
    )


def packed(tree: Any) -> tuple[bytes, Array]:
    """A tree's header, and its payload, written over memory that held something else, between bytes of others."""
    payload = pack(tree)
    memory = np.full(payload.payload_bytes + 128, 0xA5, np.uint8)
    payload.write(memory.data, 64)
    assert (memory[:64] == 0xA5).all() and (memory[64 + payload.payload_bytes :] == 0xA5).all(), "beside the payload"
    return payload.header, memory[64 : 64 + payload.payload_bytes].copy()


def assert_same(found: Any, put: Any) -> None:
    assert type(found) is type(put)
    if isinstance(put, np.ndarray):
        assert (found.dtype.str, found.dtype, found.shape) == (put.dtype.str, put.dtype, put.shape)
        assert found.tobytes() == put.tobytes()
    elif isinstance(put, dict):
        assert list(found) == list(put)
        assert list(map(type, found)) == list(map(type, put))
        for key in put:
            assert_same(found[key], put[key])
    elif isinstance(put, list | tuple):
        assert len(found) == len(put)
        for mine, theirs in zip(found, put, strict=True):
            assert_same(mine, theirs)
    elif isinstance(put, float):
        assert struct.pack("d", found) == struct.pack("d", put)
    else:
        assert found == put


def over_own_memory(content: Array) -> Array:
    return content.copy()


def over_a_mapping(content: Array) -> Array:
    memory = mmap(-1, len(content) + 64)
    root: Array = np.ndarray((len(content),), np.uint8, memory, 64)
    root[:] = content
    return root


def over_another_array(content: Array) -> Array:
    ring = np.zeros(len(content) + 128, np.uint8)
    ring[64 : 64 + len(content)] = content
    return ring[64 : 64 + len(content)]


ROOTS = [over_own_memory, over_a_mapping, over_another_array]


@pytest.mark.parametrize("make_root", ROOTS)
@pytest.mark.parametrize("read", ["view", "value"])
def test_any_view_keeps_the_very_root_alive(make_root: Any, read: str) -> None:
    for tree in (np.arange(100.0), {"a": [np.arange(100.0)]}):
        header, content = packed(tree)
        root = make_root(content)
        alive = weakref.ref(root)
        view = getattr(recipe(header), read)(root)
        view = view["a"][0] if isinstance(view, dict) else view
        derived = view.reshape(10, 10)[1:, ::2]
        del root, view
        gc.collect()
        assert alive() is not None
        assert derived[0, 0] == 10
        del derived
        gc.collect()
        assert alive() is None


@pytest.mark.parametrize("make_root", ROOTS)
@pytest.mark.parametrize("writable", [True, False])
def test_views_are_writable_exactly_where_the_root_is(make_root: Any, writable: bool) -> None:
    for tree in (np.arange(4), [np.arange(4), np.array(2)]):
        header, content = packed(tree)
        root = make_root(content)
        root.flags.writeable = writable
        found = recipe(header).view(root)
        views = found if isinstance(found, list) else [found]
        assert [view.flags.writeable for view in views] == [writable] * len(views)


def test_a_change_of_a_reader_s_container_is_not_seen_by_the_next_reader() -> None:
    tree = {"run": [1, 2], "list": [[1], np.ones(2)], "dict": {"a": 1}}
    header, root = packed(tree)
    made = recipe(header)
    first = made.view(root)
    first["run"].append(3)
    first["list"].clear()
    first["dict"]["b"] = 2
    del first["dict"]
    assert_same(made.view(root), tree)


@pytest.mark.parametrize("tree", [np.ones(100), [np.ones(100)], "x" * 999])
@pytest.mark.parametrize("read", ["view", "value"])
def test_a_payload_shorter_than_its_tree_is_refused(tree: Any, read: str) -> None:
    header, root = packed(tree)
    with pytest.raises(BadTree, match=f"{len(root) - 1} bytes .* ends at {len(root)}"):
        getattr(recipe(header), read)(root[:-1])


def test_a_long_str_that_is_not_utf8_is_refused_when_it_is_read() -> None:
    header, root = packed("x" * 999)
    root[-1] = 0xFF
    with pytest.raises(BadTree, match="999 bytes at 64 is not UTF-8"):
        recipe(header).view(root)
