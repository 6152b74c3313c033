"""Puts and their inbox, against a daemon that answers as the test likes."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import pytest
from msgspec.structs import replace

from tensord.client.core.put_options import PutOptions
from tensord.client.core.puts import Put, PutSender
from tensord.client.device.registration import Registration
from tensord.errors import DaemonUnavailable, ProtocolError, StoreFull, TensordError, UsageError
from tensord.ipc import messages
from tensord.ipc.schema import ClientLimits
from tensord.shm.tree import encode

TERMS = PutOptions()
INBOX_BYTES = 1 << 16
Answer = Callable[[messages.Message], None]


class Desk:
    """`answer` is called with each message as it is sent, in the sender's thread."""

    def __init__(self) -> None:
        ids = count(1)
        self.sent: list[messages.Message] = []
        self.answer: Answer = lambda _: None
        self.connection: Callable[[], object | None] = lambda: self
        self.puts = PutSender(self._send, lambda: next(ids), lambda: self.connection(), lambda _: None)
        self.puts.inboxes.limits = ClientLimits(inbox_bytes_max=INBOX_BYTES)

    def _send(self, *sent: messages.Message, fds: Sequence[int] = (), connected: object = None) -> None:
        for message in sent:
            self.sent.append(message)
            self.answer(message)

    def put(self, payload_bytes: int, options: PutOptions = TERMS) -> Put:
        payload = encode(np.zeros(payload_bytes - 64, np.uint8))
        deadline = time.monotonic() + 0.2
        return self.puts.put(bytes(32), payload, options, deadline=deadline)

    def refuse(self, message: messages.Message) -> None:
        """As a full store does: the Commit is refused at once, and parts are acknowledged as not wanted."""
        if isinstance(message, messages.Commit):
            body = messages.ErrorBody.of(StoreFull("no room"))
            self.puts.in_flight.acknowledged(messages.Committed(message.id, "refused", body))
        elif isinstance(message, messages.Part):
            self.puts.in_flight.acknowledged(messages.PartCopied(message.id, message.inbox_offset))

    def store(self, message: messages.Message) -> None:
        if isinstance(message, messages.Commit) and message.at is not None:
            self.puts.in_flight.acknowledged(messages.Committed(message.id, "stored"))
        elif isinstance(message, messages.Part):
            self.puts.in_flight.acknowledged(messages.PartCopied(message.id, message.inbox_offset))
            if message.last:
                self.puts.in_flight.acknowledged(messages.Committed(message.id, "stored"))

    @property
    def used_bytes(self) -> int:
        gc.collect()
        return self.puts.inboxes.used_bytes


