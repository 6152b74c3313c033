"""Copies and their checksums."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import xxhash

from tensord.shm.payloads.copy import PIECE_BYTES, checksum_of, copy_checked


@pytest.mark.parametrize("size", [0, 1, 64, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 17])
def test_a_copy_is_whole_and_its_checksum_that_of_what_arrived(size: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    to = np.zeros(size, np.uint8)
    checksum = xxhash.xxh3_64()
    copy_checked(to, source, checksum)
    assert np.array_equal(to, source)
    assert checksum.intdigest() == checksum_of(to) == xxhash.xxh3_64_intdigest(source.tobytes())


def test_the_checksum_is_of_what_arrived_and_not_of_what_was_sent() -> None:
    """A sender that goes on writing must not make the entry look corrupt."""
    source = np.zeros(2 * PIECE_BYTES, np.uint8)

    class Changing:
        """A source that changes as soon as a piece of it was taken."""

        def __len__(self) -> int:
            return len(source)

        def __getitem__(self, at: slice) -> Any:
            piece = source[at].copy()
            source[at] += 1
            return piece

    to = np.full(len(source), 9, np.uint8)
    checksum = xxhash.xxh3_64()
    copy_checked(to, cast(Any, Changing()), checksum)
    assert checksum.intdigest() == checksum_of(to)
    assert not to.any()
    assert source.all()
