"""A client's inboxes: how they grow, when they are closed, and what is never written again."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest

from tensord.client.core import inboxes as inboxes_module
from tensord.client.core.inbox import Inbox, Region
from tensord.client.core.inboxes import START_BYTES
from tensord.client.core.put import Put
from tensord.client.core.put_options import PutOptions
from tensord.client.core.puts import PutSender
from tensord.errors import DaemonUnavailable, LimitReached, NotEnoughMemory, TensordError
from tensord.ipc import messages
from tensord.ipc.schema import ClientLimits
from tensord.shm.payload import Payload
from tensord.shm.tree import encode

from ...daemon_process import PATIENCE_S

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _refused_for_the_whole_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine takes for it, no client asks again for an inbox that was refused."""
    monkeypatch.setattr(inboxes_module, "_GROW_AGAIN_S", 3600.0)


class Desk:
    """A connection whose messages the test answers by hand."""

    def __init__(self, inbox_bytes_max: int = 8 * MIB) -> None:
        ids = count(1)
        self.sent: list[messages.Message] = []
        self.connected: object | None = object()
        self.puts = PutSender(self._send, lambda: next(ids), lambda: self.connected, lambda _: None)
        self.puts.inboxes.limits = ClientLimits(inbox_bytes_max=inbox_bytes_max)

    def _send(self, *sent: messages.Message, fds: Sequence[int] = (), connected: object = None) -> None:
        self.sent.extend(sent)

    def put(self, payload_bytes: int, timeout_s: float = 0.0) -> Put:
        payload = encode(np.zeros(payload_bytes - 64, np.uint8))
        return self.puts.put(bytes(32), payload, PutOptions(), deadline=time.monotonic() + timeout_s)

    def answer(self) -> None:
        """Everything that was sent is answered as a daemon does it that stores all."""
        sent, self.sent = self.sent, []
        for message in sent:
            if isinstance(message, messages.OpenInbox):
                self.puts.inboxes.opened(message.id)
            elif isinstance(message, messages.Commit):
                self.puts.in_flight.acknowledged(messages.Committed(message.id, "stored"))

    def lose_connection(self) -> None:
        self.connected = None
        self.puts.in_flight.disconnected()

    def connect(self) -> list[messages.Message]:
        """A new connection; what was sent again on it."""
        again: list[messages.Message] = []
        connected = object()
        self.puts.in_flight.send_again(lambda *sent, **_: again.extend(sent), connected)
        self.connected = connected
        return again

    def inboxes(self) -> list[int]:
        """The sizes of all that are not closed."""
        return sorted(inbox.size_bytes for inbox in self.puts.inboxes._all.values())

    def commits(self) -> list[messages.Commit]:
        return [message for message in self.sent if isinstance(message, messages.Commit)]


def test_an_inbox_starts_small_and_grows_with_what_is_put() -> None:
    desk = Desk()
    desk.put(1000)
    assert desk.inboxes() == [START_BYTES]
    desk.put(MIB)
    assert desk.inboxes() == [START_BYTES, 2 * MIB]
    desk.answer()
    desk.puts.inboxes.tidy()
    assert desk.inboxes() == [2 * MIB]
    (closed,) = [message for message in desk.sent if isinstance(message, messages.CloseInbox)]
    assert closed.inbox
    desk.put(100 * MIB)
    assert desk.inboxes()[-1] == 8 * MIB, "as large as it may be"
    desk.puts.in_flight.close()


def test_a_first_put_has_an_inbox_of_twice_its_size_and_is_not_streamed() -> None:
    desk = Desk()
    desk.put(3 * MIB)
    assert desk.inboxes() == [8 * MIB]
    (commit,) = desk.commits()
    assert not commit.acks
    desk.puts.in_flight.close()


