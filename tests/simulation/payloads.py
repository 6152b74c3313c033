"""Keys, and payloads that encode their key and their version.

A number stands for a key: one of ALL names, at one generation of its namespace. The names from KEYS on are blocks of
cached sequences. A block has only one version. The names in CHAINED are put with a parent, two names before.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, Final

import numpy as np

from tensord.shm.index.keys import generation_of, make_key
from tensord.shm.payloads.prefix import PrefixRecord, block_key
from tensord.shm.payloads.specs import Spec

from ..daemon.core.blocks import BLOCK, TAG, Block, block, query, text
from ..memory_bench import key

KEYS: Final = 20
TAGS: Final = (b"namespac", b"another ", TAG)
CHAINED: Final = range(12, KEYS)
SEQUENCES: Final = [words for length in (1, 2, 3) for words in product((1, 2), repeat=length)]
ALL: Final = KEYS + len(SEQUENCES)


def tag_of(number: int) -> bytes:
    """The namespace of a key."""
    return TAG if is_block(number) else TAGS[number % ALL % 2]


def era_of(number: int) -> int:
    """The generation of its namespace at which a key was made."""
    return number // ALL


def is_block(number: int) -> bool:
    """Whether the number stands for a block of a cached sequence."""
    return number % ALL >= KEYS


@cache
def at(number: int) -> bytes:
    """The key of a number."""
    if is_block(number):
        return block_of(number).key
    return make_key(tag_of(number), key(number)[8:], era_of(number))


@cache
def number_of(key: bytes) -> int:
    """The number of a key."""
    first = generation_of(key) * ALL
    return next(number for number in range(first, first + ALL) if at(number) == key)


@cache
def block_of(number: int) -> Block:
    """The block of a sequence that `number` stands for."""
    era, words = era_of(number), SEQUENCES[number % ALL - KEYS]
    parent = before(number)
    there = replace(block(words).record, scope=scope(era), parent=None if parent is None else at(parent))
    record = there.pack(text(words[-1:])).tobytes()
    return Block(block_key(TAG, record, era), there, record)


def scope(era: int) -> bytes:
    """The namespace of sequences at one of its generations."""
    return b"scope %10d" % era


def asked(words: tuple[int, ...], era: int) -> tuple[PrefixRecord, Any]:
    """A query for a sequence and one more token: its record and its tokens."""
    tokens = np.append(text(words), np.uint32(999_999))
    return replace(query(tokens), scope=scope(era)), tokens


def blocks(words: tuple[int, ...], era: int) -> list[int]:
    """The numbers of a sequence's blocks, from its beginning."""
    return [era * ALL + KEYS + SEQUENCES.index(words[: end + 1]) for end in range(len(words))]


@cache
def before(number: int) -> int | None:
    """The number of the parent; None for the first block of a sequence, and for keys without a parent."""
    name = number % ALL
    if name in CHAINED:
        return number - 2
    words = SEQUENCES[name - KEYS] if is_block(number) else ()
    return blocks(words[:-1], era_of(number))[-1] if len(words) > 1 else None


def words_of(number: int, version: int) -> int:
    """The size of the payload in words of 8 bytes."""
    return 4 * BLOCK + number if is_block(number) else 24 + (number * 31 + version * 17) % 1200


def payload(number: int, version: int) -> Any:
    """f(key, version): one array, or a tree with one array; 200 bytes to 10 kB."""
    array = np.full(words_of(number, version), number << 32 | version, np.uint64)
    if is_block(number):
        return {"prefix": np.frombuffer(block_of(number).packed, np.uint8), "array": array}
    return array if number % 2 else {"number": number, "array": array}


def to_fill(tree: Any) -> Any:
    """The spec of a payload whose arrays are written in place."""
    if isinstance(tree, dict):
        return {name: to_fill(leaf) for name, leaf in tree.items()}
    return Spec(tree.shape, tree.dtype) if isinstance(tree, np.ndarray) else tree


def version_of(number: int, tree: Any) -> int:
    """The version of a key that a payload encodes.

    Raises:
        AssertionError: the payload belongs to another key, or mixes two payloads.
    """
    array = array_of(number, tree)
    first = int(array[0])
    assert (array == first).all(), f"key {number}: parts of two payloads, {first:#x} and others"
    assert first >> 32 == number, f"key {number} shows the payload of key {first >> 32}"
    version = first & 0xFFFFFFFF
    assert array.size == words_of(number, version), f"key {number}: version {version} has {array.size} words"
    return version


def array_of(number: int, tree: Any) -> Any:
    """The array of a payload."""
    return tree if number % 2 and not is_block(number) else tree["array"]
