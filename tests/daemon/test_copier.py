"""The copier: what it copies is what it checked, and nothing of a put outlives it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tensord.client.core.inbox import Inbox
from tensord.daemon import copier
from tensord.daemon.copier import Copier
from tensord.daemon.core.effects import Copy, Move, Seal
from tensord.daemon.core.events import Copied, Moved
from tensord.errors import BadTree, Corrupt, LimitReached, SegmentError, TensordError
from tensord.shm.copy import checksum_of
from tensord.shm.layout import SPAN_HEADER_BYTES, SpanHeader
from tensord.shm.tree import Payload, encode

INBOX_BYTES = 1 << 16


class Desk:
    """A copier with a ring, and a client's inbox with a payload in it, to be copied in as many parts as one likes."""

    def __init__(self, *, starts: bool = True, inbox_bytes: int = INBOX_BYTES) -> None:
        self.ring = np.zeros(2 * inbox_bytes, np.uint8)
        self.copied: SimpleQueue[Any] = SimpleQueue()
        self.copier = Copier(self.ring, 32, self.copied.put)
        if starts:
            self.copier.start()
        self.inbox = Inbox(inbox_bytes)
        self.copier.open_inbox(1, self.inbox.fd, inbox_bytes, 1 << 20)
        region = self.inbox.take(inbox_bytes, 0)
        assert region is not None
        assert region.memory is not None
        self.memory = region.memory

    def parts(self, payload: Payload, put_id: int, count: int, at: int = 0) -> list[Copy]:
        """Copies of `payload`, written to the inbox at `at`, to byte `at` of the ring behind its header."""
        payload.write_into(self.memory[at:])
        size = payload.payload_bytes
        start = at + SPAN_HEADER_BYTES
        header = SpanHeader(bytes(32), put_id, size, len(payload.header), 0, 1, 1.0, 0.0, 1000)
        cuts = [size * i // count for i in range(count + 1)]
        return [
            Copy(1, put_id, at + low, high - low, start + low, start, high == size, header if high == size else None)
            for low, high in pairwise(cuts)
        ]

    def carry_out(self, *copies: Copy) -> list[Copied]:
        for copy in copies:
            self.copier.copy(copy)
        return [self.copied.get() for _ in copies]


@pytest.fixture
def idle() -> Iterator[Desk]:
    """One whose copier has not begun."""
    made = Desk(starts=False)
    yield made
    made.copier.stop()
    made.inbox.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.copier.stop()
    made.inbox.close()


def payload_of(size: int) -> Payload:
    return encode(np.arange(size, dtype=np.uint64))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_put_arrives_whole_with_its_checksum_in_its_header(desk: Desk, count: int) -> None:
    payload = payload_of(500)
    done = desk.carry_out(*desk.parts(payload, 9, count))
    there = desk.ring[SPAN_HEADER_BYTES : SPAN_HEADER_BYTES + payload.payload_bytes]
    expected = np.empty(payload.payload_bytes, np.uint8)
    payload.write_into(expected)
    assert np.array_equal(there, expected)
    assert [copied.checksum for copied in done] == [None] * (count - 1) + [checksum_of(expected)]
    assert SpanHeader.unpack(desk.ring[:SPAN_HEADER_BYTES].tobytes()).checksum == checksum_of(expected)


def test_a_small_payload_is_copied_at_once_as_the_worker_would_copy_it(idle: Desk) -> None:
    payload = payload_of(500)
    (copy,) = idle.parts(payload, 9, 1)
    assert idle.copier.is_small(copy)
    copied = idle.copier.copy_now(copy)
    assert isinstance(copied, Copied)
    expected = np.empty(payload.payload_bytes, np.uint8)
    payload.write_into(expected)
    assert (copied.put_id, copied.error, copied.checksum) == (9, None, checksum_of(expected))
    assert np.array_equal(idle.ring[SPAN_HEADER_BYTES : SPAN_HEADER_BYTES + payload.payload_bytes], expected)
    assert isinstance(idle.copier.copy_now(replace(copy, inbox=7)).error, LimitReached)
    idle.memory[:16] = 0xFF
    assert isinstance(idle.copier.copy_now(copy).error, BadTree)
    idle.copier.start()


LARGE_TREES = {
    "a header of more than 8 KB": [np.zeros(1)] * 1500,
    "a header that is a leaf": ["x" * 60] * 1500,
}


@pytest.mark.parametrize("case", LARGE_TREES)
def test_a_large_tree_is_read_by_the_worker_which_rests_meanwhile(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[int] = []
    monkeypatch.setattr(copier, "_rest", lambda: rests.append(1))
    payload = encode(LARGE_TREES[case])
    assert payload.payload_bytes <= copier.SMALL_BYTES
    desk = Desk(inbox_bytes=1 << 18)
    (copy,) = desk.parts(payload, 9, 1)
    assert not desk.copier.is_small(copy)
    assert copy.header is not None
    assert not desk.copier.is_small(Seal(1, 9, SPAN_HEADER_BYTES, copy.header, 0, 1000))
    (done,) = desk.carry_out(copy)
    assert done.error is None
    assert bool(rests) == (case == "a header of more than 8 KB"), "1,500 texts are one run"
    desk.memory[64:80] = 0xFF
    (done,) = desk.carry_out(copy)
    assert isinstance(done.error, BadTree)
    desk.copier.stop()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_span_that_moves_arrives_whole_and_names_its_new_span(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    if not at_once:
        monkeypatch.setattr(copier, "TURN_BYTES", 1000)
    payload = payload_of(500)
    (done,) = desk.carry_out(*desk.parts(payload, 9, 1))
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
    before, after = (SpanHeader.unpack(span[:SPAN_HEADER_BYTES].tobytes()) for span in (old, new))
    assert before.span_id == 9
    assert after == dataclasses.replace(before, span_id=77, number=9)
    assert after.checksum == done.checksum


def test_a_move_of_a_span_without_a_valid_header_is_reported_as_failed(desk: Desk) -> None:
    move = Move(77, 4096, 1 << 16, 1024, 1000)
    desk.copier.copy(move)
    assert isinstance(desk.copied.get().error, Corrupt)
    assert isinstance(desk.copier.copy_now(move).error, Corrupt)


@pytest.mark.parametrize("number", [0, 1])
def test_a_part_of_a_payload_is_not_small_whatever_its_size(desk: Desk, number: int) -> None:
    assert not desk.copier.is_small(desk.parts(payload_of(50), 9, 2)[number])


def test_puts_whose_parts_come_in_turn_do_not_disturb_one_another(desk: Desk) -> None:
    payloads = [payload_of(500 + number) for number in range(5)]
    parts = [desk.parts(payload, number + 1, 3, number * 8192) for number, payload in enumerate(payloads)]
    done = desk.carry_out(*(copies[turn] for turn in range(3) for copies in parts))
    assert not any(copied.error for copied in done)
    assert len({copied.checksum for copied in done[10:]}) == 5


def test_nothing_of_a_put_is_kept_when_it_has_ended(desk: Desk) -> None:
    for put_id in range(1, 20):
        desk.carry_out(*desk.parts(payload_of(50), put_id, 2))
    broken = desk.parts(payload_of(50), 20, 2)
    desk.memory[:16] = 0xFF
    done = desk.carry_out(*broken)
    assert isinstance(done[-1].error, BadTree)
    assert not desk.copier._checksums
    for end in (partial(desk.copier.discard, 1, 21), partial(desk.copier.close_inbox, 1)):
        desk.carry_out(desk.parts(payload_of(50), 21, 2)[0])
        assert desk.copier._checksums
        end()
        assert not desk.copier._checksums


def test_a_part_outside_of_the_inbox_fails_its_put_and_no_other(desk: Desk) -> None:
    outside = Copy(1, 5, INBOX_BYTES - 10, 20, 128, 128, False)
    later = Copy(1, 5, 0, 20, 148, 128, False)
    stranger = Copy(2, 6, 0, 20, 128, 128, False)
    # Copies of one client come in their order, those of two in any.
    outcomes = sorted(desk.carry_out(outside, later, stranger), key=lambda copied: copied.client)
    errors: list[Any] = [copied.error for copied in outcomes]
    assert isinstance(errors[0], LimitReached)
    assert str(INBOX_BYTES) in str(errors[0])
    assert isinstance(errors[1], TensordError)
    assert isinstance(errors[2], LimitReached)
    assert desk.carry_out(*desk.parts(payload_of(50), 7, 1))[0].error is None


def test_an_inbox_that_could_harm_the_daemon_is_refused(desk: Desk) -> None:
    with pytest.raises(LimitReached, match="open already"):
        desk.copier.open_inbox(1, desk.inbox.fd, INBOX_BYTES, 1 << 20)
    with pytest.raises(LimitReached, match="inboxes_bytes_max is 100"):
        desk.copier.open_inbox(2, desk.inbox.fd, INBOX_BYTES, 100)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(SegmentError, match="sealed"):
        desk.copier.open_inbox(2, unsealed, 4096, 1 << 20)
    os.close(unsealed)
    desk.copier.close_inbox(1)
    assert desk.copier.inboxes_bytes == 0


def test_a_clients_backlog_delays_anothers_copy_by_one_turn(idle: Desk) -> None:
    idle.copier.open_inbox(2, idle.inbox.fd, INBOX_BYTES, 1 << 20)
    flood = [copy for put_id in range(1, 11) for copy in idle.parts(payload_of(50), put_id, 3)]
    (quiet,) = idle.parts(payload_of(50), 99, 1)
    for copy in flood:
        idle.copier.copy(copy)
    idle.copier.copy(replace(quiet, client=2))
    idle.copier.start()
    done = [idle.copied.get() for _ in range(31)]
    assert [copied.put_id for copied in done].index(99) == 1
    assert [copied.put_id for copied in done if copied.client == 1] == [copy.put_id for copy in flood]
    assert not any(copied.error for copied in done)


def test_a_large_part_is_copied_in_turns_with_another_clients(idle: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "TURN_BYTES", 100)
    idle.copier.open_inbox(2, idle.inbox.fd, INBOX_BYTES, 1 << 20)
    payload = payload_of(500)
    small = payload_of(2)
    assert small.payload_bytes <= 100 < payload.payload_bytes
    for copy in idle.parts(payload, 1, 2):
        idle.copier.copy(copy)
    (quiet,) = idle.parts(small, 99, 1, 8192)
    idle.copier.copy(replace(quiet, client=2))
    idle.copier.start()
    done = [idle.copied.get() for _ in range(3)]
    assert [copied.put_id for copied in done] == [99, 1, 1]
    expected = np.empty(payload.payload_bytes, np.uint8)
    payload.write_into(expected)
    assert done[2].checksum == checksum_of(expected)
    assert np.array_equal(idle.ring[SPAN_HEADER_BYTES : SPAN_HEADER_BYTES + payload.payload_bytes], expected)


def test_copies_asked_for_before_it_stops_are_carried_out(idle: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "TURN_BYTES", 100)
    for copy in idle.parts(payload_of(500), 1, 2):
        idle.copier.copy(copy)
    idle.copier._asked.put(None)  # what `stop` says; the thread hears of it before it has copied anything
    idle.copier.start()
    idle.copier.stop()
    assert idle.copied.qsize() == 2


def test_a_clients_inboxes_are_told_apart_by_their_numbers(desk: Desk) -> None:
    payload = payload_of(50)
    (first,) = desk.parts(payload, 1, 1)
    other = Inbox(INBOX_BYTES)
    region = other.take(INBOX_BYTES, 0)
    assert region is not None and region.memory is not None
    encode(np.arange(50, dtype=np.uint64) + 7).write_into(region.memory)
    desk.copier.open_inbox(1, other.fd, INBOX_BYTES, 1 << 20, 0, 9, 2)
    assert desk.copier.inboxes_bytes == 2 * INBOX_BYTES
    with pytest.raises(LimitReached, match=r"may have 2 \(a fixed limit"):
        desk.copier.open_inbox(1, other.fd, INBOX_BYTES, 1 << 20, 0, 10, 2)
    one, nine = (desk.carry_out(replace(first, put_id=number + 1, inbox=number))[0] for number in (0, 9))
    assert one.checksum != nine.checksum
    assert nine.checksum == checksum_of(region.memory[: payload.payload_bytes])
    desk.copier.close_inbox(1, 9)
    assert desk.copier.inboxes_bytes == INBOX_BYTES
    assert isinstance(desk.carry_out(replace(first, put_id=11, inbox=9))[0].error, LimitReached)
    assert desk.carry_out(replace(first, put_id=12))[0].error is None
    other.close()
