"""Copies payloads into the ring and computes their checksum on the way, without holding the GIL for long.

Each chunk is checksummed while it is still in the CPU cache. Copying 16 MiB in one step and checksumming it afterwards
took 1.4 times as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import xxhash

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
PIECE_BYTES: Final = 1 << 20


def copy_checked(to: Bytes, source: Bytes, checksum: xxhash.xxh3_64) -> None:
    """Copies `source` to `to`, both (n,) uint8, and updates `checksum` from the bytes that arrived in `to`."""
    for start in range(0, len(source), PIECE_BYTES):
        piece = to[start : start + PIECE_BYTES]
        np.copyto(piece, source[start : start + PIECE_BYTES])
        checksum.update(piece.data)


def checksum_of(payload: Bytes) -> int:
    """xxh3-64 of a payload, (n,) uint8, as it lies in the ring."""
    starts = range(0, len(payload), PIECE_BYTES)
    return checksum_of_pieces(payload[start : start + PIECE_BYTES].data for start in starts)


def checksum_of_pieces(pieces: Iterable[bytes | memoryview]) -> int:
    """xxh3-64 of a payload that arrives in chunks of at most PIECE_BYTES. Takes one chunk at a time."""
    checksum = xxhash.xxh3_64()
    for piece in pieces:
        checksum.update(piece)
    return checksum.intdigest()
