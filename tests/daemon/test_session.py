"""A session: what it has taken up and not sent is known; one that has ended takes nothing more to send."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from tensord.daemon.actors.mailbox import Mailbox
from tensord.daemon.actors.messages import Deliver, GovernorMessage, Joined, StoreMessage
from tensord.daemon.claims.quotas import Rates
from tensord.daemon.connections.session import Session
from tensord.daemon.reports.request_times import RequestTimes
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
            RequestTimes(1.0, 8),
            messages.Welcome(0, 0, "0", "test", 1, ClientLimits()),
        )
        self.client.send(pack(messages.Hello(1, PROTOCOL_VERSION, "test", 1, True)))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.001)


def test_an_answer_that_comes_after_the_end_stays_with_who_gives_it() -> None:
    """A lane's descriptor among it: kept, it would hold the lock that says that the client lives."""

    async def serve() -> Joined:
        scene = Scene()
        scene.client.close()
        await scene.session.run()
        [joined, *_] = scene.store.drain()
        assert isinstance(joined, Joined)
        return joined

    joined = asyncio.run(serve())
    assert not joined.deliver(Deliver(messages.Done(2), (0,), close=(0,)))


def test_a_session_is_settled_when_all_that_came_is_passed_on_and_all_answers_are_sent() -> None:
    async def serve() -> None:
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
                taken += store.drain()  # which makes room for the next
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

    asyncio.run(serve())
