"""The byte layout of all shared memory, in one version. The next daemon reads it back.

    index segment                                     ring segment
    ┌────────────────────────────┐ 0                  ┌────────────────────────────┐
    │ superblock         1 page  │                    │ span header      192 bytes │ 64-byte aligned
    ├────────────────────────────┤ buckets_at         │ payload: header, leaves    │
    │ per bucket: 8 fingerprints │                    ├────────────────────────────┤
    │ (64 bytes), 8 slots of 64  │                    │ …                          │
    │ …                          │                    └────────────────────────────┘
    ├────────────────────────────┤ uses_at
    │ u64 per slot: its reuse    │                    lane segment
    ├────────────────────────────┤ generations_at     ┌────────────────────────────┐ 0
    │ count; per namespace:      │                    │ header             1 page  │
    │ tag, generation, uid: 24   │                    │ pin words        4,096 × 8 │
    ├────────────────────────────┤ settled_at         │ access log       8,192 × 8 │
    │ u64 per lane: last record  │                    │ queue of records 1,024×144 │
    ├────────────────────────────┤ refusals_at        └────────────────────────────┘
    │ u64 per lane: refusals     │
    └────────────────────────────┘

All times are seconds of CLOCK_BOOTTIME. Nobody can set this clock, it continues during suspend, and shared memory does
not outlive a boot. So a time written by one daemon is right for the next daemon and for every client.

Invariants: all words are native little-endian u64 at 8-byte aligned offsets, so one instruction loads or stores a word
on x86-64. SYNC POINT: ARM needs single-instruction loads and stores from `memoryview.cast("Q")` too, which it has, and
its own fences wherever index.py and lanes.py argue about ordering.
"""

from __future__ import annotations

import struct
import time
import zlib
from binascii import crc_hqx
from mmap import mmap
from typing import ClassVar, Final

from msgspec import Struct
from msgspec.structs import replace

from ...errors import Corrupt, LayoutMismatch

LAYOUT_VERSION: Final = 7
PAGE_BYTES: Final = 4096
ALIGN_BYTES: Final = 64

KEY_BYTES: Final = 32
NAMESPACE_TAG_BYTES: Final = 8
GENERATION_BYTES: Final = 24

BUCKET_SLOTS: Final = 8
SLOT_BYTES: Final = 64
SLOT_WORDS: Final = SLOT_BYTES // 8
# A bucket's fingerprints precede its slots instead of lying in a separate table: a lookup in a large index then
# touches one page instead of two.
BUCKET_BYTES: Final = SLOT_BYTES * (1 + BUCKET_SLOTS)

SPAN_HEADER_BYTES: Final = 192
SPAN_CHECKSUM_AT: Final = 144
SPAN_EXPIRES_AT: Final = 152
TREE_BYTES_MAX: Final = 65_472
RING_BYTES_MAX: Final = 1 << 48
SPAN_COUNTER_BITS: Final = 48
"""A span id is never reused: the epoch of the daemon that made it (16 bits), then a counter."""
LANE_COUNTER_BITS: Final = 32
EPOCH_MAX: Final = (1 << 64 - SPAN_COUNTER_BITS) - 1

LANE_WORDS: Final = 4096
LANE_LOG_WORDS: Final = 8192
LANE_HEADER_WORDS: Final = PAGE_BYTES // 8
QUEUE_AT: Final = PAGE_BYTES + 8 * (LANE_WORDS + LANE_LOG_WORDS)
QUEUE_RECORDS: Final = 1024
RECORD_BYTES: Final = 144
QUEUE_BYTES: Final = QUEUE_RECORDS * RECORD_BYTES
LANE_BYTES: Final = QUEUE_AT + QUEUE_BYTES
LANE_PLACES: Final = 1 << 16
"""Places for lanes in the index's tables `settled` and `refusals`. A lane has one of them while it exists."""
EPOCH_AT: Final = 24
"""Where the epoch is in the index."""
ASLEEP_AT: Final = 2056
"""Where the superblock's page says that the daemon sleeps, and wants a bell for a record that was added."""

