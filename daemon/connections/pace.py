"""Delays a session until the request rate of its uid allows the next request.

Owns: the wait. Does not own the rates (`core.rates`). The reader of a connection waits here, so the sender gets
backpressure.
"""

from __future__ import annotations

import asyncio

from ...ipc.wire.channel import AsyncChannel
from ..claims.rates import Rates


async def paced(channel: AsyncChannel, rates: Rates, uid: int, cost: float = 1.0) -> None:
    """Returns once a request of the uid may be processed. The request counts `cost` against the rate.

    Does not wait if the channel is closed, but the request still counts.
    """
    delay_s = rates.delay_s(uid, asyncio.get_running_loop().time(), cost)
    if delay_s and not channel.closed:
        await asyncio.sleep(delay_s)
