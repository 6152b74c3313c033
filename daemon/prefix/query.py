"""A query of the prefix index: its text, its media, and its running digests.

A digest stands for everything up to its position: the digest before it, the text since then, and the media that begin
in that text. Digests are seeded, so that without the seed two different sequences cannot be made to have equal ones.

Owns the computation of digests. Does not own the stored digests (`index`).
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import xxhash

from ...errors import BadPrefix
from ...shm.payloads.prefix import MEDIA_BYTES, TOKEN_BYTES, Media, PrefixRecord, Tokens, packed_media

_SEED: Final = (1 << 64) - 1
_SNAPSHOT: Final = struct.Struct("@QQ")


def next_digest(before: int, text: bytes | memoryview, media: bytes) -> int:
    """The digest after `text`, in which `media` begin, continued from the digest `before`: 128 bits.

    Half of `before` seeds the hash, and all of it is mixed in afterwards. So two different digests have different
    successors, except for a collision of 128 bits.
    """
    if media:
        text = b"".join((text, media))
    return xxhash.xxh3_128_intdigest(text, before & _SEED) ^ before


def initial_digest(seed: int) -> int:
    """The digest of an empty sequence."""
    return xxhash.xxh3_128_intdigest(seed.to_bytes(32, "little", signed=True))


def snapshot_digest(start: int, name: int, offset: int, text: bytes | memoryview, media: bytes) -> int:
    """The digest by which a snapshot is found: of the node `name` and the next `offset` tokens and media after it."""
    return next_digest(next_digest(start, _SNAPSHOT.pack(name, offset), b""), text, media)


def checked(media: tuple[Media, ...], start: int, end: int) -> None:
    """Checks items that must begin from `start` to `end`. Of a block, only its own: an item that overlaps one of an
    earlier block is in no query, so the block is never matched. Raises BadPrefix."""
    ends: dict[str, int] = {}
    last = (-1, "")
    for item in media:
        begin, length, modality, _ = item
        if not (start <= begin < end and length > 0):
            raise BadPrefix(f"{item} has no tokens, or does not begin among tokens {start} to {end}")
        if (begin, modality) <= last:
            raise BadPrefix(f"{item} is out of order")
        if ends.get(modality, 0) > begin:
            raise BadPrefix(f"{item} overlaps the {modality} before it, which ends at token {ends[modality]}")
        last = begin, modality
        ends[modality] = begin + length


class Query:
    """The sequence that a client asks for: `record`, with its tokens `folded`, (record.count,) uint32. Raises BadPrefix
    if media are out of range or order."""

    def __init__(self, record: PrefixRecord, folded: Tokens, start: int) -> None:
        checked(record.media, 0, record.count)
        if past := next((item for item in record.media if item.end > record.count), None):
            raise BadPrefix(f"{past} ends at token {past.end}, past the query's {record.count}")
        self.count = record.count
        self.media = record.media
        self._text = np.ascontiguousarray(folded, np.uint32).view(np.uint8).data
        self._packed = packed_media(record.media)
        self._starts = [item.start for item in record.media]
        self._joined = _joined(record.media) if record.media else []
        self._start = start
        self._digests: dict[int, list[int]] = {}

    def text(self, start: int, end: int) -> bytes:
        return bytes(self._text[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def packed(self, start: int, end: int) -> bytes:
        """The packed media that begin in [start, end)."""
        if not self._starts:
            return b""
        first = bisect_left(self._starts, start)
        return self._packed[first * MEDIA_BYTES : bisect_left(self._starts, end, first) * MEDIA_BYTES]

    def uncut(self, position: int) -> int:
        """`position`, or the start of the item that contains it. O(log n)."""
        if not self._joined:
            return position
        rank = bisect_left(self._joined, (position,)) - 1
        return self._joined[rank][0] if rank >= 0 and position < self._joined[rank][1] else position

    def checkpoints(self, step: int) -> Iterator[int]:
        """The digests of the first `step` tokens, of the first 2 * `step`, and so on. Each is computed once, when it is
        needed."""
        digests = self._digests.setdefault(step, [])
        yield from digests
        before = digests[-1] if digests else self._start
        text, step_bytes = self._text, step * TOKEN_BYTES
        for at in range(len(digests) * step, self.count - step + 1, step):
            media = self.packed(at, at + step) if self.media else b""
            before = next_digest(before, text[at * TOKEN_BYTES : at * TOKEN_BYTES + step_bytes], media)
            digests.append(before)
            yield before


def _joined(media: Sequence[Media]) -> list[tuple[int, int]]:
    """The starts and ends of items. Overlapping items count as one: a position moved back to the start of one item may
    lie in another."""
    joined: list[tuple[int, int]] = []
    for start, length, _, _ in media:
        if joined and start < joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], start + length)
        else:
            joined.append((start, start + length))
    return joined