@pytest.mark.parametrize("payload_bytes", [1000, INBOX_BYTES // 2, INBOX_BYTES, 10 * INBOX_BYTES])
def test_a_put_of_any_size_gets_through_and_gives_its_part_of_the_inbox_back(payload_bytes: int) -> None:
    desk = Desk()
    desk.answer = desk.store
    for _ in range(3):
        assert desk.put(payload_bytes).state == "stored"
    assert desk.used_bytes == 0
    assert len(desk.puts.in_flight) == 0
    desk.puts.in_flight.close()


def test_a_lost_put_keeps_nothing_of_its_payload() -> None:
    def hang_up(_: messages.Message) -> None:
        try:
            raise BrokenPipeError
        except OSError:
            raise DaemonUnavailable("the connection has ended") from None

    desk = Desk()
    desk.answer = desk.store
    assert desk.put(1000).state == "stored"
    desk.answer = hang_up
    array = np.zeros(1000, np.uint8)
    payload = weakref.ref(array)
    put = desk.puts.put(bytes(32), encode(array), TERMS, deadline=time.monotonic() + 0.2)
    del array
    gc.collect()
    assert put.state == "lost"
    assert payload() is None
    desk.puts.in_flight.close()


@pytest.mark.parametrize("payload_bytes", [1000, INBOX_BYTES // 2, INBOX_BYTES, 10 * INBOX_BYTES])
def test_a_refused_put_gives_its_part_of_the_inbox_back(payload_bytes: int) -> None:
    desk = Desk()
    desk.answer = desk.refuse
    for _ in range(3):
        put = desk.put(payload_bytes)
        assert put.state == "refused"
        assert isinstance(put.error, StoreFull)
    assert desk.used_bytes == 0
    desk.puts.in_flight.close()


def test_a_payload_that_is_no_longer_wanted_is_not_sent_to_its_end() -> None:
    desk = Desk()
    desk.answer = desk.refuse
    desk.put(50 * INBOX_BYTES)
    assert sum(isinstance(message, messages.Part) for message in desk.sent) <= 1


@pytest.mark.parametrize("payload_bytes", [1000, 10 * INBOX_BYTES])
def test_a_put_whose_daemon_goes_away_is_lost_and_leaves_nothing(payload_bytes: int) -> None:
    desk = Desk()

    def go_away(message: messages.Message) -> None:
        if isinstance(message, messages.Part) or (isinstance(message, messages.Commit) and message.at is not None):
            raise DaemonUnavailable("gone")

    desk.answer = go_away
    put = desk.put(payload_bytes)
    assert put.state == "lost"
    assert desk.used_bytes == 0
    desk.puts.in_flight.close()


def test_a_put_that_a_new_connection_has_taken_up_is_not_sent_by_its_own_thread_as_well() -> None:
    """The daemon would count one that the client no longer does, and refuse another for it."""
    desk = Desk()
    again: list[messages.Message] = []

    def another_connection() -> object:
        desk.puts.in_flight.send_again(lambda *sent, **_: again.extend(sent), desk)
        return desk

    desk.connection = another_connection
    put = desk.put(1000)
    commits = [message for message in (*desk.sent, *again) if isinstance(message, messages.Commit)]
    assert len(commits) == 1
    assert commits[0] in again
    desk.puts.in_flight.acknowledged(messages.Committed(commits[0].id, "stored"))
    assert put.state == "stored"
    desk.puts.in_flight.close()


@pytest.mark.parametrize("payload_bytes", [1000, 3 * (4 << 20)], ids=["with its commit", "in parts"])
def test_a_put_that_was_lost_with_its_connection_is_not_sent_on_the_next(payload_bytes: int) -> None:
    desk = Desk()
    desk.puts.inboxes.limits = ClientLimits(inbox_bytes_max=32 << 20)

    def another_connection() -> object:
        for pending in desk.puts.in_flight._pending.values():
            pending.parts.clear()  # as if it had not been copied yet
            pending.commit = replace(pending.commit, at=None)
        desk.puts.in_flight.disconnected()
        return desk

    desk.connection = another_connection
    assert desk.put(payload_bytes).state == "lost"
    assert not [message for message in desk.sent if isinstance(message, messages.Commit | messages.Part)]
    desk.puts.in_flight.close()


@pytest.mark.parametrize(
    "error", [DaemonUnavailable("not attached yet"), ProtocolError("Commit with an id that is still open")], ids=repr
)
def test_a_put_that_a_new_connection_has_taken_up_is_on_its_way_though_its_own_sending_fails(
    error: TensordError,
) -> None:
    desk = Desk()
    sent_again: list[messages.Message] = []

    def come_back(message: messages.Message) -> None:
        if isinstance(message, messages.Commit):
            desk.puts.in_flight.send_again(lambda *sent, **_: sent_again.extend(sent), desk)
            raise error

    desk.answer = come_back
    put = desk.put(1000)
    commits = [message for message in sent_again if isinstance(message, messages.Commit)]
    assert len(desk.puts.in_flight) == len(commits) == 1
    desk.puts.in_flight.acknowledged(messages.Committed(commits[0].id, "stored"))
    assert put.wait(0).state == "stored"
    assert desk.used_bytes == 0
    desk.puts.in_flight.close()


def test_a_put_sent_to_the_next_daemon_has_all_options_but_its_claim() -> None:
    desk = Desk()
    options = PutOptions(7, 60.0, 5, cost_ms=12.5, agent="planner", prefix_bytes=96, parent=b"p" * 32)
    desk.put(1000, options)
    again: list[messages.Message] = []
    desk.puts.in_flight.send_again(lambda *sent, **_: again.extend(sent), desk)
    (first,) = [message for message in desk.sent if isinstance(message, messages.Commit)]
    (second,) = [message for message in again if isinstance(message, messages.Commit)]
    said = [(c.tokens, c.ttl_s, c.cost_ms, c.agent, c.prefix_bytes, c.parent) for c in (first, second)]
    assert said == [(7, 60.0, 12.5, "planner", 96, b"p" * 32)] * 2
    assert (first.claim, second.claim) == (5, None)
    desk.puts.in_flight.close()


@pytest.mark.parametrize(
    "options", [PutOptions(cost_ms=-1.0), PutOptions(cost_ms=float("nan")), PutOptions(agent="a" * 129)], ids=repr
)
def test_terms_that_no_put_can_have_are_named(options: PutOptions) -> None:
    with pytest.raises(UsageError, match=r"(cost_ms|agent) is"):
        options.checked()


def test_nobody_else_gets_a_region_while_it_is_written_though_its_put_has_ended() -> None:
    desk = Desk()
    desk.answer = desk.store
    desk.put(1000)
    inbox = desk.puts.inboxes.current
    assert inbox is not None
    region = inbox.take(INBOX_BYTES, time.monotonic() + 1)
    assert region is not None
    with region.held():
        region.release()
        assert inbox.take(64, time.monotonic()) is None
    assert inbox.take(64, time.monotonic()) is not None
    desk.puts.in_flight.close()


@pytest.mark.parametrize("kind", [Put, Registration])
def test_a_refusal_always_has_a_reason(kind: type[Put | Registration]) -> None:
    seen: list[TensordError | None] = []

    class Seen(kind):  # type: ignore[misc, valid-type]
        """Stands for a thread that looks as soon as the state has changed."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "state" and value == "refused":
                seen.append(self.error)

    error = StoreFull("no room")
    Seen(bytes(32)).settle("refused", error)
    assert seen == [error]
