"""Headers are small, the same for the same shape, and never believed."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.errors import BadTree
from tensord.shm.payloads import header as form
from tensord.shm.payloads.packing import pack
from tensord.shm.payloads.recipe import Recipe, recipe

RING_BYTES_MAX = 1 << 48
VALID = [
    pack(tree).header
    for tree in (
        np.zeros((49, 1280), np.float32),
        {"a": [np.zeros(3), (1, "x", None)], 7: {b"k": "y" * 999}, "z": [[], (), {}]},
        [np.zeros((2, 0), ">i4"), np.array("abc"), b"z" * 999, 1 << 63, -5, [True, 1.5]],
        {"ids": [*range(100)], "times": (0.5,) * 70},
        ["x" * 60] * 2000,
    )
]


def packed(*tokens: Any) -> bytes:
    return b"".join(map(msgpack.packb, tokens))


def lies_apart(made: Recipe, end: int) -> int:
    """The end of the last leaf, all of which begin behind `end` and behind one another."""
    for leaf in made.leaves:
        assert leaf.offset % 64 == 0
        assert leaf.offset >= end
        assert all(length >= 0 for length in leaf.shape)
        assert not leaf.dtype.hasobject
        end = leaf.offset + int(np.prod(leaf.shape, dtype=object)) * leaf.dtype.itemsize
    return end


def judged(header: bytes) -> None:
    """A header is refused, or what it says holds: its leaves lie apart, in order, in the payload."""
    try:
        made = recipe(header)
    except BadTree:
        return
    end = lies_apart(made, len(header))
    assert end == made.end_bytes <= RING_BYTES_MAX or made.is_long
    if end < 1 << 20:
        root = np.full(made.end_bytes, 0x80, np.uint8)
        try:
            made.view(root)
        except BadTree as refusal:
            if "UTF-8" not in str(refusal) and not made.is_long:
                raise


def test_a_header_says_nothing_of_values_strides_or_what_was_put_before() -> None:
    first = {"a": np.zeros((4, 4)), "b": [np.zeros(2, "<M8[1000ps]")]}
    second = {"a": np.ones((4, 4)).T, "b": [np.ones(4, "<i8")[::2].view("<M8[1000ps]")]}
    assert pack(first).header == pack(second).header == pack(first).header
    pack(np.zeros(2, "<M8[1000ps]"))
    assert b"<M8[ns]" in pack(np.zeros(2, "<M8[ns]")).header
    big = pack(np.zeros(3, ">f4")).header
    assert big != pack(np.zeros(3, "<f4")).header
    assert big == pack(np.zeros(3, ">f4")).header


TOKEN = (
    st.integers(0, 13)
    | st.sampled_from(["<f4", "<i8", "<f8", "bfloat16", "|O", "<M8[ns]", "|S999999999", "<U999999999", "|V8"])
    | st.sampled_from([-1, 64, 65, 1 << 31, 1 << 48, (1 << 64) - 1, None, True, 0.5, b"k", "k"])
)


CUTS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 4), st.binary(max_size=4)), min_size=1, max_size=4)


def damaged(valid: bytes, cuts: list[tuple[int, int, bytes]]) -> bytes:
    header = bytearray(valid)
    for at, size, new in cuts:
        header[at : at + size] = new
    return bytes(header)


@settings(max_examples=2000)
@given(
    st.builds(damaged, st.sampled_from(VALID), CUTS) | st.lists(TOKEN, max_size=30).map(lambda all_: packed(1, *all_))
)
def test_any_header_is_refused_or_describes_a_bounded_tree(header: bytes) -> None:
    judged(header)


LEAF = (form.ARRAY, "<f4", 1, 3)
BAD = {
    "nothing at all": (b"", "format"),
    "only the format": (packed(1), "ends within"),
    "something after the tree": (packed(1, None, None), "scalars after the end of its tree: 1"),
    "a number cut off": (VALID[0][:-1], "within a scalar"),
    "a byte that is no msgpack": (packed(1) + b"\xc1", "not a sequence"),
    "an array": (packed(1, [None]), "not a sequence"),
    "an unknown node": (packed(1, 13), "unknown kind 13"),
    "numbers of another dtype": (packed(1, form.NUMBERS, "<i4", 3), "dtype '<i4', not one of <i8, <f8"),
    "too many numbers": (packed(1, form.NUMBERS, "<i8", (1 << 45) + 1), "up to"),
    "a long header below the root": (packed(1, form.LIST, 1, form.LONG, 70_000), "unknown kind 12"),
    "a long header that is short": (packed(1, form.LONG, 65_472), "65472 bytes, and a payload begins with one"),
    "a long header over the limit": (packed(1, form.LONG, (1 << 20) + 1), "up to"),
    "one key twice": (packed(1, form.DICT, 2, "a", None, "a", None), "duplicate"),
    "a key of float": (packed(1, form.DICT, 1, 1.0, None), "type float"),
    "a dtype of objects": (packed(1, form.ARRAY, "|O", 1, 3), "unknown dtype"),
    "65 dimensions": (packed(1, form.ARRAY, "|u1", 65, *[1] * 65), "up to 64"),
    "a negative dimension": (packed(1, form.ARRAY, "<f4", 1, -3), "length of -3"),
    "a huge length": (packed(1, form.ARRAY, "|u1", 1, (1 << 48) + 1), "length of"),
    "a product over 2**64": (packed(1, form.ARRAY, "|u1", 3, *[1 << 40] * 3), "more than"),
    "an empty product over 2**48": (packed(1, form.ARRAY, "|u1", 3, 0, 1 << 40, 1 << 40), "more"),
    "a sum over 2**48": (packed(1, form.LIST, 2, *(form.ARRAY, "|u1", 1, 1 << 47) * 2), "a tree"),
    "65 levels": (packed(1, *[form.LIST, 1] * 65, None), "deeper than 64"),
    "too many nodes": (packed(1, form.LIST, 16_384, *[None] * 16_384), "16384 nodes"),
    "more than 65,472 bytes": (packed(1, b"x" * 65_472), "limit is 65472"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_header_that_describes_no_tree_is_refused_with_the_reason(case: str) -> None:
    header, reason = BAD[case]
    with pytest.raises(BadTree, match=reason) as refusal:
        recipe(header)
    assert len(str(refusal.value)) < 1000


def test_limits_are_where_they_are_said_to_be() -> None:
    recipe(packed(1, *[form.LIST, 1] * 64, None))
    recipe(packed(1, form.LIST, 16_383, *[None] * 16_383))
    form.read(packed(1, form.LIST, 16_383, *(form.ARRAY, "|u1", 0) * 16_383), 64, start=64)
    form.read(packed(1, form.LIST_RUN, (1 << 17) - 3, *[None] * ((1 << 17) - 3)), 64, start=64)
    with pytest.raises(BadTree, match="more than 131072 scalars"):
        form.read(packed(1, form.LIST_RUN, 1 << 17, *[None] * (1 << 17)), 64, start=64)
    with pytest.raises(BadTree, match="limit is 1048576"):
        form.read(packed(1, b"x" * (1 << 20)), 64, start=64)
    with pytest.raises(BadTree, match="unknown kind 12"):
        form.read(packed(1, form.LONG, 70_000), 64, start=64)
    recipe(packed(1, form.ARRAY, "|u1", 64, *[1] * 64))
    assert recipe(packed(1, form.ARRAY, "|u1", 1, (1 << 48) - 64)).end_bytes == 1 << 48
    assert len(recipe(packed(1, form.LIST, 2, *LEAF * 2)).leaves) == 2
    with pytest.raises(BadTree, match="deeper than 2"):
        recipe(packed(1, *[form.LIST, 1] * 3, None), depth_max=2)


def test_a_reader_of_a_large_tree_rests_every_256_nodes_and_8192_scalars() -> None:
    rests: list[int] = []
    form.read(packed(1, form.LIST, 1023, *[form.LIST, 0] * 1023), 64, rest=lambda: rests.append(1))
    assert len(rests) == 4
    rests.clear()
    form.read(packed(1, form.LIST_RUN, 20_000, *[1] * 20_000), 64, rest=lambda: rests.append(1))
    assert len(rests) == 2


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_long_header_is_refused_or_describes_a_bounded_tree(data: st.DataObject) -> None:
    payload = pack(["x" * 60] * 2000)
    root = np.zeros(payload.payload_bytes, np.uint8)
    payload.write(root.data, 0)
    for _ in range(data.draw(st.integers(1, 4))):
        root[data.draw(st.integers(64, len(root) - 1))] = data.draw(st.integers(0, 255))
    try:
        made = recipe(payload.header).whole(root)
    except BadTree:
        with pytest.raises(BadTree):
            recipe(payload.header).view(root)
        return
    assert lies_apart(made, len(root)) == made.end_bytes
