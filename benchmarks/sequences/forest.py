"""Sequences that share prefixes as agents and conversations do, without a model: text, media, blocks, queries.

Owns: the shape of the forest. System prompts are the roots. A sequence starts a conversation after a system prompt,
continues another conversation at its end, or branches off within it. Some sequences are spines: other sequences branch
off a spine every 64 tokens. The logarithm of the length is spread evenly. The same seed gives the same forest.

The text is folded, as in a block's record. Folding turns the tokens of an item into words of 32 random bits; the forest
draws such words and folds nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensord.shm.payloads.prefix import TOKEN_BYTES, Media, PrefixRecord, Tokens, packed_media, uncut

SHORTEST, LONGEST = 2048, 32_768
BRANCH_EVERY: Final = 64
TAG: Final = b"prefixes"
SCOPE: Final = bytes(range(16))
LAYOUT: Final = bytes(range(16, 32))
_VOCABULARY: Final = 152_064
_ITEM_TOKENS: Final = (256, 576, 1024)
_NEW_CONVERSATION, _NEXT_TURN = 0.35, 0.35  # all other sequences branch off within one
_FIRST: Final = 4  # the first sequences continue no other
_WITH_PICTURE: Final = 0.2
_SPINES_EACH: Final = 6250  # sequences for each spine
_SPARE_TOKENS: Final = 8 << 20
_RECORD_TOKENS: Final = 512  # for each sequence: one in four has a picture


class Forest:
    """`count` sequences, whose text lies in one array.

    The text of a block stands in the first sequence that contains the block. If items begin in a block, its record has
    the items right before the tokens; the text of such a block is copied, with its items, behind all sequences.

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
        self.text = np.empty(int(self.ends[-1]) + _SPARE_TOKENS + count * _RECORD_TOKENS, np.uint32)
        self.memory = memoryview(self.text).cast("B")  # type: ignore[arg-type]
        self._used = int(self.ends[-1])
        self.media: dict[int, tuple[Media, ...]] = {}
        # A sequence's blocks: the full blocks that it shares with `_parent`, then its own.
        self._parent = np.full(count, -1, np.int64)
        self._own_from = np.zeros(count, np.int64)
        self._prompts = [self._words(int(n)) for n in self._chance.integers(512, SHORTEST, max(4, count // 1000))]
        self._records: dict[bytes, int] = {}
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

    def sequence(self, number: int) -> Tokens:
        return self.text[self.starts[number] : self.ends[number]]

    def key(self, number: int, block: int) -> bytes:
        """The key of a block of a sequence; other sequences may share the block."""
        while block < self._own_from[number]:
            number = int(self._parent[number])
        return TAG + struct.pack("@QQQ", number, block, 0)

    def blocks(self, number: int) -> Iterator[tuple[bytes, PrefixRecord, int]]:
        """The blocks that no earlier sequence has: key, record, and the byte offset of the text."""
        start, length = int(self.starts[number]), int(self.ends[number] - self.starts[number])
        first = int(self._own_from[number]) * self.block_tokens
        yield from self._cut(number, start, length, first, self.media.get(number, ()))

    def _cut(
        self, number: int, text: int, length: int, first: int, media: tuple[Media, ...]
    ) -> Iterator[tuple[bytes, PrefixRecord, int]]:
        size = self.block_tokens
        parent = self.key(number, first // size - 1) if first else None
        for at in range(first, length, size):
            count = min(size, length - at)
            items = tuple(item for item in media if at <= item.start < at + count)
            key = TAG + struct.pack("@QQQ", number, at // size, 0)
            place = self._with_items(key, items, text + at, count) if items else text + at
            yield key, PrefixRecord(SCOPE, LAYOUT, False, False, at, count, parent, items, size), place * TOKEN_BYTES
            parent = key

    def _with_items(self, key: bytes, items: tuple[Media, ...], at: int, count: int) -> int:
        """The offset of a block's text, which stands right behind the block's items."""
        if key not in self._records:
            words = np.frombuffer(packed_media(items), np.uint32)
            place = self._take(len(words) + count)
            self.text[place : place + len(words)] = words
            self.text[place + len(words) : place + len(words) + count] = self.text[at : at + count]
            self._records[key] = place + len(words)
        return self._records[key]

    def _take(self, count: int) -> int:
        """Reserves room for so many tokens behind all sequences."""
        if self._used + count > len(self.text):
            raise RuntimeError(f"no room for {count} more tokens: use fewer rounds")
        self._used += count
        return self._used - count

    def more(self, number: int, length: int) -> list[tuple[bytes, PrefixRecord, int]]:
        """The new blocks of a sequence of `length` tokens that is not in the forest.

        It branches off sequence `number` after half of the blocks of the shorter one.
        """
        size = self.block_tokens
        shared = min(length, int(self.ends[number] - self.starts[number])) // (2 * size) * size
        text = self._take(length)
        self.text[text : text + shared] = self.sequence(number)[:shared]
        self.text[text + shared : text + length] = self._words(length - shared)
        found = len(self._parent)
        self._parent = np.append(self._parent, number)
        self._own_from = np.append(self._own_from, shared // size)
        return list(self._cut(found, text, length, shared, ()))

    def read(self, at: int, size_bytes: int) -> memoryview:
        """Bytes of the texts."""
        return self.memory[at : at + size_bytes]

    # ---- queries

    def query(self, number: int, cut: int) -> tuple[PrefixRecord, Tokens]:
        """LONGEST tokens: the first `cut` of a sequence (fewer if `cut` is within an item), then random ones."""
        media = self.media.get(number, ())
        cut = uncut(cut, media)
        folded = np.empty(LONGEST, np.uint32)
        folded[:cut] = self.sequence(number)[:cut]
        folded[cut:] = self._words(LONGEST - cut)
        items = tuple(item for item in media if item.end <= cut)
        return PrefixRecord(SCOPE, LAYOUT, False, False, 0, LONGEST, None, items, self.block_tokens), folded

    def going_on(self) -> tuple[PrefixRecord, Tokens]:
        """A query whose beginning is cached: at least half of a sequence."""
        number = int(self._chance.integers(len(self)))
        length = int(self.ends[number] - self.starts[number])
        return self.query(number, int(self._chance.integers(length // 2, length + 1)))

    def deep(self) -> tuple[PrefixRecord, Tokens]:
        """A query that is cached nearly to its end."""
        lengths = self.ends - self.starts
        long = np.flatnonzero(lengths >= min(LONGEST * 9 // 10, int(lengths.max())))
        number = int(long[self._chance.integers(len(long))])
        return self.query(number, int(lengths[number]))

    def branching(self) -> tuple[PrefixRecord, Tokens]:
        """A query along a spine, past a branch every 64 tokens, to a place in the spine's second half."""
        number = self.spines[int(self._chance.integers(len(self.spines)))]
        cut = LONGEST if self._chance.random() < 0.5 else int(self._chance.integers(LONGEST // 2, LONGEST))
        return self.query(number, cut)

    def unknown(self) -> tuple[PrefixRecord, Tokens]:
        """A query of which nothing is cached."""
        return self.query(0, 0)

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
        start, end = int(self.starts[number]), int(self.ends[number])
        length = end - start
        text = self.text[start:end]
        drawn = self._chance.random()
        media: tuple[Media, ...] = ()
        at = 0
        if number in self.spines:
            pass
        elif spot is None and (number < _FIRST or drawn < _NEW_CONVERSATION):
            prompt = int(self._chance.integers(len(self._prompts)))
            words = self._prompts[prompt]
            at = len(words)
            text[:at] = words
            owner = self._first_with.setdefault(prompt, number)
            if owner != number:
                self._parent[number], self._own_from[number] = owner, at // self.block_tokens
        else:
            parent, shared = spot or self._origin(number, drawn)
            media = self.media.get(parent, ())
            at = uncut(min(shared, length - 1), media)  # with at least one token of its own
            media = tuple(item for item in media if item.end <= at)
            text[:at] = self.sequence(parent)[:at]
            self._parent[number], self._own_from[number] = parent, at // self.block_tokens
        text[at:] = self._words(length - at)
        if spot is None and number not in self.spines and self._chance.random() < _WITH_PICTURE:
            media = (*media, *self._picture(text, at, length))
        if media:
            self.media[number] = media

    def _origin(self, number: int, drawn: float) -> tuple[int, int]:
        """The sequence that this one continues, and the token where it does."""
        parent = int(self._chance.integers(number))
        length = int(self.ends[parent] - self.starts[parent])
        on_the_way = drawn >= _NEW_CONVERSATION + _NEXT_TURN
        return parent, int(self._chance.integers(length // 4, length)) if on_the_way else length

    def _picture(self, text: Tokens, at: int, length: int) -> tuple[Media, ...]:
        """A picture behind the first `at` tokens, if there is room."""
        tokens = _ITEM_TOKENS[int(self._chance.integers(len(_ITEM_TOKENS)))]
        if length - at < 2 * tokens:
            return ()
        start = int(self._chance.integers(at, length - tokens))
        text[start : start + tokens] = self._chance.integers(1 << 32, size=tokens, dtype=np.uint32)
        return (Media(start, tokens, "image", self._chance.bytes(32)),)

    def _words(self, count: int) -> Tokens:
        return self._chance.integers(_VOCABULARY, size=count, dtype=np.uint32)
