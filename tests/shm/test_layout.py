"""The layout: what is written is read back, what another version wrote is refused with both versions named."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from tensord.errors import Corrupt, LayoutMismatch
from tensord.shm.ring import layout
from tensord.shm.ring.layout import IndexGeometry, SpanHeader, Superblock

U64 = st.integers(0, (1 << 64) - 1)
TIMES = st.floats(0, 4e9)


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
@example(11, 1)  # an odd one that a rounded-down half let through
def test_an_index_is_at_most_two_thirds_full_and_its_parts_do_not_overlap(max_entries: int, namespaces: int) -> None:
    geometry = IndexGeometry.for_entries(max_entries, namespaces)
    assert geometry.slot_count * 2 >= max_entries * 3 or geometry.slot_count == 8
    assert geometry.buckets_at >= layout.PAGE_BYTES
    assert geometry.uses_at == geometry.buckets_at + (64 + 8) * geometry.slot_count
    assert geometry.generations_at >= geometry.uses_at + 8 * geometry.slot_count
    assert geometry.index_bytes >= geometry.generations_at + 16 * (1 + namespaces)
    assert not geometry.generations_at % 16
    assert not geometry.buckets_at % 64
    assert not geometry.index_bytes % layout.PAGE_BYTES


WHOLE = Superblock(3, 1, 1 << 20, IndexGeometry(8), 1 << 20, 42).pack()


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (b"", "0 bytes"),
        (bytes(4096), "does not begin with"),
        (WHOLE[:8] + struct.pack("@Q", 99) + WHOLE[16:], "layout version 99, this tensord reads 7"),
        (WHOLE[:40] + struct.pack("@Q", 3) + WHOLE[48:], "3 buckets"),
        (WHOLE[:40] + struct.pack("@Q", 0) + WHOLE[48:], "0 buckets"),
        (WHOLE[:48] + struct.pack("@Q", 64) + WHOLE[56:], "offsets"),
        (WHOLE[:72] + struct.pack("@Q", 0) + WHOLE[80:], "0 namespaces"),
        (WHOLE[:80] + struct.pack("@Q", 64) + WHOLE[88:], "offsets"),
    ],
)
def test_another_layout_is_refused_by_name(page: bytes, message: str) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        Superblock.unpack(page)


KEYS = st.binary(min_size=32, max_size=32)
HEADERS = st.builds(
    SpanHeader,
    *(KEYS, U64, U64, st.integers(0, 65_472), U64, U64, TIMES, TIMES, st.integers(0, 1 << 31)),
    ttl_s=TIMES,
    parent=st.none() | KEYS,
)


@given(HEADERS)
def test_a_span_header_is_read_back_and_has_its_size(header: SpanHeader) -> None:
    packed = header.pack()
    assert len(packed) == layout.SPAN_HEADER_BYTES
    found = SpanHeader.unpack(packed)
    assert replace(found, expires_s=header.expires_s) == header
    assert found.expires_s == pytest.approx(header.expires_s, rel=2**-35)
    # The time of an entry's end is written by itself.
    assert struct.unpack_from("@Q", packed, layout.SPAN_EXPIRES_AT) == (layout.expiry_word(header.expires_s),)


@pytest.mark.parametrize("expires", [0.0, 1e6])
def test_every_damaged_bit_or_word_of_a_span_header_is_found_out(expires: float) -> None:
    packed = SpanHeader(b"k" * 32, 5, 64, 16, 7, 9, 1.0, expires, 1000, 32, 2.0, 3.0, 4, b"p" * 32).pack()
    # The checksum may be written at any time. Another one than the payload's is damage of the payload.
    covered = [at for at in range(160) if not 0 <= at - layout.SPAN_CHECKSUM_AT < 8]
    for bit in (8 * at + bit for at in covered for bit in range(8)):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            SpanHeader.unpack(bytes(damaged))
    for at in covered[::4]:
        for word in (0, 1, 0xFFFFFFFF):
            damaged = bytearray(packed)
            damaged[at : at + 4] = word.to_bytes(4, "little")
            if damaged != packed:
                with pytest.raises(Corrupt):
                    SpanHeader.unpack(bytes(damaged))
