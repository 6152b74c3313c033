"""Waiting for a uid's turn by its rate: whoever reads a connection waits here, and so does the sender in the end."""

from __future__ import annotations

import asyncio

from ...ipc.channel import AsyncChannel
from ..core.rates import Rates


async def paced(channel: AsyncChannel, rates: Rates, uid: int, cost: float = 1.0) -> None:
    """Returns when a request of the uid may be passed on: at once where its sender has gone, though it counts."""
    delay_s = rates.delay_s(uid, asyncio.get_running_loop().time(), cost)
    if delay_s and not channel.closed:
        await asyncio.sleep(delay_s)
