"""A session that has ended takes nothing more, so that what it was to send is closed by whoever was to give it."""

from __future__ import annotations

import asyncio
import socket

from tensord.daemon.actors.inbox import Inbox
from tensord.daemon.actors.session import Session, welcome_for
from tensord.daemon.actors.words import Deliver, GovernorMessage, Joined, StoreMessage
from tensord.daemon.core.rates import Rates
from tensord.ipc import messages
from tensord.ipc.channel import AsyncChannel
from tensord.ipc.connection import Connection
from tensord.ipc.frames import pack
from tensord.ipc.peer import Peer
from tensord.ipc.words import PROTOCOL_VERSION, Limits


def test_an_answer_that_comes_after_the_end_stays_with_who_gives_it() -> None:
    """A lane's descriptor among it: kept, it would hold the lock that says that the client lives."""

    async def serve() -> Joined:
        ours, theirs = socket.socketpair()
        store: Inbox[StoreMessage] = Inbox(8)
        governor: Inbox[GovernorMessage] = Inbox(8)
        session = Session(
            1,
            AsyncChannel(ours, Connection.control_server(Limits())),
            Peer(1, 0, 0),
            store,
            governor,
            Rates(1.0, 0),
            welcome=welcome_for("test", 1, Limits()),
            outbox_max=8,
            hello_s_max=60.0,
        )
        with theirs:
            theirs.send(pack(messages.Hello(1, PROTOCOL_VERSION, "test", 1, True)))
        await session.run()
        [joined, *_] = store.drain()
        assert isinstance(joined, Joined)
        return joined

    joined = asyncio.run(serve())
    assert not joined.deliver(Deliver(messages.Done(2), (0,), close=(0,)))
