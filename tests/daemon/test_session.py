"""Sessions: what is not sent is known; who does not keep up is told; requests are measured; the end."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tensord.daemon import app
from tensord.daemon.actors.mailbox import Mailbox
from tensord.daemon.actors.messages import Deliver, GovernorMessage, HangUp, Joined, StoreMessage
from tensord.daemon.claims.quotas import Rates
from tensord.daemon.connections.session import RequestTimer, Session
from tensord.daemon.connections.status import Watchers
from tensord.daemon.reports.counters import RequestTimes
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.schema import PROTOCOL_VERSION, ClientLimits
from tensord.ipc.wire.channel import AsyncChannel
from tensord.ipc.wire.connection import Connection
from tensord.ipc.wire.descriptors import Peer
from tensord.ipc.wire.frames import pack

from ..daemon_process import PATIENCE_S


class Scene:
    """A session whose store takes `capacity` messages of it, and the client's end of its socket."""

    def __init__(self, capacity: int = 8) -> None:
        ours, self.client = socket.socketpair()
        self.store: Mailbox[StoreMessage] = Mailbox(capacity)
        governor: Mailbox[GovernorMessage] = Mailbox(8)
        self.session = Session(
            1,
            AsyncChannel(ours, Connection.control_server(ClientLimits())),
            Peer(1, 0, 0),
            self.store,
            governor,
            Rates(1.0, 0),
            RequestTimes(1.0),
            messages.Welcome(0, 0, "0", "test", 1, ClientLimits()),
        )
        self.client.send(pack(messages.Hello(1, PROTOCOL_VERSION, "test", 1, True)))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.001)


async def test_an_answer_that_comes_after_the_end_stays_with_who_gives_it() -> None:
    """A lane's descriptor among it: kept, it would hold the lock that says that the client lives."""
    scene = Scene()
    scene.client.close()
    await scene.session.run()
    [joined, *_] = scene.store.take()
    assert isinstance(joined, Joined)
    assert not joined.deliver(Deliver(messages.Done(2), (0,), close=(0,)))


async def test_a_session_is_settled_when_all_that_came_is_passed_on_and_all_answers_are_sent() -> None:
    scene = Scene(capacity=1)
    session, store = scene.session, scene.store
    running = asyncio.create_task(session.run())
    with scene.client as client:
        await scene.until(lambda: len(store) == 1)
        for number in range(2, 5):
            client.send(pack(messages.Clear(number)))
        session.stop_reading()
        client.send(pack(messages.Clear(5)))
        taken: list[StoreMessage] = []
        for expected in range(1, 5):
            await scene.until(lambda: len(store) == 1)
            assert session.settled == (expected == 4), "of four messages, the store has had this many"
            taken += store.take()  # which makes room for the next
        assert len(taken) == 4
        for number in range(20):
            session.inbox.tell_now(Deliver(messages.Order(number, "card", "drop", [bytes(32)] * 1000, "full")))
        assert not session.settled, "answers wait to be sent"
        await scene.until(lambda: not len(session.inbox))
        assert not session.settled, "the client has not read them"
        client.setblocking(False)

        def read() -> bool:
            with suppress(BlockingIOError):
                client.recv(1 << 20)
            return session.settled

        await scene.until(read)
    running.cancel()


async def test_a_session_that_does_not_keep_up_is_disconnected_with_the_reason() -> None:
    joined = Joined(1, Peer(os.getpid(), 0, 0), "slow", 1, True, Mailbox(2))
    deliveries = [Deliver(messages.Done(number)) for number in range(3)]
    assert [joined.deliver(each) for each in deliveries] == [True, True, False]
    *kept, last = joined.inbox.take()
    assert kept == deliveries[:2], "what was taken in is still sent"
    assert last == HangUp("the client does not read: 2 messages wait for it")


async def test_a_watcher_that_does_not_keep_up_loses_the_oldest_events_and_is_told_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tensord.daemon.connections.status.OUTBOX_MAX", 2)
    watchers = Watchers()
    events = []
    async with aclosing(watchers.events()) as told:
        first = asyncio.ensure_future(anext(told))
        await asyncio.sleep(0)
        for number in range(6):
            watchers.tell({"event": "put", "n": number})
        events = [await first, await anext(told)]
    assert [(event.body["n"], event.dropped) for event in events] == [(4, 4), (5, 0)]
    assert events[0].body["unix_s"] <= time.time()
    assert not watchers.are_told


def test_the_last_slow_requests_are_kept_and_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensord.daemon.reports.counters.SLOW_MAX", 3)
    times = RequestTimes(0.0)
    for slow_s in (0.0, 60.0):
        times.slow_s = slow_s
        for client in range(1, 6):
            timer = RequestTimer(times, client)
            timer.began(messages.Touch(1, [bytes(32)]))
            timer.answered(messages.Counted(1, 0))
    told = times.as_dict()
    assert [row["client"] for row in told["slow"]] == [5, 4, 3]
    assert sum(told["kinds"]["Touch"]["counts"]) == 10


async def test_the_end_waits_for_a_sessions_answers_and_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, store = Scene(), SimpleNamespace(settled=True)
    running = asyncio.create_task(scene.session.run())
    with scene.client:
        await scene.until(lambda: len(scene.store) == 1)
        for number in range(20):
            order = messages.Order(number, "card", "drop", [bytes(32)] * 1000, "full")
            scene.session.inbox.tell_now(Deliver(order))
        monkeypatch.setattr(app, "ENDING_S_MAX", 0.02)
        await app.settle([scene.session], cast(Any, store))
        assert not scene.session.settled, "the client has not read them"
        monkeypatch.setattr(app, "ENDING_S_MAX", PATIENCE_S)
        ending = asyncio.create_task(app.settle([scene.session], cast(Any, store)))
        await asyncio.sleep(0)
        assert not ending.done()
    await ending
    running.cancel()
