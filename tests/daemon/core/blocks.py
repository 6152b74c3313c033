"""Small cached sequences: blocks of 16 tokens, each named by what it and those before it hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from tensord.shm.payloads.prefix import PrefixRecord, Tokens, block_key
from tensord.shm.ring.layout import aligned

TAG = b"sequence"
BLOCK = 16
TREE_BYTES = 16
SCOPE = b"scope".ljust(16, b"-")
LAYOUT = b"layout".ljust(16, b"-")


class Block(NamedTuple):
    """A block to put."""

    key: bytes
    record: PrefixRecord
    packed: bytes

    @property
    def payload(self) -> bytes:
        """The packed record after the tree, and nothing else."""
        return bytes(aligned(TREE_BYTES)) + self.packed


def text(words: Sequence[int]) -> Tokens:
    """A sequence with a block of each word: (16 × words,) uint32."""
    return np.repeat(np.asarray(words, np.uint32), BLOCK)


def name(words: Sequence[int], tag: bytes = TAG) -> bytes:
    """The key of the last block of `words`, which are all of its sequence."""
    return block(words, tag).key


def block(words: Sequence[int], tag: bytes = TAG) -> Block:
    """The last block of `words`, which follows all those before."""
    return _block(tuple(words), tag)


@cache
def _block(words: tuple[int, ...], tag: bytes) -> Block:
    parent = None
    for end in range(1, len(words)):
        parent = _block(words[:end], tag).key
    record = PrefixRecord(SCOPE, LAYOUT, False, False, BLOCK * (len(words) - 1), BLOCK, parent, (), BLOCK)
    packed = record.pack(text(words[-1:])).tobytes()
    return Block(block_key(tag, packed), record, packed)


def query(tokens: Tokens) -> PrefixRecord:
    """All of a sequence, to ask for."""
    return PrefixRecord(SCOPE, LAYOUT, False, False, 0, len(tokens), None, (), BLOCK)
