"""Keys of a sequence's blocks: each key is a hash of the block's record and so of the parent's key.

Owns: cutting a sequence into blocks, their chain of keys, and the scope that keeps generations apart. Does not own:
records, nor how a key is computed from one (`shm.payloads.prefix`).
Invariants: a key is the namespace's tag, then SHA-256 over the record (scope, layout, block size, position, media,
tokens, parent's key), then the generation. So two sequences share a block exactly if they agree in all of that up to
its end.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...shm.index.keys import generation_of
from ...shm.payloads.prefix import SCOPE_BYTES, Media, PrefixRecord, Tokens, block_key
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..arguments.namespace import Namespace

Packed = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Keyed:
    """A block or a snapshot: its record, the packed record, and its key."""

    record: PrefixRecord
    packed: Packed
    key: bytes

    @classmethod
    def of(cls, tag: bytes, generation: int, record: PrefixRecord, folded: Tokens) -> Keyed:
        """Packs the record and computes the key."""
        packed = record.pack(folded)
        return cls(record, packed, block_key(tag, packed.data, generation))


def scope_of(namespace: Namespace) -> bytes:
    """16 bytes that identify the namespace at its generation. Blocks of two scopes never match."""
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
    """A sequence's blocks. The last one may have fewer than `block_tokens` tokens.

    Args:
        folded: the tokens with media folded in, uint32 of shape (n,), n ≥ 1.
        media: in the order of their starts.
    """
    tag, scope, generation = namespace.tag, scope_of(namespace), namespace.generation
    starts = [item.start for item in media]
    chain: list[Keyed] = []
    parent: bytes | None = None
    for start in range(0, len(folded), block_tokens):
        part = folded[start : start + block_tokens]
        begun = tuple(media[bisect_left(starts, start) : bisect_left(starts, start + len(part))]) if starts else ()
        record = PrefixRecord(scope, layout, exact, False, start, len(part), parent, begun, block_tokens)
        keyed = Keyed.of(tag, generation, record, part)
        chain.append(keyed)
        parent = keyed.key
    return chain


def snapshot_of(chain: Sequence[Keyed], position: int) -> Keyed:
    """The snapshot for a position of the sequence. Its parent is the block in which, or at whose end, the position
    lies.
    """
    parent = chain[(position - 1) // chain[0].record.block_tokens]
    before = parent.record
    record = PrefixRecord(
        before.scope, before.layout, before.exact, True, position, 0, parent.key, (), before.block_tokens
    )
    tag, generation = parent.key[:NAMESPACE_TAG_BYTES], generation_of(parent.key)
    return Keyed.of(tag, generation, record, np.empty(0, np.uint32))
