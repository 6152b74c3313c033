"""A match is what the literal rules say, in random cases, while blocks come, are hidden, shown again, and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from tensord.daemon.store.table import LIVE, VICTIM
from tensord.shm.payloads.prefix import Media, kept

from .stand import PutSequence, SequenceStore, item

CASES = 2_000
LAYOUTS = (b"any 1", b"any 2", b"exact 1", b"exact 2")
MODALITIES = ("image", "audio", "video")


class World:
    """Sequences that have much in common, what is asked for, and what becomes of the blocks."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.stand = SequenceStore(
            block_tokens=self.chance.choice((16, 16, 16, 32)),
            checkpoint_tokens=self.chance.choice((16, 32, 64, 1024)),
            seed=seed,
        )
        self.alphabet = self.chance.choice((1, 2, 3))
        self.contents = self.chance.choice((1, 2))
        self.layouts = self.chance.choice((LAYOUTS, *((layout,) for layout in LAYOUTS)))
        self.has_media = self.chance.random() < 0.7
        self.length_max = self.chance.choice((24, 60, 110))
        self.puts: list[PutSequence] = []
        self.ending: list[tuple[int, int]] = []

    def step(self) -> None:
        what, stand, chance = self.chance.random(), self.stand, self.chance
        spans, table = stand.store.spans, stand.store.table
        known = sorted(table.by_key)
        if self.ending and (what < 0.3 or not known):
            row, span_id = self.ending.pop(chance.randrange(len(self.ending)))
            if table.span_ids[row] == span_id and table.states[row] in (LIVE, VICTIM):
                self.end(row)
        elif not known or (what < 0.5 and len(self.puts) < 12):
            tokens, media = self.sequence()
            layout = chance.choice(self.layouts)
            snapshots = self.snapshots(len(tokens)) if layout.startswith(b"exact") else None
            self.puts.append(stand.put(tokens, snapshots, media, layout))
        elif what < 0.75:
            spans.hide(stand.store.policy.victims(chance.randint(1, 4)), "capacity")
        elif spans.hidden and what < 0.9:
            # The end of victims, or their return with their ancestors.
            pinned = {table.span_ids[row] for row in spans.hidden.values() if chance.random() < 0.5}
            stand.scan(pinned)
        elif what > 0.95:
            self.end(table.by_key[chance.choice(known)])

    def end(self, row: int) -> None:
        """An entry ends; its children follow later."""
        span_ids = self.stand.store.table.span_ids
        self.ending += [(child, span_ids[child]) for child in self.stand.store.families.children_of(row)]
        self.stand.store.spans.end([row], "explicit")

    def sequence(self) -> tuple[list[int], list[Media]]:
        """One that begins as another does, or nearly."""
        chance = self.chance
        tokens: list[int] = []
        media: list[Media] = []
        if self.puts and chance.random() < 0.95:
            base = chance.choice(self.puts)
            cut = len(base.tokens) if chance.random() < 0.5 else chance.randint(1, len(base.tokens))
            tokens = base.tokens[:cut]
            media = [one for one in base.media if one.start < cut]
        tail = chance.choice((0, 1, chance.randint(0, 20), self.length_max))
        tokens = tokens + chance.choices(range(self.alphabet), k=max(tail, not tokens))
        del tokens[self.length_max :]
        if chance.random() < 0.3:
            tokens[chance.randrange(len(tokens))] = chance.randrange(self.alphabet)
        media = [one for one in media if one.start < len(tokens)]
        if self.has_media:
            if media and chance.random() < 0.3:
                changed = media.pop(chance.randrange(len(media)))
                if chance.random() < 0.7:
                    self.begin(media, changed.start, len(tokens))
            while chance.random() < 0.4:
                self.begin(media, chance.randrange(len(tokens)), len(tokens))
        return tokens, sorted(media, key=lambda one: (one.start, one.modality))

    def begin(self, media: list[Media], start: int, tokens: int) -> None:
        chance = self.chance
        new = item(chance.choice(MODALITIES), start, chance.randint(1, 20), chance.randrange(self.contents))
        if not any(one.modality == new.modality and one.start < new.end and new.start < one.end for one in media):
            media.append(new)

    def snapshots(self, length: int) -> set[int]:
        found = {self.chance.randint(1, length) for _ in range(self.chance.randint(0, 4))}
        return found | {length} if self.chance.random() < 0.6 else found

    def left(self) -> list[Cached]:
        """What is left of the sequences: as many tokens as blocks are there, snapshots as they are."""
        stand = self.stand
        live = {key for key, row in stand.store.table.by_key.items() if not self.orphan(row)}
        found = []
        for put in self.puts:
            length = 0
            for number, key in enumerate(put.blocks):
                if key not in live:
                    break
                length = min(len(put.tokens), (number + 1) * stand.block_tokens)
            there = {at for at, key in put.snapshots.items() if key in live}
            if length:
                media = [one for one in put.media if one.start < length]
                found.append(Cached(put.tokens[:length], media, there if put.exact else None))
        return found

    def orphan(self, row: int) -> bool:
        """Whether an ancestor has ended, or is hidden."""
        table = self.stand.store.table
        while table.states[row] == LIVE and table.parents[row]:
            row = table.parents[row]
        return table.states[row] != LIVE

    def ask(self, left: list[Cached]) -> Answer:
        tokens, media = self.sequence()
        media = [one for one in media if one.end <= len(tokens)]
        expected = answer(left, tokens, media)
        found = self.stand.ask(tokens, media)
        assert found.offset == expected.offset, (tokens, media, left)
        assert bool(found.snapshot) in expected.snapshots
        assert {str(name): number for name, number in kept(found.offset, media).items()} == expected.keep
        return expected


