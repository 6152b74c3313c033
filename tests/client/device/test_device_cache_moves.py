"""What goes in a move, and what stays: each case by itself, with the daemon's core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tensord.client.device.entries import DeviceEntry
from tensord.ipc.messages import control as messages
from tensord.testing.fake_vram import FakeCard, FakeStream

from .card import TOTAL_BYTES, card_folder, key, values
from .wire import CARD, Owner


class OrderedOwner(Owner):
    def put(self, number: int) -> DeviceEntry:
        entry = self.enter(key(number), values(number))
        self.exchange()
        assert entry.registration.state == "registered"
        return entry

    def read(self, number: int) -> None:
        lease = self.entries.lease(key(number))
        assert lease is not None
        lease.release()

    def ordered(self, number: int, kind: Any) -> messages.AcknowledgeOrder | None:
        """What is acknowledged of an order that the daemon has just sent."""
        self.upkeep.received(messages.Order(1, CARD, kind, [key(number)], "test"), self.wire.connection)
        self.wire.said.clear()
        self.upkeep.turn()
        said = [message for message in self.wire.said if isinstance(message, messages.AcknowledgeOrder)]
        return said[0] if said else None

    @contextmanager
    def meanwhile(self, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> Iterator[None]:
        """Something happens after each copy to the host tier."""
        put = self.host.put

        def put_and_more(*arguments: Any) -> None:
            put(*arguments)
            happens()

        with monkeypatch.context() as patch:
            patch.setattr(self.host, "put", put_and_more)
            yield


@pytest.fixture
def owner() -> Iterator[OrderedOwner]:
    with card_folder() as folder, FakeCard(folder, CARD, TOTAL_BYTES) as card:
        yield OrderedOwner(card)


def test_an_entry_that_cannot_be_copied_is_dropped_unless_the_daemon_is_gone(
    owner: OrderedOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.host.full = True
    owner.put(1)
    connection = owner.wire.connection
    with owner.meanwhile(monkeypatch, lambda: setattr(owner.wire, "connection", None)):
        assert owner.ordered(1, "offload") is None and key(1) in owner.entries
    owner.wire.connection = connection
    moved = owner.ordered(1, "offload")
    assert moved is not None and moved.dropped == [key(1)] and moved.freed_bytes > 0 and len(owner.entries) == 0


def test_an_entry_that_is_read_while_it_is_copied_stays(owner: OrderedOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    owner.put(1)
    with owner.meanwhile(monkeypatch, lambda: owner.read(1)):
        moved = owner.ordered(1, "offload")
    assert moved is not None and moved.kept == [key(1)] and key(1) in owner.entries


@pytest.mark.parametrize("kind", ["offload", "drop"])
def test_nothing_goes_before_every_stream_that_used_it_has_done_so(owner: OrderedOwner, kind: str) -> None:
    """The mark that is missing is neither the last nor of the stream that put it."""
    entry = owner.put(1)
    with owner.device.on(FakeStream()) as stream, stream.hold() as hold:
        owner.read(1)
        entry.marks.append(FakeStream().mark())
        waits: list[float | None] = []

        class Slow:
            def wait(self, timeout_s: float | None = None) -> bool:
                waits.append(timeout_s)
                return False

        entry.marks[0] = Slow()
        moved = owner.ordered(1, kind)
        assert moved is not None and moved.kept == [key(1)]
        assert waits
        hold.release()


def test_an_offload_that_its_owner_asks_for_while_the_daemon_leaves_is_tried_with_the_next(owner: OrderedOwner) -> None:
    owner.put(1)
    owner.wire.listener.detached()
    _, leaving = owner.upkeep.send_away([key(1)])
    owner.wire.connect()
    owner.exchange()
    assert leaving.ended.is_set() and leaving.gone == 1 and key(1) not in owner.entries
