"""Sequences that share prefixes as agents and conversations do, without a model: text, blocks, queries.

Owns: the shape of the forest. System prompts are the roots. A sequence starts a conversation after a system prompt,
continues another conversation at its end, or branches off within it. Some sequences are spines: other sequences branch
off a spine every 64 tokens. The logarithm of the length is spread evenly. The same seed gives the same forest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensord.shm.payloads.prefix import TOKEN_BYTES, PrefixRecord, Tokens

SHORTEST, LONGEST = 2048, 32_768
BRANCH_EVERY: Final = 64
TAG: Final = b"prefixes"
SCOPE: Final = bytes(range(16))
LAYOUT: Final = bytes(range(16, 32))
_VOCABULARY: Final = 152_064
_NEW_CONVERSATION, _NEXT_TURN = 0.35, 0.35  # all other sequences branch off within one
_FIRST: Final = 4  # the first sequences continue no other
_SPINES_EACH: Final = 6250  # sequences for each spine
_SPARE_TOKENS: Final = 8 << 20

Query = tuple[PrefixRecord, Tokens]
Block = tuple[bytes, PrefixRecord, int]
"""Key, record, and the byte offset of the text."""


class Forest:
    """`count` sequences, whose text lies in one array. A block that sequences share has the text of the first one.

    Args:
        count: number of sequences.
        block_tokens: tokens of a full block.
        seed: seed of all random draws.
    """

    def __init__(self, count: int, block_tokens: int = 256, seed: int = 0) -> None:
        self.block_tokens = block_tokens
        self._chance = np.random.default_rng(seed)
        drawn = np.exp(self._chance.uniform(np.log(SHORTEST), np.log(LONGEST), count)).astype(np.int64)
        self.spines = list(range(0, count, _SPINES_EACH))
        drawn[self.spines] = LONGEST
        spots = self._branch_spots(count)
        for number, (_, at) in spots.items():
            drawn[number] = min(LONGEST, max(SHORTEST, at + 1 + number % 512))
        self.ends = np.cumsum(drawn)
        self.starts = self.ends - drawn
        self.text = np.empty(int(self.ends[-1]) + _SPARE_TOKENS, np.uint32)
        self._used = int(self.ends[-1])
        # A sequence's blocks: the full blocks that it shares with `_parent`, then its own.
        self._parent = np.full(count, -1, np.int64)
        self._own_from = np.zeros(count, np.int64)
        self._prompts = [self._words(int(n)) for n in self._chance.integers(512, SHORTEST, max(4, count // 1000))]
        self._first_with: dict[int, int] = {}  # per system prompt: later sequences reuse the blocks of this sequence
        for number in range(count):
            self._grow(number, spots.get(number))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def tokens(self) -> int:
        """The tokens of all sequences; a shared token counts once for each sequence."""
        return int(self.ends[-1])

    @property
    def block_count(self) -> int:
        """The number of blocks of all sequences; a shared block counts once."""
        own = self.ends - self.starts - self._own_from[: len(self)] * self.block_tokens
        return int((-(-own // self.block_tokens)).sum())

    @property
    def memory(self) -> memoryview:
        """The bytes in which all texts stand."""
        return memoryview(self.text).cast("B")  # type: ignore[arg-type]

    def sequence(self, number: int) -> Tokens:
        return self.text[self.starts[number] : self.ends[number]]

    def key(self, number: int, block: int) -> bytes:
        """The key of a block of a sequence; other sequences may share the block."""
        while block < self._own_from[number]:
            number = int(self._parent[number])
        return TAG + struct.pack("@QQQ", number, block, 0)

    def blocks(self, number: int) -> Iterator[Block]:
        """The blocks that no earlier sequence has."""
        start, length = int(self.starts[number]), int(self.ends[number] - self.starts[number])
        return self._cut(number, start, length, int(self._own_from[number]) * self.block_tokens)

    def more(self, number: int, length: int) -> list[Block]:
        """The new blocks of a sequence of `length` tokens that is not in the forest.

        It branches off sequence `number` after half of the blocks of the shorter one.
        """
        if self._used + length > len(self.text):
            raise RuntimeError(f"no room for {length} more tokens: use fewer rounds")
        size, text = self.block_tokens, self._used
        self._used += length
        shared = min(length, int(self.ends[number] - self.starts[number])) // (2 * size) * size
        self.text[text : text + shared] = self.sequence(number)[:shared]
        self.text[text + shared : text + length] = self._words(length - shared)
        found = len(self._parent)
        self._parent = np.append(self._parent, number)
        self._own_from = np.append(self._own_from, shared // size)
        return list(self._cut(found, text, length, shared))

    def _cut(self, number: int, text: int, length: int, first: int) -> Iterator[Block]:
        size = self.block_tokens
        parent = self.key(number, first // size - 1) if first else None
        for at in range(first, length, size):
            key = TAG + struct.pack("@QQQ", number, at // size, 0)
            record = PrefixRecord(SCOPE, LAYOUT, False, False, at, min(size, length - at), parent, (), size)
            yield key, record, (text + at) * TOKEN_BYTES
            parent = key

    # ---- queries

    def query(self, number: int, cut: int) -> Query:
        """LONGEST tokens: the first `cut` of a sequence, then random ones."""
        tokens = np.append(self.sequence(number)[:cut], self._words(LONGEST - cut))
        return PrefixRecord(SCOPE, LAYOUT, False, False, 0, LONGEST, None, (), self.block_tokens), tokens

    def going_on(self) -> Query:
        """A query whose beginning is cached: at least half of a sequence."""
        number = int(self._chance.integers(len(self)))
        length = int(self.ends[number] - self.starts[number])
        return self.query(number, int(self._chance.integers(length // 2, length + 1)))

    def deep(self) -> Query:
        """A query that is cached nearly to its end."""
        lengths = self.ends - self.starts
        long = np.flatnonzero(lengths >= min(LONGEST * 9 // 10, int(lengths.max())))
        number = int(long[self._chance.integers(len(long))])
        return self.query(number, int(lengths[number]))

    def branching(self) -> Query:
        """A query along a spine, past a branch every 64 tokens, to a place in the spine's second half."""
        number = self.spines[int(self._chance.integers(len(self.spines)))]
        return self.query(number, int(self._chance.integers(LONGEST // 2, LONGEST + 1)))

    # ---- growing

    def _branch_spots(self, count: int) -> dict[int, tuple[int, int]]:
        """The sequences that branch off a spine, each with its spine and place: one every 64 tokens."""
        found = {}
        each = LONGEST // BRANCH_EVERY - 1
        for spine in self.spines:
            children = range(spine + 1, min(spine + 1 + each, count * 3 // 4))
            for place, number in enumerate(children, 1):
                found[number] = (spine, place * BRANCH_EVERY)
        return found

    def _grow(self, number: int, spot: tuple[int, int] | None) -> None:
        text = self.sequence(number)
        drawn = self._chance.random()
        at = 0
        if number in self.spines:
            pass
        elif spot is None and (number < _FIRST or drawn < _NEW_CONVERSATION):
            prompt = int(self._chance.integers(len(self._prompts)))
            at = len(self._prompts[prompt])
            text[:at] = self._prompts[prompt]
            owner = self._first_with.setdefault(prompt, number)
            if owner != number:
                self._parent[number], self._own_from[number] = owner, at // self.block_tokens
        else:
            parent, shared = spot or self._origin(number, drawn)
            at = min(shared, len(text) - 1)  # with at least one token of its own
            text[:at] = self.sequence(parent)[:at]
            self._parent[number], self._own_from[number] = parent, at // self.block_tokens
        text[at:] = self._words(len(text) - at)

    def _origin(self, number: int, drawn: float) -> tuple[int, int]:
        """The sequence that this one continues, and the token where it does."""
        parent = int(self._chance.integers(number))
        length = int(self.ends[parent] - self.starts[parent])
        on_the_way = drawn >= _NEW_CONVERSATION + _NEXT_TURN
        return parent, int(self._chance.integers(length // 4, length)) if on_the_way else length

    def _words(self, count: int) -> Tokens:
        return self._chance.integers(_VOCABULARY, size=count, dtype=np.uint32)