def test_many_puts_at_once_have_the_inbox_grow_rather_than_wait() -> None:
    desk = Desk()
    puts = [desk.put(MIB // 2) for _ in range(10)]
    assert [put.state for put in puts] == ["sent"] * 10
    assert desk.inboxes() == [MIB, 2 * MIB, 4 * MIB]
    named = {commit.inbox for commit in desk.commits()}
    opened = {message.inbox for message in desk.sent if isinstance(message, messages.OpenInbox)}
    assert named <= opened and len(named) == len(desk.inboxes())
    desk.puts.in_flight.close()


def test_an_inbox_is_not_closed_before_the_last_put_from_it_is_answered() -> None:
    desk = Desk()
    desk.put(1000)
    desk.put(MIB)
    desk.puts.inboxes.tidy()
    assert desk.inboxes() == [START_BYTES, 2 * MIB]
    first = desk.commits()[0]
    desk.puts.in_flight.acknowledged(messages.Committed(first.id, "stored"))
    desk.puts.inboxes.tidy()
    assert desk.inboxes() == [2 * MIB]
    desk.puts.in_flight.close()


def test_where_a_larger_inbox_is_refused_puts_go_on_in_the_smaller() -> None:
    desk = Desk()
    desk.put(1000)
    desk.answer()
    refused = desk.put(MIB)
    (opening,) = [message for message in desk.sent if isinstance(message, messages.OpenInbox)]
    assert desk.puts.in_flight.refused(opening.id, LimitReached("inboxes_bytes_max"))
    assert refused.state == "refused" and isinstance(refused.error, LimitReached)
    assert desk.inboxes() == [START_BYTES]
    desk.sent.clear()
    assert desk.put(1000).state == "sent"
    desk.put(MIB)
    streamed = desk.commits()[1]
    assert streamed.acks and streamed.inbox == desk.commits()[0].inbox
    assert desk.inboxes() == [START_BYTES], "it does not ask again at once"
    desk.puts.in_flight.close()


def refuse(desk: Desk, error: TensordError) -> None:
    """The daemon refuses the inbox that a put of 1 MiB has asked for."""
    desk.put(1000)
    desk.answer()
    desk.put(MIB)
    (opening,) = [message for message in desk.sent if isinstance(message, messages.OpenInbox)]
    assert desk.puts.in_flight.refused(opening.id, error)
    desk.answer()


def test_a_reservation_that_fits_no_inbox_says_why_the_daemon_refused_one() -> None:
    desk = Desk()
    refuse(desk, LimitReached("inboxes_bytes_max"))
    raised = []
    for _ in range(2):
        with pytest.raises(LimitReached, match="inboxes_bytes_max") as caught:
            desk.puts.reserve(2 * MIB, time.monotonic())
        raised.append(caught.value)
    assert raised[0] is not raised[1], "each caller's error has its own frames"
    desk.puts.in_flight.close()


def test_a_reservation_that_fits_no_inbox_says_why_the_daemon_refused_the_first_one() -> None:
    desk = Desk()
    desk.put(MIB)
    (opening,) = [message for message in desk.sent if isinstance(message, messages.OpenInbox)]
    assert desk.puts.in_flight.refused(opening.id, LimitReached("inboxes_bytes_max"))
    desk.put(1000)
    assert desk.inboxes() == [START_BYTES]
    with pytest.raises(LimitReached, match="inboxes_bytes_max"):
        desk.puts.reserve(2 * MIB, time.monotonic())
    desk.puts.in_flight.close()


def test_the_next_daemon_is_asked_for_an_inbox_that_the_last_one_refused() -> None:
    desk = Desk()
    refuse(desk, LimitReached("inboxes_bytes_max"))
    desk.lose_connection()
    desk.connect()
    assert desk.puts.reserve(2 * MIB, time.monotonic()).inbox.size_bytes == 4 * MIB
    desk.puts.in_flight.close()


@pytest.mark.parametrize("refused_by", ["an earlier daemon", "a daemon that ends", "nobody"])
def test_a_reservation_that_fits_no_inbox_where_no_other_is_allowed_names_that_limit(refused_by: str) -> None:
    desk = Desk()
    if refused_by != "nobody":
        refuse(desk, LimitReached("old") if refused_by == "an earlier daemon" else DaemonUnavailable("old"))
    desk.put(1000)
    desk.answer()
    if refused_by == "an earlier daemon":
        desk.lose_connection()
        desk.connect()
    desk.puts.inboxes.limits = ClientLimits(inbox_bytes_max=8 * MIB, inboxes_per_client_max=1)
    with pytest.raises(LimitReached, match=r"inboxes_per_client_max is 1.* 2097152 bytes; delete"):
        desk.puts.reserve(2 * MIB, time.monotonic())
    desk.puts.in_flight.close()


def test_a_reservation_that_fits_no_inbox_while_the_daemon_is_away_says_so() -> None:
    desk = Desk()
    refuse(desk, LimitReached("old"))
    desk.lose_connection()
    desk.puts.inboxes.limits = ClientLimits(inbox_bytes_max=8 * MIB, inboxes_per_client_max=1)
    with pytest.raises(DaemonUnavailable, match="away"):
        desk.puts.reserve(2 * MIB, time.monotonic())
    desk.puts.in_flight.close()


def test_a_reservation_that_fits_no_inbox_says_that_no_memory_was_left_for_one() -> None:
    desk = Desk()
    desk.put(1000)
    desk.answer()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(NotEnoughMemory, match="no inbox of 4194304 bytes can be made"):
            desk.puts.reserve(2 * MIB, time.monotonic())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert desk.puts.reserve(2 * MIB, time.monotonic()).inbox.size_bytes == 4 * MIB
    desk.puts.in_flight.close()


@pytest.mark.parametrize("payload_bytes", [1000, MIB, 3 * MIB], ids=["small", "whole", "streamed"])
def test_an_inbox_with_unanswered_puts_is_not_written_again_once_its_connection_has_ended(payload_bytes: int) -> None:
    desk = Desk(4 * MIB)
    desk.put(payload_bytes)
    (before,) = desk.commits()
    desk.lose_connection()
    desk.connect()
    desk.sent.clear()
    desk.put(payload_bytes)
    (after,) = desk.commits()
    assert after.inbox != before.inbox
    desk.puts.in_flight.close()


def test_a_whole_put_is_sent_again_once_from_the_inbox_it_stands_in() -> None:
    desk = Desk()
    put = desk.put(1000)
    (first,) = desk.commits()
    desk.lose_connection()
    opening, commit = desk.connect()
    assert isinstance(opening, messages.OpenInbox) and opening.inbox == first.inbox
    assert isinstance(commit, messages.Commit) and (commit.inbox, commit.at) == (first.inbox, first.at)
    desk.lose_connection()
    assert put.state == "lost"
    assert desk.connect() == []
    desk.sent.clear()
    desk.put(1000)
    assert desk.commits()[0].inbox != first.inbox
    desk.puts.in_flight.close()


@pytest.mark.parametrize("ends", ["connection", "client"])
def test_no_region_comes_free_for_others_before_its_inbox_is_retired(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may take a region as soon as it is free, and the daemon may still read it."""
    retired: list[bool] = []
    let_go = Inbox.let_go

    def released(inbox: Inbox, region: Region) -> None:
        retired.append(inbox.retired)
        let_go(inbox, region)

    def send(*sent: messages.Message, **_: Any) -> None:
        if any(isinstance(message, messages.Part) for message in sent) and not retired:
            monkeypatch.setattr(Inbox, "let_go", released)
            desk.lose_connection() if ends == "connection" else desk.puts.in_flight.close()

    desk = Desk(MIB)
    monkeypatch.setattr(desk.puts, "_send", send)
    assert desk.put(4 * MIB, timeout_s=PATIENCE_S).state == "lost"
    assert retired and all(retired)
    desk.puts.in_flight.close()


def test_an_inbox_that_a_put_streams_through_is_not_closed_between_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(MIB)
    send, take, larger = desk._send, Inbox.take, iter([MIB])

    def answered_at_once(*sent: messages.Message, **more: Any) -> None:
        send(*sent, **more)
        for message in sent:
            if isinstance(message, messages.Part):
                desk.puts.in_flight.acknowledged(messages.PartCopied(message.id, message.inbox_offset))
                # Meanwhile another thread's put has a larger inbox made.
                desk.puts.inboxes.limits = ClientLimits(inbox_bytes_max=8 * MIB)
                for size_bytes in larger:
                    other = threading.Thread(target=desk.put, args=(size_bytes,))
                    other.start()
                    other.join()

    def tidied_before(inbox: Inbox, size_bytes: int, deadline: float) -> Region | None:
        desk.puts.inboxes.tidy()
        return take(inbox, size_bytes, deadline)

    monkeypatch.setattr(desk.puts, "_send", answered_at_once)
    monkeypatch.setattr(Inbox, "take", tidied_before)
    desk.put(4 * MIB, timeout_s=PATIENCE_S)
    assert desk.inboxes() == [MIB, 2 * MIB]
    streamed, beside = desk.commits()
    parts = [message for message in desk.sent if isinstance(message, messages.Part)]
    assert sum(part.part_bytes for part in parts if part.id == streamed.id) == streamed.payload_bytes
    assert streamed.inbox != beside.inbox
    desk.puts.inboxes.tidy()
    assert desk.inboxes() == [2 * MIB]
    desk.puts.in_flight.close()


def test_an_inbox_whose_puts_were_all_answered_is_used_on_the_next_connection() -> None:
    desk = Desk()
    desk.put(1000)
    (first,) = desk.commits()
    desk.answer()
    desk.lose_connection()
    assert desk.connect() == []
    desk.sent.clear()
    desk.put(1000)
    opening, commit = desk.sent
    assert isinstance(opening, messages.OpenInbox) and isinstance(commit, messages.Commit)
    assert opening.inbox == commit.inbox == first.inbox
    desk.puts.in_flight.close()


def reserved(desk: Desk, payload: Payload) -> tuple[Region, Any]:
    """A region that holds `payload`, and its array."""
    region = desk.puts.reserve(payload.payload_bytes, time.monotonic())
    array = region.hand_out()
    payload.write_into(array)
    return region, array


def commit(desk: Desk, region: Region, payload: Payload) -> Put:
    deadline = time.monotonic()
    return desk.puts.commit(
        bytes(32), region, payload.payload_bytes, len(payload.header), PutOptions(), deadline=deadline
    )


def file_of(region: Region, size_bytes: int) -> bytes:
    """What a daemon that was told of the region's inbox reads."""
    return os.pread(region.inbox.fd, size_bytes, region.offset)


@pytest.mark.parametrize("payload_bytes", [1000, 3 * MIB], ids=["whole", "streamed"])
def test_a_reservation_in_a_retired_inbox_is_committed_from_another(payload_bytes: int) -> None:
    desk = Desk(4 * MIB)
    payload = encode(np.arange(payload_bytes // 8 - 8))
    region, array = reserved(desk, payload)
    desk.put(1000)
    desk.lose_connection()
    desk.connect()
    # The daemon that was told of the inbox may read it for ever, so this must not reach it.
    before = file_of(region, payload.payload_bytes)
    array[payload.payload_bytes // 2 :] = 7
    assert file_of(region, payload.payload_bytes) == before
    desk.sent.clear()
    assert commit(desk, region, payload).state == "sent"
    (sent,) = desk.commits()
    places = [(part.inbox_offset, part.part_bytes) for part in desk.sent if isinstance(part, messages.Part)]
    if sent.at is not None:
        places.append((sent.at, sent.payload_bytes))
    inbox = desk.puts.inboxes.current
    assert inbox is not None and sent.inbox == inbox.number != region.inbox.number
    assert sent.tree_bytes == len(payload.header)
    found = b"".join(os.pread(inbox.fd, size_bytes, offset) for offset, size_bytes in places)
    assert found == array.tobytes()
    assert region.inbox.take(64, time.monotonic()) is None, "nothing else is written there"
    del array
    desk.puts.in_flight.close()


def is_refused(desk: Desk, put: Put) -> None:
    """Sent again, and refused on the new connection."""
    (sent,) = [message for message in desk.connect() if isinstance(message, messages.Commit)]
    desk.puts.in_flight.acknowledged(
        messages.Committed(sent.id, "refused", messages.ErrorBody.of(LimitReached("full")))
    )


def exists(desk: Desk, put: Put) -> None:
    (sent,) = [message for message in desk.connect() if isinstance(message, messages.Commit)]
    desk.puts.in_flight.acknowledged(messages.Committed(sent.id, "existed"))


def is_lost_again(desk: Desk, put: Put) -> None:
    desk.connect()
    desk.lose_connection()


def inbox_is_refused(desk: Desk, put: Put) -> None:
    (opening,) = [message for message in desk.connect() if isinstance(message, messages.OpenInbox)]
    assert desk.puts.in_flight.refused(opening.id, LimitReached("inboxes_bytes_max"))


@pytest.mark.parametrize("ends", [is_refused, exists, is_lost_again, inbox_is_refused])
def test_an_array_written_to_after_its_put_has_ended_reaches_no_daemon_that_may_still_read_it(
    ends: Callable[[Desk, Put], None],
) -> None:
    desk = Desk()
    payload = encode(np.arange(1000))
    region, array = reserved(desk, payload)
    put = commit(desk, region, payload)
    fd = os.dup(region.inbox.fd)
    desk.lose_connection()
    ends(desk, put)
    assert put.state != "sent"
    array[:] = 7
    assert os.pread(fd, payload.payload_bytes, region.offset) == bytes(written(payload))
    assert (array == 7).all()
    os.close(fd)
    desk.puts.in_flight.close()


def test_an_array_written_to_after_its_client_was_closed_reaches_no_daemon() -> None:
    desk = Desk()
    payload = encode(np.arange(1000))
    region, array = reserved(desk, payload)
    put = commit(desk, region, payload)
    fd = os.dup(region.inbox.fd)
    desk.connected = None
    desk.puts.in_flight.close()
    assert put.state == "lost"
    array[:] = 7
    assert os.pread(fd, payload.payload_bytes, region.offset) == bytes(written(payload))
    os.close(fd)


def test_a_put_that_began_when_its_inbox_was_retired_is_made_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.put(1000)
    puts, take = desk.puts, desk.puts.inboxes.region
    first = desk.puts.inboxes.current

    def lost_meanwhile(*arguments: Any) -> Region:
        region = take(*arguments)
        if region.inbox is first:
            desk.lose_connection()
            desk.connect()
        return region

    monkeypatch.setattr(puts.inboxes, "region", lost_meanwhile)
    desk.sent.clear()
    payload = encode(np.arange(100))
    assert puts.put(bytes(32), payload, PutOptions(), deadline=time.monotonic()).state == "sent"
    (sent,) = desk.commits()
    current = desk.puts.inboxes.current
    assert first is not None and current is not None
    assert sent.inbox == current.number != first.number
    assert sent.at is not None
    assert os.pread(current.fd, payload.payload_bytes, sent.at) == bytes(written(payload))
    desk.puts.in_flight.close()


def written(payload: Payload) -> bytearray:
    """The bytes of a payload."""
    whole = bytearray(payload.payload_bytes)
    payload.write_into(whole)
    return whole


def test_no_array_is_made_over_what_a_closed_client_had_on_its_way() -> None:
    desk = Desk()
    desk.put(1000)
    inbox = desk.puts.inboxes.current
    assert inbox is not None
    desk.puts.in_flight.close()
    assert inbox.take(1000, time.monotonic()) is None
