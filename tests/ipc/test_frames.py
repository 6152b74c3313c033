"""Messages come out of a byte stream whole and in order, and no stream costs over its limits."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.errors import BadMessage, MessageTooLarge
from tensord.ipc.messages import control as m
from tensord.ipc.messages.modes import Mode, Tier
from tensord.ipc.messages.schema import KEYS_MAX, Message
from tensord.ipc.wire.frames import CONTROL_BYTES_MAX, FrameReader, pack, unpack

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
maps = st.dictionaries(st.text("abc", max_size=4), scalars | st.binary(max_size=40) | st.lists(scalars, max_size=5))


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(maps, max_size=6), st.lists(st.integers(0, 10_000), max_size=12))
def test_messages_come_out_whole_however_the_stream_is_cut(sent: list[dict[str, Any]], cuts: list[int]) -> None:
    reader = FrameReader()
    stream = b"".join(map(msgpack.packb, sent))
    assert [unpack(each) for piece in cut(stream, cuts) for each in reader.feed(piece)] == sent
    assert not reader.held


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_message_of_the_limit_passes_and_one_byte_more_does_not(step: int) -> None:
    for size, passes in ((101, True), (102, False)):
        data = msgpack.packb({"k": b"x" * (size - 5)})
        assert len(data) == size
        reader = FrameReader(101)
        pieces = [data[at : at + step] for at in range(0, size, step)]
        if passes:
            assert [each for piece in pieces for each in reader.feed(piece)] == [data]
        else:
            with pytest.raises(MessageTooLarge, match=r"102 bytes.*message_bytes_max is 101"):
                [each for piece in pieces for each in reader.feed(piece)]


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
    reader = FrameReader(200)
    for fed in range(200):
        assert list(reader.feed(endless[fed : fed + 1])) == []
        assert len(reader.held) == fed + 1
    with pytest.raises(MessageTooLarge, match="message_bytes_max is 200"):
        list(reader.feed(endless[200:201]))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xc1", "begins no MessagePack type"),
        (b"\x91" * 2000, "nested too deeply"),
        (b"\x81\xa1\xff\x01", "UTF-8"),
        (b"\x81\x81\x01\x02\x03", "map keys must be hashable"),
    ],
)
def test_bytes_that_are_not_a_message_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(BadMessage, match=why):
        [unpack(each) for each in FrameReader().feed(data)]


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
    assert held < len(readers) * 2 * CONTROL_BYTES_MAX


@pytest.mark.parametrize(
    "largest",
    [
        m.Order((1 << 63) - 1, "d" * 64, "offload", [b"k" * 32] * KEYS_MAX, "r" * 128),
        m.AcknowledgeOrder((1 << 63) - 1, "d" * 64, 1, [b"k" * 32] * KEYS_MAX, [], [], 1 << 48),
        m.UseEntries("d" * 64, [b"k" * 32] * KEYS_MAX),
        m.Modes(1, [m.TierState(f"{n:04}:65:00.0", Tier.DEVICE, Mode.EMERGENCY, 1 << 48, 1 << 48) for n in range(256)]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_the_largest_messages_fit_into_a_frame(largest: Message) -> None:
    assert list(FrameReader(CONTROL_BYTES_MAX).feed(pack(largest))) == [pack(largest)]
