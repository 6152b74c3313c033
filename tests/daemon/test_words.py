"""What actors say to one another: a session that does not keep up."""

from __future__ import annotations

import asyncio
import os

from tensord.daemon.actors.mailbox import Mailbox
from tensord.daemon.actors.messages import Deliver, HangUp, Joined
from tensord.ipc.messages import control as messages
from tensord.ipc.wire.descriptors import Peer


def test_a_session_that_does_not_keep_up_is_disconnected_with_the_reason() -> None:
    async def told() -> None:
        joined = Joined(1, Peer(os.getpid(), 0, 0), "slow", 1, True, Mailbox(2))
        deliveries = [Deliver(messages.Done(number)) for number in range(3)]
        assert [joined.deliver(each) for each in deliveries] == [True, True, False]
        *kept, last = joined.inbox.drain()
        assert kept == deliveries[:2], "what was taken in is still sent"
        assert last == HangUp("the client does not read: 2 messages wait for it")

    asyncio.run(told())
