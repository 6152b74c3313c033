"""The copier: what it copies out of an inbox is what it checked, and entries that move arrive whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tensord.client.writing.memory import Inbox
from tensord.daemon.forms.effects import Move
from tensord.daemon.forms.events import Moved
from tensord.daemon.memory import copier
from tensord.daemon.memory.copier import Copier, InboxCopied, InboxCopy
from tensord.errors import BadMessage, BadTree, Corrupt, LimitReached, SegmentError
from tensord.shm.payloads.copy import checksum_of
from tensord.shm.payloads.packing import Packed, pack
from tensord.shm.ring.layout import SPAN_HEADER_BYTES, SpanHeader

RING_BYTES = 1 << 17


class Desk:
    """A copier with a ring, and the inbox of client 1."""

    def __init__(self, *, starts: bool = True, ring_bytes: int = RING_BYTES) -> None:
        self.ring = np.zeros(ring_bytes, np.uint8)
        self.copied: SimpleQueue[Any] = SimpleQueue()
        self.copier = Copier(self.ring, 32, self.copied.put)
        if starts:
            self.copier.start()
        self.inbox = Inbox(ring_bytes)
        self.copier.open_inbox(1, self.inbox.fd, self.inbox.size_bytes)

    def write(self, offset: int, content: Any) -> None:
        os.pwrite(self.inbox.fd, np.ascontiguousarray(content).tobytes(), offset)

    def part(self, payload: Packed, at: int = SPAN_HEADER_BYTES, client: int = 1) -> InboxCopy:
        """The copy of a payload that the client has written at an offset."""
        content = written(payload)
        self.write(at, content)
        return InboxCopy(client, 1000, at, payload.payload_bytes, len(payload.header))

    def carry_out(self, *parts: InboxCopy) -> list[InboxCopied]:
        for part in parts:
            self.copier.copy(part)
        return [self.copied.get() for _ in parts]


@pytest.fixture(params=[True])
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    """A copier that has begun, unless a test says otherwise."""
    made = Desk(starts=request.param)
    yield made
    made.copier.stop()
    made.inbox.close()


IDLE = pytest.mark.parametrize("desk", [False], indirect=True)


def payload_of(size: int) -> Packed:
    return pack(np.arange(size, dtype=np.uint64))


def written(payload: Packed) -> Any:
    content = np.empty(payload.payload_bytes, np.uint8)
    payload.write(content.data, 0)
    return content


@pytest.mark.parametrize("how", ["at once", "by the worker", "in turns"])
def test_a_payload_arrives_whole_at_its_offset_with_its_checksum(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "in turns":
        monkeypatch.setattr(copier, "TURN_BYTES", 100)
    payload = payload_of(500)
    part = desk.part(payload, 4096)
    assert desk.copier.is_small(part)
    (done,) = [desk.copier.copy_now(part)] if how == "at once" else desk.carry_out(part)
    expected = written(payload)
    assert done == InboxCopied(1, checksum_of(expected))
    assert np.array_equal(desk.ring[4096 : 4096 + payload.payload_bytes], expected)
    assert not desk.ring[:4096].any() and not desk.ring[4096 + payload.payload_bytes :].any()


def test_a_tree_that_is_none_is_refused(desk: Desk) -> None:
    part = desk.part(payload_of(50))
    assert desk.copier.copy_now(part).error is None
    for wrong in (replace(part, tree_bytes=0), replace(part, tree_bytes=part.payload_bytes + 1)):
        assert isinstance(desk.copier.copy_now(wrong).error, BadMessage)
    assert isinstance(desk.copier.copy_now(replace(part, payload_bytes=100)).error, BadTree)
    desk.write(part.offset, np.full(16, 0xFF, np.uint8))
    assert isinstance(desk.copier.copy_now(part).error, BadTree)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_span_that_moves_arrives_whole_and_names_its_new_span(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    if not at_once:
        monkeypatch.setattr(copier, "TURN_BYTES", 1000)
    payload = payload_of(500)
    (done,) = desk.carry_out(desk.part(payload))
    before = SpanHeader(bytes(32), 9, payload.payload_bytes, len(payload.header), done.checksum, 1, 1.0, 0.0, 1000)
    desk.ring[:SPAN_HEADER_BYTES] = np.frombuffer(before.pack(), np.uint8)
    size = SPAN_HEADER_BYTES + payload.payload_bytes
    move = Move(77, 0, 1 << 16, size, 1000)
    assert desk.copier.is_small(move)
    if at_once:
        assert desk.copier.copy_now(move) == Moved(77)
    else:
        desk.copier.copy(move)
        assert desk.copied.get() == Moved(77)
    old, new = desk.ring[:size], desk.ring[1 << 16 : (1 << 16) + size]
    assert np.array_equal(old[SPAN_HEADER_BYTES:], new[SPAN_HEADER_BYTES:])
    assert SpanHeader.unpack(old[:SPAN_HEADER_BYTES].tobytes()) == before
    assert SpanHeader.unpack(new[:SPAN_HEADER_BYTES].tobytes()) == replace(before, span_id=77, number=9)
    desk.copier.copy(replace(move, from_offset=4096))
    assert isinstance(desk.copied.get().error, Corrupt), "there is no header"


def test_a_payload_outside_of_the_inbox_fails_its_put_and_no_other(desk: Desk) -> None:
    good = desk.part(payload_of(50))
    outside = replace(good, offset=desk.inbox.size_bytes - 10)
    stranger = replace(good, client=2)
    first, second, third = (desk.carry_out(part)[0] for part in (outside, stranger, good))
    assert isinstance(first.error, LimitReached) and str(desk.inbox.size_bytes) in str(first.error)
    assert isinstance(second.error, LimitReached) and "OpenInbox" in str(second.error)
    assert third.error is None
    desk.copier.close_inbox(1)
    assert desk.copier.inboxes == 0
    assert isinstance(desk.carry_out(good)[0].error, LimitReached)


def test_an_inbox_that_could_harm_the_daemon_is_refused_and_a_later_one_takes_its_place(desk: Desk) -> None:
    part = desk.part(payload_of(50))
    with pytest.raises(SegmentError, match="has"):
        desk.copier.open_inbox(2, desk.inbox.fd, 4096)
    other = Inbox(RING_BYTES)
    desk.copier.open_inbox(1, other.fd, other.size_bytes)
    assert desk.copier.inboxes == 1
    assert isinstance(desk.copier.copy_now(part).error, BadTree), "nothing is written there"
    other.close()


@IDLE
def test_a_large_payload_is_copied_in_turns_with_another_clients(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "TURN_BYTES", 100)
    desk.copier.open_inbox(2, desk.inbox.fd, desk.inbox.size_bytes)
    payload, small = payload_of(500), payload_of(2)
    assert small.payload_bytes <= 100 < payload.payload_bytes
    desk.copier.copy(desk.part(payload))
    desk.copier.copy(replace(desk.part(small, 8192), client=2))
    desk.copier.start()
    done = [desk.copied.get() for _ in range(2)]
    assert [copied.client for copied in done] == [2, 1]
    assert done[1].checksum == checksum_of(written(payload))


@IDLE
def test_copies_asked_for_before_it_stops_are_carried_out(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "TURN_BYTES", 100)
    for _ in range(2):
        desk.copier.copy(desk.part(payload_of(500)))
    desk.copier.start()
    desk.copier.stop()
    assert desk.copied.qsize() == 2
