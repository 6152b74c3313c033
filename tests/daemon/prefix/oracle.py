"""The rules of a match, taken literally: no blocks, no folding, no digests; position after position, from the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tensord.shm.payloads.prefix import Media


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
