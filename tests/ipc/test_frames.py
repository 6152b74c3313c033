"""Messages come out of a byte stream whole and in order, and no stream costs over its limits."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.errors import BadMessage, MessageTooLarge, ProtocolError
from tensord.ipc import messages as m
from tensord.ipc.frames import CONTROL_FRAMES, FrameLimits, FrameReader, pack

KEY = b"k" * 32
SMALL = FrameLimits(
    message_bytes_max=200,
    text_bytes_max=20,
    bin_bytes_max=40,
    array_items_max=5,
    map_items_max=8,
    depth_max=3,
)

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
maps = st.dictionaries(st.text("abc", max_size=4), scalars | st.binary(max_size=40) | st.lists(scalars, max_size=5))


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(maps, max_size=6), st.lists(st.integers(0, 10_000), max_size=12))
def test_messages_come_out_whole_however_the_stream_is_cut(sent: list[dict[str, Any]], cuts: list[int]) -> None:
    reader = FrameReader()
    stream = b"".join(map(msgpack.packb, sent))
    found = [obj for piece in cut(stream, cuts) for obj in reader.feed(piece)]
    assert found == sent
    assert reader.held_bytes == 0


def test_messages_come_out_byte_by_byte() -> None:
    sent = [{"a": [1, 2, {"b": b"x" * 20}]}, {}, {"c": "é"}]
    reader = FrameReader()
    stream = b"".join(map(msgpack.packb, sent))
    assert [obj for at in range(len(stream)) for obj in reader.feed(stream[at : at + 1])] == sent


def test_one_feed_may_be_longer_than_a_message_may() -> None:
    sent = [{"n": n, "pad": b"x" * 1000} for n in range(500)]
    assert list(FrameReader().feed(b"".join(map(msgpack.packb, sent)))) == sent


def test_a_message_is_whole_with_its_last_byte() -> None:
    data = pack(m.Done(1))
    reader = FrameReader()
    assert list(reader.feed(data[:-1])) == []
    assert reader.held_bytes == len(data) - 1
    assert list(reader.feed(data[-1:])) == [{"type": "Done", "id": 1}]


def exactly(size: int) -> bytes:
    """A map of `size` bytes on the wire."""
    left = size - 1
    pairs: list[tuple[str, bytes]] = []
    while left:
        length = min(left - 5, 20) if left > 30 else left - 5
        pairs.append((f"k{len(pairs):02}", b"x" * (length - 1)))
        left -= length + 5
    data: bytes = msgpack.packb(dict(pairs))
    assert len(data) == size
    return data


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_message_of_the_limit_passes_and_one_byte_more_does_not(step: int) -> None:
    limits = FrameLimits(101, 20, 100, 5, 8, 3)
    for size, passes in ((101, True), (102, False)):
        data = exactly(size)
        reader = FrameReader(limits)
        pieces = [data[at : at + step] for at in range(0, size, step)]
        if passes:
            assert len([obj for piece in pieces for obj in reader.feed(piece)]) == 1
        else:
            with pytest.raises(MessageTooLarge, match=r"102 bytes.*message_bytes_max is 101"):
                [obj for piece in pieces for obj in reader.feed(piece)]


@pytest.mark.parametrize(
    "endless",
    [
        b"\x81\xa1x\xc6\xff\xff\xff\xff" + b"x" * 5000,
        b"\x81\xa1x\xdb\xff\xff\xff\xff" + b"x" * 5000,
        b"\x81\xa1x\xdd\xff\xff\xff\xff" + b"\x01" * 5000,
        b"\xdf\xff\xff\xff\xff" + b"\xa1x\x01" * 2000,
        b"\xdd\xff\xff\xff\xff" + b"\x90" * 5000,
    ],
    ids=["bin", "text", "array", "map", "arrays"],
)
def test_a_message_without_end_is_ended_at_the_limit(endless: bytes) -> None:
    reader = FrameReader(SMALL)
    for fed in range(200):
        assert list(reader.feed(endless[fed : fed + 1])) == []
        assert reader.held_bytes == fed + 1
    with pytest.raises(MessageTooLarge, match="message_bytes_max is 200"):
        list(reader.feed(endless[200:201]))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"x": "y" * 21}, "21 exceeds max_str_len"),
        ({"x": b"y" * 41}, "41 exceeds max_bin_len"),
        ({"x": [1] * 6}, "6 exceeds max_array_len"),
        ({str(n): n for n in range(9)}, "9 exceeds max_map_len"),
        ({"x": [[[1]]]}, "nested deeper than 3"),
        ({"x": [{"y": {}}]}, "nested deeper than 3"),
        ({1: 2}, "map key"),
        ({"x": msgpack.Timestamp(1, 2)}, "max_ext_len"),
        ({"x": msgpack.ExtType(5, b"abc")}, "max_ext_len"),
    ],
)
def test_a_value_over_a_limit_is_named(found: object, why: str) -> None:
    with pytest.raises(BadMessage, match=why):
        list(FrameReader(SMALL).feed(msgpack.packb(found)))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xc1", "begins no MessagePack type"),
        (b"\x91" * 2000, "nested too deeply"),
        (b"\x81\xa1\xff\x01", "utf-8"),
        (b"\x81\xa1x\xc7\x00\x05", "extension type 5"),
    ],
)
def test_bytes_that_are_not_messagepack_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(BadMessage, match=why):
        list(FrameReader().feed(data))


def test_messages_before_the_bad_byte_come_out() -> None:
    found = FrameReader().feed(pack(m.Done(1)) + pack(m.Done(2)) + b"\xc1")
    assert [next(found), next(found)] == [{"type": "Done", "id": 1}, {"type": "Done", "id": 2}]
    with pytest.raises(BadMessage):
        next(found)


def test_a_reader_that_failed_stays_unusable() -> None:
    reader = FrameReader()
    with pytest.raises(BadMessage):
        list(reader.feed(b"\xc1"))
    with pytest.raises(BadMessage, match="nothing more can be read"):
        list(reader.feed(pack(m.Done(1))))


@settings(max_examples=300)
@given(st.binary(max_size=600), st.lists(st.integers(0, 600), max_size=5))
def test_random_bytes_give_objects_or_a_protocol_error(data: bytes, cuts: list[int]) -> None:
    reader = FrameReader(SMALL)
    try:
        for piece in cut(data, cuts):
            list(reader.feed(piece))
            assert reader.held_bytes <= SMALL.message_bytes_max
    except ProtocolError:
        pass


def test_unfinished_messages_cost_no_more_than_twice_the_limit() -> None:
    """Headers that promise much, one in another: what builds as it reads allocates here."""
    promises = b"\x81\xa1x" + b"\xdc\x10\x00" * 1000
    readers = [FrameReader() for _ in range(20)]
    tracemalloc.start()
    try:
        for reader in readers:
            assert list(reader.feed(promises)) == []
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < len(readers) * 2 * CONTROL_FRAMES.message_bytes_max


def test_a_long_stream_leaves_nothing_behind() -> None:
    reader = FrameReader()
    stream = pack(m.RequestClaim(1, KEY)) * 500
    chance = random.Random(1)
    tracemalloc.start()
    try:
        for lap in range(40):
            at = 0
            while at < len(stream):
                step = chance.randrange(1, 4000)
                list(reader.feed(stream[at : at + step]))
                at += step
            if lap == 1:
                before, _ = tracemalloc.get_traced_memory()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 65_536
    assert reader.held_bytes == 0
