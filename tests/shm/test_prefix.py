"""Records of blocks, and how far two sequences' media agree."""

from __future__ import annotations

import hashlib
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.errors import BadPrefix
from tensord.shm.payloads.prefix import MEDIA_MAX, MODALITIES, Media, Modality, PrefixRecord, block_key, ordered

KEY = bytes(range(32))
U64 = st.integers(0, (1 << 64) - 1)
ITEMS = st.builds(Media, U64, U64, st.sampled_from(MODALITIES), st.binary(min_size=32, max_size=32))
SIZES = st.sampled_from([16, 256, 4096])
PARENTS = st.none() | st.binary(min_size=32, max_size=32)


def item(start: int, length: int, modality: Modality = "image", content: int = 0) -> Media:
    return Media(start, length, modality, hashlib.sha256(b"%d" % content).digest())


def record(count: int = 5, **more: object) -> PrefixRecord:
    fields: dict[str, object] = {
        "scope": bytes(16),
        "layout": bytes(range(16)),
        "exact": False,
        "snapshot": False,
        "start": 32,
        "count": count,
        "parent": KEY,
        "media": (item(33, 4), item(34, 1, "video")),
        "block_tokens": 16,
    }
    return PrefixRecord(**(fields | more))  # type: ignore[arg-type]


# ---- records


@given(st.booleans(), st.booleans(), st.integers(0, 1 << 47), st.integers(0, 40), PARENTS, st.lists(ITEMS), SIZES)
def test_a_record_is_read_back(
    exact: bool, snapshot: bool, start: int, count: int, parent: bytes | None, media: list[Media], size: int
) -> None:
    written = PrefixRecord(bytes(16), b"l" * 16, exact, snapshot, start, count, parent, tuple(media), size)
    tokens = np.arange(count, dtype=np.uint32) * 77
    packed = written.pack(tokens)
    assert len(packed) == written.record_bytes
    for memory in (packed.data, packed.tobytes()):
        assert PrefixRecord.unpack(memory) == written
        assert bytes(memory[written.text_at :]) == tokens.tobytes()


def test_a_key_is_the_tag_and_what_it_says_of_the_record_however_that_lies_in_memory() -> None:
    packed = record().pack(np.arange(5, dtype=np.uint32))
    key = b"a model." + hashlib.sha256(packed.tobytes()).digest()[:20] + b"\x03\x01\0\0"
    assert all(block_key(b"a model.", memory, 259) == key for memory in (packed.data, packed.tobytes()))


@settings(max_examples=2000)
@given(st.lists(st.tuples(st.integers(0, 243), st.integers(0, 255)), max_size=6), st.integers(0, 244) | st.just(244))
def test_any_bytes_are_refused_or_give_a_valid_record(changes: list[tuple[int, int]], size: int) -> None:
    packed = bytearray(record().pack(np.arange(5, dtype=np.uint32)).tobytes())
    for at, value in changes:
        packed[at] = value
    with suppress(BadPrefix):
        read = PrefixRecord.unpack(packed[:size])
        assert packed[:5] == record().pack(np.arange(5, dtype=np.uint32)).tobytes()[:5], "of this version"
        assert read.record_bytes == size and len(read.media) == 2
        assert 0 <= read.start < 1 << 48 and read.block_tokens & (read.block_tokens - 1) == 0


# ---- media


def test_media_are_put_in_their_order() -> None:
    given = [item(9, 3, "video"), item(2, 3), item(9, 3, "audio"), item(5, 1)]
    assert ordered(given, 20, may_be_cut=False) == (given[1], given[3], given[2], given[0])


@pytest.mark.parametrize(
    ("media", "says"),
    [
        ([item(2, 3), item(4, 1)], "overlaps"),
        ([item(2, 18), item(4, 1)], "overlaps"),
        ([item(2, 3), item(2, 3)], "overlaps"),
        ([item(2, 0)], "start=2"),
        ([item(-1, 3)], "start=-1"),
        ([item(20, 1)], "start=20"),
        ([item(18, 3)], "ends at token 21"),
        ([Media(1, 1, "text", bytes(32))], "'text'"),  # type: ignore[arg-type]
        ([Media(1, 1, "image", bytes(31))], "32 bytes"),
        ([item(number, 1) for number in range(MEDIA_MAX + 1)], str(MEDIA_MAX)),
    ],
)
def test_media_that_do_not_fit_are_refused_and_named(media: list[Media], says: str) -> None:
    with pytest.raises(BadPrefix, match=says):
        ordered(media, 20 if len(media) < 9 else 2 * MEDIA_MAX, may_be_cut=False)
