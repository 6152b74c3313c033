"""The words of a slot: what is packed is read back, and what does not fit is refused or cut to the most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.layout import TREE_BYTES_MAX
from tensord.shm.slots import (
    PLACE_OFFSET_MASK,
    PLACE_UNVERIFIED,
    REUSE_HOLDERS_MAX,
    REUSE_USES_MAX,
    pack_place,
    pack_reuse,
    unpack_reuse,
)


@given(st.integers(0, (1 << 48) // 64 - 1), st.integers(1, TREE_BYTES_MAX))
def test_a_place_word_holds_offset_and_tree_apart(cells: int, tree_bytes: int) -> None:
    place = pack_place(cells * 64, tree_bytes)
    assert place & PLACE_OFFSET_MASK == cells * 64
    assert place >> 48 == tree_bytes
    assert not place & PLACE_UNVERIFIED
    assert place < 1 << 64


@pytest.mark.parametrize(("offset", "tree_bytes"), [(1, 1), (1 << 48, 1), (0, 0), (0, TREE_BYTES_MAX + 1)])
def test_a_place_that_would_not_fit_its_word_is_a_programmers_error(offset: int, tree_bytes: int) -> None:
    with pytest.raises(AssertionError):
        pack_place(offset, tree_bytes)


@given(st.integers(0, 1 << 60), st.integers(0, 1 << 20), st.floats(0, 1 << 33))
def test_a_reuse_word_holds_uses_and_holders_up_to_the_most_of_each(uses: int, holders: int, used_s: float) -> None:
    word = pack_reuse(uses, holders, used_s)
    assert unpack_reuse(word) == (min(uses, REUSE_USES_MAX), min(holders, REUSE_HOLDERS_MAX))
    assert word < 1 << 64
