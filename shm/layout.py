"""Where every byte of shared memory stands: one version, read back by the next daemon.

    index segment                                     ring segment
    ┌────────────────────────────┐ 0                  ┌────────────────────────────┐
    │ superblock         1 page  │                    │ span header      128 bytes │ 64-byte aligned
    ├────────────────────────────┤ buckets_at         │ payload: header, leaves    │
    │ per bucket: 8 fingerprints │                    ├────────────────────────────┤
    │ (64 bytes), 8 slots of 64  │                    │ …                          │
    │ …                          │                    └────────────────────────────┘
    ├────────────────────────────┤ uses_at
    │ u64 per slot: its reuse    │                    lane segment
    ├────────────────────────────┤ generations_at     ┌────────────────────────────┐ 0
    │ count; per namespace:      │                    │ header             1 page  │
    │ tag, generation (24 bytes) │                    │ pin words        4,096 × 8 │
    └────────────────────────────┘                    │ access log       8,192 × 8 │
                                                      └────────────────────────────┘

Owns: sizes, offsets, the packed form of the superblock and of a span's header. Owns no memory.

Invariants: all words are native little-endian u64 at 8-byte aligned places, so that a store or a load of one is a
single instruction on x86-64 (SYNC POINT: ARM needs the same of `memoryview.cast("Q")`, which holds, and fences of
its own where ordering is argued in index.py and lanes.py).
"""

from __future__ import annotations

import struct
import zlib
from binascii import crc_hqx
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from ..errors import Corrupt, LayoutMismatch

LAYOUT_VERSION: Final = 4
PAGE_BYTES: Final = 4096
ALIGN_BYTES: Final = 64

KEY_BYTES: Final = 32
NAMESPACE_TAG_BYTES: Final = 8
GENERATION_BYTES: Final = 24

BUCKET_SLOTS: Final = 8
SLOT_BYTES: Final = 64
SLOT_WORDS: Final = SLOT_BYTES // 8
# A bucket's fingerprints stand before its slots and not in a table of their own: a lookup in a large index then
# touches one page instead of two.
BUCKET_BYTES: Final = SLOT_BYTES * (1 + BUCKET_SLOTS)

SPAN_HEADER_BYTES: Final = 128
SPAN_EXPIRES_AT: Final = 88
TREE_BYTES_MAX: Final = 65_472
RING_BYTES_MAX: Final = 1 << 48
SPAN_COUNTER_BITS: Final = 48
SPAN_COUNTER_MASK: Final = (1 << SPAN_COUNTER_BITS) - 1
LANE_COUNTER_BITS: Final = 32
EPOCH_MAX: Final = (1 << 64 - SPAN_COUNTER_BITS) - 1

LANE_WORDS: Final = 4096
LANE_LOG_WORDS: Final = 8192
LANE_HEADER_WORDS: Final = PAGE_BYTES // 8
LANE_BYTES: Final = PAGE_BYTES + 8 * (LANE_WORDS + LANE_LOG_WORDS)

_MAGIC: Final = int.from_bytes(b"TENSORD\0", "little")
_LANE_MAGIC: Final = int.from_bytes(b"TNSRLANE", "little")
_SPAN_MAGIC: Final = 0x4E415053  # "SPAN"

_SUPERBLOCK: Final = struct.Struct("@13Q")
_SPAN_HEADER: Final = struct.Struct("@IIQ32sQQQddQIIdQ")
_CHECK: Final = struct.Struct("@I")
_DOUBLE, _WORD = struct.Struct("@d"), struct.Struct("@Q")
_EXPIRY_CHECK_BITS: Final = 16
_LANE_HEADER: Final = struct.Struct("@QQQ")

# A slot's place word says where the span begins (bits 6 to 47: spans are 64-byte aligned), how long its tree header is
# (bits 48 to 63), and in bit 0 whether a restarted daemon has yet to check it: all that a hit needs to make its views.
PLACE_OFFSET_MASK: Final = (1 << 48) - ALIGN_BYTES
PLACE_UNVERIFIED: Final = 1