PUNCHES_AT: Final = 2048
"""Where the superblock's page has the count of punches. It grows after pages of the ring were returned to the system
and before a span is placed there, and at each start of a daemon. 0: the daemon does not count."""

_MAGIC: Final = int.from_bytes(b"TENSORD\0", "little")
_LANE_MAGIC: Final = int.from_bytes(b"TNSRLANE", "little")
SPAN_MAGIC: Final = 0x4E415053  # "SPAN"

_SUPERBLOCK: Final = struct.Struct("@13Q")
SPAN_HEADER: Final = struct.Struct("@IIQ32sQQddIIdQ32sI")
SPAN_TAIL: Final = struct.Struct("=IQQ")
"""After a header's fields: their CRC-32, the checksum of the payload, and the time of expiry."""
NO_KEY: Final = bytes(KEY_BYTES)
_DOUBLE, _WORD = struct.Struct("@d"), struct.Struct("@Q")
_EXPIRY_CHECK_BITS: Final = 16
_LANE_HEADER: Final = struct.Struct("@QQQ")


def boot_s() -> float:
    """Seconds since the machine was booted."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def unix_at_boot_s() -> float:
    """The Unix time of the boot, according to the wall clock's present setting."""
    return time.time() - boot_s()


def aligned(size_bytes: int) -> int:
    """`size_bytes`, rounded up to the next multiple of 64."""
    return (size_bytes + ALIGN_BYTES - 1) & -ALIGN_BYTES


def span_bytes(payload_bytes: int) -> int:
    """Ring bytes occupied by a span with a payload of `payload_bytes`, header included."""
    return SPAN_HEADER_BYTES + aligned(payload_bytes)


def punches_of(index: bytes | memoryview | mmap) -> int:
    """The count of punches in an index (PUNCHES_AT)."""
    return int(_WORD.unpack_from(index, PUNCHES_AT)[0])


def count_punch(index: mmap) -> None:
    """Raises the count of punches. Never to 0."""
    _WORD.pack_into(index, PUNCHES_AT, punches_of(index) % ((1 << 64) - 1) + 1)


