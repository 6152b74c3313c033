"""What a sequence's pieces are called: a chain of keys, each over the piece's record and the key before.

Owns: cutting a sequence into pieces, their chain, and what keeps generations apart. Does not own records, nor how a key
follows from one (`shm.prefix`).

A key is the namespace's tag, then SHA-256 over the record, which says everything: scope, layout, block size, position,
media, tokens, and the key before; then the generation. So two sequences have a block in common exactly if they agree in
all of it, up to its end.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...shm.keys import generation_of
from ...shm.layout import NAMESPACE_TAG_BYTES
from ...shm.prefix import SCOPE_BYTES, Media, Piece, Tokens, piece_key
from ..core.namespace import Namespace

Record = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Keyed:
    """A piece, its record and its key."""

    piece: Piece
    record: Record
    key: bytes

    @classmethod
    def of(cls, tag: bytes, generation: int, piece: Piece, folded: Tokens) -> Keyed:
        record = piece.pack(folded)
        return cls(piece, record, piece_key(tag, record.data, generation))


def scope_of(namespace: Namespace) -> bytes:
    """16 bytes: the namespace at its generation. What was stored under two of them never meets."""
    named = b"tensord prefix" + namespace.tag + namespace.generation.to_bytes(16, "little")
    return hashlib.sha256(named).digest()[:SCOPE_BYTES]


def chain_of(
    namespace: Namespace,
    layout: bytes,
    exact: bool,
    folded: Tokens,
    media: Sequence[Media],
    block_tokens: int,
) -> list[Keyed]:
    """A sequence's blocks; the last one has what is left.

    Args:
        folded: (n,) uint32, n ≥ 1.
        media: in the order of their starts.
    """
    tag, scope, generation = namespace.tag, scope_of(namespace), namespace.generation
    starts = [item.start for item in media]
    chain: list[Keyed] = []
    parent: bytes | None = None
    for start in range(0, len(folded), block_tokens):
        part = folded[start : start + block_tokens]
        begun = tuple(media[bisect_left(starts, start) : bisect_left(starts, start + len(part))]) if starts else ()
        piece = Piece(scope, layout, exact, False, start, len(part), parent, begun, block_tokens)
        keyed = Keyed.of(tag, generation, piece, part)
        chain.append(keyed)
        parent = keyed.key
    return chain


def snapshot_of(chain: Sequence[Keyed], position: int) -> Keyed:
    """The snapshot for a position of the sequence: it follows the block in which that lies, or which it ends."""
    parent = chain[(position - 1) // chain[0].piece.block_tokens]
    before = parent.piece
    piece = Piece(before.scope, before.layout, before.exact, True, position, 0, parent.key, (), before.block_tokens)
    tag, generation = parent.key[:NAMESPACE_TAG_BYTES], generation_of(parent.key)
    return Keyed.of(tag, generation, piece, np.empty(0, np.uint32))
