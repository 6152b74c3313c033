"""Sequences that share prefixes, as agents and conversations make them, without a model: text, media, blocks, queries.

Owns: how they come about. System prompts stand at the roots; a sequence begins a conversation behind one of them, goes
on with another conversation where that ended, or leaves it somewhere on its way; and some are spines, which others
leave every 64 tokens. Lengths are spread evenly over their logarithm. The same seed gives the same forest.

Text is what a block's record holds: folded. Folding makes an item's tokens words of 32 random bits, so they are drawn
as such, and nothing is folded here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensord.shm.prefix import TOKEN_BYTES, Media, PrefixRecord, Tokens, packed_media, uncut

SHORTEST, LONGEST = 2048, 32_768
BRANCH_EVERY: Final = 64
TAG: Final = b"prefixes"
SCOPE: Final = bytes(range(16))
LAYOUT: Final = bytes(range(16, 32))
_VOCABULARY: Final = 152_064
_ITEM_TOKENS: Final = (256, 576, 1024)
_NEW_CONVERSATION, _NEXT_TURN = 0.35, 0.35  # the others leave one on its way
_FIRST: Final = 4  # which have nobody to go on from
_WITH_PICTURE: Final = 0.2
_SPINES_EACH: Final = 6250  # sequences for each spine
_SPARE_TOKENS: Final = 8 << 20
_RECORD_TOKENS: Final = 512  # for each sequence: one in four has a picture


class Forest:
    """`count` sequences, their whole text in one array. A block's is where the first sequence that has it stands; but
    where items begin in it, which a record has right before its tokens, both stand behind all sequences.

    Args:
        count: sequences.
        block_tokens: tokens of a whole block.
        seed: of everything that is drawn.
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
        self._memory = memoryview(self.text).cast("B")  # type: ignore[arg-type]
        self._used = int(self.ends[-1])
        self.media: dict[int, tuple[Media, ...]] = {}
        # A sequence's blocks: those of `_parent` as far as they are whole in what the two share, then its own.
        self._parent = np.full(count, -1, np.int64)
        self._own_from = np.zeros(count, np.int64)
        self._prompts = [self._words(int(n)) for n in self._chance.integers(512, SHORTEST, max(4, count // 1000))]
        self._records: dict[bytes, int] = {}
        self._first_with: dict[int, int] = {}  # per system prompt: others go on from that sequence's blocks
        for number in range(count):
            self._grow(number, spots.get(number))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def tokens(self) -> int:
        """Of all sequences, those that they share counted each time."""
        return int(self.ends[-1])

    def sequence(self, number: int) -> Tokens:
        return self.text[self.starts[number] : self.ends[number]]

    def key(self, number: int, block: int) -> bytes:
        """The key of a sequence's block, which may be another's too."""
        while block < self._own_from[number]:
            number = int(self._parent[number])
        return TAG + struct.pack("@QQQ", number, block, 0)

    def blocks(self, number: int) -> Iterator[tuple[bytes, PrefixRecord, int]]:
        """The blocks of a sequence that no sequence before it has: key, record, and the byte offset of the text."""
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
        """Where a block's text stands right behind its items."""
        if key not in self._records:
            words = np.frombuffer(packed_media(items), np.uint32)
            place = self._take(len(words) + count)
            self.text[place : place + len(words)] = words
            self.text[place + len(words) : place + len(words) + count] = self.text[at : at + count]
            self._records[key] = place + len(words)
        return self._records[key]

    def _take(self, count: int) -> int:
        """Room for so many tokens behind all sequences."""
        if self._used + count > len(self.text):
            raise RuntimeError(f"there is no room for {count} further tokens: use fewer rounds")
        self._used += count
        return self._used - count

    def more(self, number: int, length: int) -> list[tuple[bytes, PrefixRecord, int]]:
        """The new blocks of a sequence of `length` tokens that the forest does not have: it leaves sequence `number`
        behind half of the blocks that the shorter of the two has."""
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
        """The ring, as the index sees it."""
        return self._memory[at : at + size_bytes]

    # ---- queries

    def query(self, number: int, cut: int) -> tuple[PrefixRecord, Tokens]:
        """The first `cut` tokens of a sequence, or to where they would cut an item, and then others: LONGEST in all."""
        media = self.media.get(number, ())
        cut = uncut(cut, media)
        folded = np.empty(LONGEST, np.uint32)
        folded[:cut] = self.sequence(number)[:cut]
        folded[cut:] = self._words(LONGEST - cut)
        items = tuple(item for item in media if item.end <= cut)
        return PrefixRecord(SCOPE, LAYOUT, False, False, 0, LONGEST, None, items, self.block_tokens), folded

    def going_on(self) -> tuple[PrefixRecord, Tokens]:
        """A query that some sequence has the beginning of: at least the half of what that has."""
        number = int(self._chance.integers(len(self)))
        length = int(self.ends[number] - self.starts[number])
        return self.query(number, int(self._chance.integers(length // 2, length + 1)))

    def deep(self) -> tuple[PrefixRecord, Tokens]:
        """One of which nearly all is there."""
        lengths = self.ends - self.starts
        long = np.flatnonzero(lengths >= min(LONGEST * 9 // 10, int(lengths.max())))
        number = int(long[self._chance.integers(len(long))])
        return self.query(number, int(lengths[number]))

    def branching(self) -> tuple[PrefixRecord, Tokens]:
        """One that goes along a spine, past a branch every 64 tokens, to its end or a place of its second half."""
        number = self.spines[int(self._chance.integers(len(self.spines)))]
        cut = LONGEST if self._chance.random() < 0.5 else int(self._chance.integers(LONGEST // 2, LONGEST))
        return self.query(number, cut)

    def unknown(self) -> tuple[PrefixRecord, Tokens]:
        """One that nothing is there of."""
        return self.query(0, 0)

    # ---- growing

    def _branch_spots(self, count: int) -> dict[int, tuple[int, int]]:
        """Which sequences leave a spine, which one and where: every 64 tokens, as far as there are enough sequences."""
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
            at = uncut(min(shared, length - 1), media)  # with a word of its own at least
            media = tuple(item for item in media if item.end <= at)
            text[:at] = self.sequence(parent)[:at]
            self._parent[number], self._own_from[number] = parent, at // self.block_tokens
        text[at:] = self._words(length - at)
        if spot is None and number not in self.spines and self._chance.random() < _WITH_PICTURE:
            media = (*media, *self._picture(text, at, length))
        if media:
            self.media[number] = media

    def _origin(self, number: int, drawn: float) -> tuple[int, int]:
        """Which sequence it goes on from, and from which token."""
        parent = int(self._chance.integers(number))
        length = int(self.ends[parent] - self.starts[parent])
        on_the_way = drawn >= _NEW_CONVERSATION + _NEXT_TURN
        return parent, int(self._chance.integers(length // 4, length)) if on_the_way else length

    def _picture(self, text: Tokens, at: int, length: int) -> tuple[Media, ...]:
        """One, behind the first `at` tokens, if there is room for it."""
        tokens = _ITEM_TOKENS[int(self._chance.integers(len(_ITEM_TOKENS)))]
        if length - at < 2 * tokens:
            return ()
        start = int(self._chance.integers(at, length - tokens))
        text[start : start + tokens] = self._chance.integers(1 << 32, size=tokens, dtype=np.uint32)
        return (Media(start, tokens, "image", self._chance.bytes(32)),)

    def _words(self, count: int) -> Tokens:
        return self._chance.integers(_VOCABULARY, size=count, dtype=np.uint32)