# A slot's reuse word: its entry's uses in all (bits 0 to 15), the time of its last use (bits 16 to 47: in ticks of the
# daemon's clock, 0 for never), and the lanes that pin it (bits 48 to 63). All are hints of the daemon's; a number that
# does not fit is told as the highest that does.
REUSE_USED_SHIFT: Final = 16
REUSE_HOLDERS_SHIFT: Final = 48
REUSE_USES_MAX: Final = (1 << REUSE_USED_SHIFT) - 1
REUSE_TICKS_PER_S: Final = 64
REUSE_TICKS_MAX: Final = (1 << REUSE_HOLDERS_SHIFT - REUSE_USED_SHIFT) - 1
REUSE_HOLDERS_MAX: Final = (1 << 64 - REUSE_HOLDERS_SHIFT) - 1


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to the next multiple of 64."""
    return (size_bytes + ALIGN_BYTES - 1) & -ALIGN_BYTES


def span_bytes(payload_bytes: int) -> int:
    """Ring bytes that a span with a payload of `payload_bytes` occupies, its header included."""
    return SPAN_HEADER_BYTES + aligned(payload_bytes)


def pack_place(offset: int, tree_bytes: int) -> int:
    """A slot's place word: the span's ring offset and the length of its tree header."""
    assert not offset & ~PLACE_OFFSET_MASK, offset
    assert 0 < tree_bytes <= TREE_BYTES_MAX, tree_bytes
    return tree_bytes << 48 | offset


def pack_reuse(uses: int, holders: int, used_s: float = 0.0) -> int:
    """A slot's reuse word; `used_s`: the time of the last use, in seconds."""
    told = min(uses, REUSE_USES_MAX) | reuse_ticks(used_s) << REUSE_USED_SHIFT
    return min(holders, REUSE_HOLDERS_MAX) << REUSE_HOLDERS_SHIFT | told


def reuse_ticks(used_s: float) -> int:
    """A time in ticks, rounded up: a use is newer than all that was put before it."""
    return min(ceil(used_s * REUSE_TICKS_PER_S), REUSE_TICKS_MAX)


def unpack_reuse(word: int) -> tuple[int, int]:
    """(uses, holders) of a reuse word."""
    return word & REUSE_USES_MAX, word >> REUSE_HOLDERS_SHIFT


def reuse_used_s(word: int) -> float:
    """The time of the last use in a reuse word, rounded up to a tick, in seconds."""
    return (word >> REUSE_USED_SHIFT & REUSE_TICKS_MAX) / REUSE_TICKS_PER_S


def span_id(epoch: int, counter: int) -> int:
    """The name of one span, never given to another: its daemon's epoch, then a counter."""
    assert 0 < epoch <= EPOCH_MAX and 0 < counter <= SPAN_COUNTER_MASK, (epoch, counter)
    return epoch << SPAN_COUNTER_BITS | counter