@pytest.mark.parametrize("part", range(2))
def test_a_match_is_what_the_literal_rules_say(part: int) -> None:
    cases = matched = with_snapshot = cut = 0
    seed = part * 1_000_000
    while cases < CASES // 2:
        seed += 1
        world = World(seed)
        for _ in range(40):
            world.step()
            left = world.left()
            for _ in range(8):
                expected = world.ask(left)
                cases += 1
                matched += expected.offset > 0
                with_snapshot += True in expected.snapshots
                cut += any(expected.keep.values())
        world.stand.check()
        for row in list(world.stand.store.table.by_key.values()):
            world.stand.store.spans.end([row], "explicit")
        for _ in range(3):
            world.stand.scan()
        assert not len(world.stand.index)
        world.stand.check()
    assert min(matched, with_snapshot * 4, cut * 2) > cases // 3, "cases that say little"


@dataclass(slots=True)
class Cached:
    """A sequence that was put. `snapshots`: the only positions from which it can be continued; None: any."""

    tokens: list[int]
    media: list[Media]
    snapshots: set[int] | None


@dataclass(slots=True)
class Answer:
    """`offset` tokens match. `snapshots`: whether one stands exactly there, in one or other of the sequences that match
    for so long. `keep`: items still to be encoded, per modality."""

    offset: int
    snapshots: set[bool] = field(default_factory=set)
    keep: dict[str, int] = field(default_factory=dict)


def agrees(cached: Cached, tokens: Sequence[int], media: Sequence[Media], position: int) -> bool:
    """Whether the first `position` tokens are the same, and the items that begin there."""
    if position > len(cached.tokens) or cached.tokens[:position] != tokens[:position]:
        return False
    return {item for item in cached.media if item.start < position} == {item for item in media if item.start < position}


def longest(cached: Cached, tokens: Sequence[int], media: Sequence[Media], least: int) -> int:
    """The last position from which the sequence can be continued, for this query; 0 if it is below `least`."""
    for position in range(len(tokens) - 1, max(0, least - 1), -1):
        continues = cached.snapshots is None or position in cached.snapshots
        if continues and not is_cut(media, position) and agrees(cached, tokens, media, position):
            return position
    return 0


def is_cut(media: Sequence[Media], position: int) -> bool:
    """Whether an item has begun before the position, and not ended."""
    return any(item.start < position < item.start + item.length for item in media)


def answer(sequences: Sequence[Cached], tokens: Sequence[int], media: Sequence[Media]) -> Answer:
    best = Answer(0, {False})
    for cached in sequences:
        offset = longest(cached, tokens, media, best.offset)
        if offset > best.offset:
            best = Answer(offset)
        if offset == best.offset and offset:
            best.snapshots.add(cached.snapshots is not None)
    for modality in ("image", "audio", "video"):
        left = [item for item in media if item.modality == modality and item.start + item.length > best.offset]
        best.keep[modality] = len(left)
    return best
