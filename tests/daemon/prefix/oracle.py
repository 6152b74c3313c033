"""The rules of a match, taken literally: no blocks, no folding, no digests; position after position, from the last."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tensord.shm.payloads.prefix import LAYOUT_BYTES, Media

Kind = Literal["normal", "rotating", "shared", "recurrent"]


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps of a sequence of `length` tokens: all of them, the last `window` ones, or a state after each
    of the positions in `snapshots`."""

    kind: Kind
    length: int = 0
    window: int = 0
    snapshots: tuple[int, ...] = ()

    @property
    def exact(self) -> bool:
        """True if the layer can be continued only at a position with a snapshot."""
        return self.kind == "recurrent" or (self.kind == "rotating" and self.length > self.window)


def can_rewind_to(layer: Layer, position: int) -> bool:
    """True if the layer can be continued after its first `position` tokens."""
    match layer.kind:
        case "shared":
            return True
        case "recurrent":
            return position in layer.snapshots
        case "rotating" if layer.length > layer.window:
            return position == layer.length
        case _:
            return position <= layer.length


def layout(layers: Sequence[Layer], block_tokens: int) -> tuple[bytes, bool]:
    """A digest by which sequences with equal layers share blocks, and whether they need snapshots."""
    described = [f"{layer.kind} {layer.window} {layer.exact}" for layer in layers]
    digest = hashlib.sha256("\n".join([str(block_tokens), *described]).encode()).digest()[:LAYOUT_BYTES]
    return digest, any(layer.exact for layer in layers)


@dataclass(slots=True)
class Cached:
    """A sequence that was put: all its tokens and media, and what its layers keep."""

    tokens: list[int]
    media: list[Media]
    layers: list[Layer]


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
    """The last position from which the sequence's layers can be continued, for this query; 0 if it is below `least`."""
    same = 0
    for ours, theirs in zip(tokens, cached.tokens, strict=False):
        if ours != theirs:
            break
        same += 1
    for position in range(min(same, len(tokens) - 1), max(0, least - 1), -1):
        for layer in cached.layers:
            if not can_rewind_to(layer, position):
                break
        else:
            if not is_cut(media, position) and agrees(cached, tokens, media, position):
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
            best.snapshots.add(any(layer.exact for layer in cached.layers))
    for modality in ("image", "audio", "video"):
        left = [item for item in media if item.modality == modality and item.start + item.length > best.offset]
        best.keep[modality] = len(left)
    return best