class IndexGeometry(Struct, frozen=True):
    """The sizes of one index: `bucket_count` buckets of 8 slots (a power of two), and generations of up to
    `namespaces_max` namespaces."""

    bucket_count: int
    namespaces_max: int = 1024

    def __post_init__(self) -> None:
        assert self.bucket_count > 0 and not self.bucket_count & (self.bucket_count - 1)
        assert self.namespaces_max > 0

    @classmethod
    def for_entries(cls, max_entries: int, namespaces_max: int = 1024) -> IndexGeometry:
        """The geometry for `max_entries` entries. It fills at most two thirds of the slots, so that a key's two buckets
        are hardly ever both full."""
        slots = max(BUCKET_SLOTS, -(-max_entries * 3 // 2))
        return cls(1 << (-(-slots // BUCKET_SLOTS) - 1).bit_length(), namespaces_max)

    buckets_at: ClassVar[int] = PAGE_BYTES

    @property
    def slot_count(self) -> int:
        return self.bucket_count * BUCKET_SLOTS

    @property
    def entries_max(self) -> int:
        """The most entries that fill no more than two thirds of the slots, as in `for_entries`."""
        return self.slot_count * 2 // 3

    @property
    def uses_at(self) -> int:
        return self.buckets_at + self.bucket_count * BUCKET_BYTES

    @property
    def generations_at(self) -> int:
        return aligned(self.uses_at + self.slot_count * 8)

    @property
    def settled_at(self) -> int:
        return aligned(self.generations_at + GENERATION_BYTES * (1 + self.namespaces_max))

    @property
    def refusals_at(self) -> int:
        return self.settled_at + 8 * LANE_PLACES

    @property
    def index_bytes(self) -> int:
        end = self.refusals_at + 8 * LANE_PLACES
        return (end + PAGE_BYTES - 1) & -PAGE_BYTES


class Superblock(Struct, frozen=True):
    """The first page of the index segment: the facts that a client or the next daemon needs to read the rest.
    `instance_id` identifies the memory; a new ring has a new one. `epoch` is the incarnation of the daemon that serves
    it. `ring_bytes` is the size that clients map; it only grows. `limit_bytes`, at most `ring_bytes`, is the part of
    the ring that may be used, and `max_entries` the limit on entries; both may be configured later."""

    instance_id: int
    epoch: int
    ring_bytes: int
    geometry: IndexGeometry
    limit_bytes: int
    max_entries: int

    def pack(self) -> bytes:
        g = self.geometry
        places = (g.bucket_count, g.buckets_at, g.uses_at, g.index_bytes, g.namespaces_max, g.generations_at)
        whose = (_MAGIC, LAYOUT_VERSION, self.instance_id, self.epoch, self.ring_bytes)
        return _SUPERBLOCK.pack(*whose, *places, self.limit_bytes, self.max_entries)

    @staticmethod
    def other_version(page: bytes) -> int | None:
        """The layout version of an index that another release wrote; None if this release's, or if it is no index."""
        if len(page) < _SUPERBLOCK.size:
            return None
        magic, version = _SUPERBLOCK.unpack_from(page)[:2]
        return int(version) if magic == _MAGIC and version != LAYOUT_VERSION else None

    @classmethod
    def unpack(cls, page: bytes | memoryview) -> Superblock:
        """Reads the superblock from the first page of an index. Raises LayoutMismatch: the page has no superblock, or
        one of another version; the message names both versions."""
        purge = "`tensorctl purge --instance NAME` removes it"
        if len(page) < _SUPERBLOCK.size:
            raise LayoutMismatch(f"the index has {len(page)} bytes, and no superblock; {purge}")
        found = _SUPERBLOCK.unpack_from(page)
        magic, version, instance, epoch, ring, buckets, _, _, _, namespaces, _, limit_bytes, max_entries = found
        if magic != _MAGIC:
            raise LayoutMismatch(f"the index does not begin with tensord's superblock; {purge}")
        _check_version(version)
        if not 0 < buckets <= 1 << 32 or buckets & (buckets - 1) or not 0 < namespaces <= 1 << 32:
            sizes = f"{buckets} buckets, which has to be a power of two, and the generations of {namespaces} namespaces"
            raise LayoutMismatch(f"the superblock names {sizes}")
        made = cls(instance, epoch, ring, IndexGeometry(buckets, namespaces), limit_bytes, max_entries)
        if made.pack() != page[: _SUPERBLOCK.size]:
            raise LayoutMismatch(f"the superblock's offsets are not those of its version: {found[6:9]}, {found[10]}")
        return made


class SpanHeader(Struct, frozen=True):
    """The 192 bytes before a payload. They suffice to rebuild the index from the ring and to check the payload.

    `checksum`: xxh3-64 over the whole payload as it lies in the ring; 0: nobody has taken it yet. `expires_s`: the time
    of expiry, 0 for none. Only these two change while the span exists; the second has a check of its own
    (`expiry_word`). `ttl_s`: the time to live after each touch, 0 for none. `prefix_bytes`: the length of the block's
    record, the payload's first leaf (`PrefixRecord`); 0 if the payload is not a block of a sequence. `cost_ms`: the
    time that computing the payload took, as its client reported it; 0 if unknown. `number`: the id of the entry's first
    span; 0 if this span is the first. `parent`: the key of the entry's parent; None if it has none.
    These two follow the other fields and a CRC-32 of them.
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
    parent: bytes | None = None

    def moved_to(self, span_id: int) -> SpanHeader:
        """The header for a copy of the payload in the span `span_id`."""
        return replace(self, span_id=span_id, number=self.number or self.span_id)

    def pack(self, checksum: int | None = None) -> bytes:
        """The header's 192 bytes. `checksum` replaces the header's own checksum if given."""
        what = (SPAN_MAGIC, self.tree_bytes, self.span_id, self.key, self.payload_bytes, self.tokens)
        whose = (self.ttl_s, self.created_s, self.owner_uid, self.prefix_bytes, self.cost_ms, self.number)
        fields = SPAN_HEADER.pack(*what, *whose, self.parent or NO_KEY, self.parent is not None)
        tail = (self.checksum if checksum is None else checksum, expiry_word(self.expires_s))
        return (fields + SPAN_TAIL.pack(zlib.crc32(fields), *tail)).ljust(SPAN_HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, span: bytes | memoryview) -> SpanHeader:
        """Reads a header from the first bytes of a span. `expires_s` is up to one part in 2 ** 36 later than packed.
        Raises Corrupt: the bytes are not a span header, or a damaged one."""
        magic, tree, span_id, key, payload, tokens, ttl, created, uid, *rest = SPAN_HEADER.unpack_from(span)
        prefix, cost, number, parent, has_parent = rest
        if magic != SPAN_MAGIC:
            raise Corrupt(f"a span header begins with {magic:#x}, not with {SPAN_MAGIC:#x}")
        check, checksum, expiry = SPAN_TAIL.unpack_from(span, SPAN_HEADER.size)
        if check != zlib.crc32(span[: SPAN_HEADER.size]):
            raise Corrupt(f"the header of span {span_id:#x} is damaged: its fields do not have the check {check:#x}")
        expires_s = _expires_s(expiry)
        before = (key, span_id, payload, tree, checksum, tokens, created, expires_s, uid, prefix, cost, ttl, number)
        return cls(*before, parent if has_parent else None)


def expiry_word(expires_s: float) -> int:
    """The header word for an entry's time of expiry: a float64 whose mantissa is rounded up to 37 bits, with a CRC-16
    in place of the lowest 16 bits. One word, since readers load it while the daemon stores it, or is killed."""
    [bits] = _WORD.unpack(_DOUBLE.pack(expires_s))
    high = bits + (1 << _EXPIRY_CHECK_BITS) - 1 >> _EXPIRY_CHECK_BITS
    return int(high << _EXPIRY_CHECK_BITS | _expiry_check(high))


def _expires_s(word: int) -> float:
    high = word >> _EXPIRY_CHECK_BITS
    if word != high << _EXPIRY_CHECK_BITS | _expiry_check(high):
        raise Corrupt(f"the time of expiry in a span header is damaged: {word:#x}")
    [expires_s] = _DOUBLE.unpack(_WORD.pack(high << _EXPIRY_CHECK_BITS))
    return float(expires_s)


def _expiry_check(high: int) -> int:
    # The initial value is not 0: with 0 the check of a word of zeros would be 0, and the word would pass.
    return crc_hqx(high.to_bytes(6, "little"), 0xFFFF)


def pack_lane_header(lane_id: int) -> bytes:
    """The first words of a lane's first page, which its client reads. The client can write the page too, so a daemon
    takes the lane's id from its file name."""
    return _LANE_HEADER.pack(_LANE_MAGIC, LAYOUT_VERSION, lane_id)


def unpack_lane_header(page: mmap) -> int:
    """The id of the lane whose first page this is. Raises LayoutMismatch if it is none of this layout version."""
    magic, version, lane_id = _LANE_HEADER.unpack_from(page)
    if magic != _LANE_MAGIC:
        raise LayoutMismatch(f"a lane with magic {magic:#x}; expected {_LANE_MAGIC:#x}")
    _check_version(version)
    return int(lane_id)


def _check_version(version: int) -> None:
    if version != LAYOUT_VERSION:
        versions = f"the shared memory has layout version {version}, this tensord reads {LAYOUT_VERSION}"
        remedy = "install the same release of tensord for the daemon and its clients, and restart them"
        raise LayoutMismatch(f"{versions}: {remedy}")