@dataclass(frozen=True, slots=True)
class IndexGeometry:
    """The sizes of one index: `bucket_count` (a power of two) buckets of 8 slots, and generations of up to
    `namespaces_max` invalidated namespaces."""

    bucket_count: int
    namespaces_max: int = 1024

    def __post_init__(self) -> None:
        assert self.bucket_count > 0 and not self.bucket_count & (self.bucket_count - 1)
        assert self.namespaces_max > 0

    @classmethod
    def for_entries(cls, max_entries: int, namespaces_max: int = 1024) -> IndexGeometry:
        """Room for `max_entries`, filled to two thirds at most, where two choices hardly ever overflow."""
        slots = max(BUCKET_SLOTS, -(-max_entries * 3 // 2))
        return cls(1 << (-(-slots // BUCKET_SLOTS) - 1).bit_length(), namespaces_max)

    @property
    def slot_count(self) -> int:
        return self.bucket_count * BUCKET_SLOTS

    @property
    def entries_max(self) -> int:
        """The most entries it has room for in the sense of `for_entries`."""
        return self.slot_count * 2 // 3

    @property
    def buckets_at(self) -> int:
        return PAGE_BYTES

    @property
    def uses_at(self) -> int:
        return self.buckets_at + self.bucket_count * BUCKET_BYTES

    @property
    def generations_at(self) -> int:
        return aligned(self.uses_at + self.slot_count * 8)

    @property
    def index_bytes(self) -> int:
        end = self.generations_at + GENERATION_BYTES * (1 + self.namespaces_max)
        return (end + PAGE_BYTES - 1) & -PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Superblock:
    """The first page of the index segment: what a client or the next daemon must know to read the rest.

    `instance_id` names the memory (a new ring has a new one), `epoch` the incarnation of the daemon that serves it.
    `ring_bytes` is what clients map, and only rises; `limit_bytes`, never more, what may be taken of it, and
    `max_entries` how many entries there may be: as decided when the ring was made, or configured since.
    """

    instance_id: int
    epoch: int
    ring_bytes: int
    geometry: IndexGeometry
    limit_bytes: int
    max_entries: int

    def pack(self) -> bytes:
        g = self.geometry
        return _SUPERBLOCK.pack(
            _MAGIC,
            LAYOUT_VERSION,
            self.instance_id,
            self.epoch,
            self.ring_bytes,
            g.bucket_count,
            g.buckets_at,
            g.uses_at,
            g.index_bytes,
            g.namespaces_max,
            g.generations_at,
            self.limit_bytes,
            self.max_entries,
        )

    @classmethod
    def unpack(cls, page: bytes | memoryview) -> Superblock:
        """Reads it back.

        Raises:
            LayoutMismatch: no superblock, or one of another layout version; both versions are named.
        """
        if len(page) < _SUPERBLOCK.size:
            raise LayoutMismatch(f"the index has {len(page)} bytes, too few for a superblock")
        magic, version, instance, epoch, ring, buckets, *offsets = _SUPERBLOCK.unpack_from(page)
        *offsets, namespaces, generations_at, limit_bytes, max_entries = offsets
        if magic != _MAGIC:
            raise LayoutMismatch(
                "the index does not begin with tensord's superblock; `tensorctl purge --instance NAME` removes it"
            )
        if version != LAYOUT_VERSION:
            raise LayoutMismatch(
                f"the segments have layout version {version}, this tensord writes {LAYOUT_VERSION}; "
                "run the version that wrote them, or free them with `tensorctl purge --instance NAME`"
            )
        if not 0 < buckets <= 1 << 32 or buckets & (buckets - 1):
            raise LayoutMismatch(f"the superblock names {buckets} buckets, which is no power of two")
        if not 0 < namespaces <= 1 << 32:
            raise LayoutMismatch(f"the superblock names room for the generations of {namespaces} namespaces")
        geometry = IndexGeometry(buckets, namespaces)
        expected = [
            geometry.buckets_at,
            geometry.uses_at,
            geometry.index_bytes,
            geometry.generations_at,
        ]
        offsets.append(generations_at)
        if offsets != expected:
            raise LayoutMismatch(f"the superblock's offsets {offsets} are not those of its version, {expected}")
        return cls(instance, epoch, ring, geometry, limit_bytes, max_entries)


@dataclass(frozen=True, slots=True)
class SpanHeader:
    """The 128 bytes before a payload: enough to rebuild the index from the ring, and to check the payload.

    `checksum` is xxh3-64 over the whole payload as it lies in the ring. Times are CLOCK_BOOTTIME seconds (`clock`).
    `expires_s` is 0 where nothing expires; it is the one field that changes while the span stays, and has a check of
    its own (`expiry_word`). Behind the fields stands the CRC-32 of all others. `ttl_s`: how long after a touch it
    expires, 0 where nothing does. `prefix_bytes`: of the record that is the payload's first leaf where
    it is a piece of a sequence (`prefix.Piece`), else 0. `cost_ms`: what computing it took, as its putter says, or 0.
    `number`: the id of the first span that the entry had, 0 where that is this one.
    """

    key: bytes
    span_id: int
    payload_bytes: int
    tree_bytes: int
    checksum: int
    tokens: int
    created_s: float
    expires_s: float
    owner_uid: int
    prefix_bytes: int = 0
    cost_ms: float = 0.0
    ttl_s: float = 0.0
    number: int = 0

    def moved_to(self, span_id: int) -> SpanHeader:
        """The header of the span that has the payload from now on."""
        return replace(self, span_id=span_id, number=self.number or self.span_id)

    def pack(self, checksum: int | None = None) -> bytes:
        """The header's bytes; with `checksum` in place of its own."""
        fields = _SPAN_HEADER.pack(
            _SPAN_MAGIC,
            self.tree_bytes,
            self.span_id,
            self.key,
            self.payload_bytes,
            self.checksum if checksum is None else checksum,
            self.tokens,
            self.ttl_s,
            self.created_s,
            expiry_word(self.expires_s),
            self.owner_uid,
            self.prefix_bytes,
            self.cost_ms,
            self.number,
        )
        return (fields + _CHECK.pack(_header_check(fields))).ljust(SPAN_HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, span: bytes | memoryview) -> SpanHeader:
        """Reads it back from the first bytes of a span. `expires_s` may be more by a part in 2 ** 36.

        Raises:
            Corrupt: these bytes are no span header, or a damaged one.
        """
        magic, tree, span_id, key, payload, checksum, tokens, ttl, created, expiry, uid, prefix, cost, number = (
            _SPAN_HEADER.unpack_from(span)
        )
        if magic != _SPAN_MAGIC:
            raise Corrupt(f"a span header begins with {magic:#x}, not with {_SPAN_MAGIC:#x}")
        [check] = _CHECK.unpack_from(span, _SPAN_HEADER.size)
        if check != _header_check(span[: _SPAN_HEADER.size]):
            raise Corrupt(f"the header of span {span_id:#x} is damaged: its fields do not have the check {check:#x}")
        expires_s = _expires_s(expiry)
        return cls(key, span_id, payload, tree, checksum, tokens, created, expires_s, uid, prefix, cost, ttl, number)


def expiry_word(expires_s: float) -> int:
    """The word of a span's header that says when its entry ends: a float64, rounded up to 37 bits of its mantissa, with
    a CRC-16 in place of the lowest bits.

    One word, since it is written while others read it, and a daemon may be killed at any instruction.
    """
    [bits] = _WORD.unpack(_DOUBLE.pack(expires_s))
    high = bits + (1 << _EXPIRY_CHECK_BITS) - 1 >> _EXPIRY_CHECK_BITS
    return int(high << _EXPIRY_CHECK_BITS | _expiry_check(high))


def _expires_s(word: int) -> float:
    high = word >> _EXPIRY_CHECK_BITS
    if word != high << _EXPIRY_CHECK_BITS | _expiry_check(high):
        raise Corrupt(f"the word that says when an entry ends is damaged: {word:#x}")
    [expires_s] = _DOUBLE.unpack(_WORD.pack(high << _EXPIRY_CHECK_BITS))
    return float(expires_s)


def _expiry_check(high: int) -> int:
    # Not of zeros alone, or a word of zeros would be a sound one.
    return crc_hqx(high.to_bytes(6, "little"), 0xFFFF)


def _header_check(fields: bytes | memoryview) -> int:
    """CRC-32 of a header's fields but for the time of the entry's end, which changes by itself."""
    return zlib.crc32(fields[SPAN_EXPIRES_AT + 8 :], zlib.crc32(fields[:SPAN_EXPIRES_AT]))


def pack_lane_header(lane_id: int) -> bytes:
    """The first words of a lane's first page, written by the daemon before it hands the lane out.

    For the lane's client alone, which may write there: a daemon takes the id from the lane's name.
    """
    return _LANE_HEADER.pack(_LANE_MAGIC, LAYOUT_VERSION, lane_id)


def unpack_lane_header(page: bytes | memoryview) -> int:
    """The lane's id.

    Raises:
        LayoutMismatch: not a lane, or one of another layout version.
    """
    magic, version, lane_id = _LANE_HEADER.unpack_from(page)
    if magic != _LANE_MAGIC or version != LAYOUT_VERSION:
        raise LayoutMismatch(f"a lane with magic {magic:#x} and layout {version}, expected {LAYOUT_VERSION}")
    return int(lane_id)
