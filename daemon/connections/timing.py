"""When requests of one connection may be processed, when they begin and end, and how late the event loop is.

Owns: the open requests of a connection, with their begin, and the wait for the rate of a uid. Does not own the
histograms (`reports.counters`), nor the rates (`claims.quotas`).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from ...ipc.messages import control as messages
from ...ipc.messages.declared import Answer, Request, id_of
from ...ipc.wire.channel import AsyncChannel
from ..claims.quotas import Rates
from ..reports.counters import RequestTimes

LAG_EVERY_S: Final = 0.5
"""How often the lag is measured."""


class RequestTimer:
    """Measures the requests of one connection, from their arrival until the connection has their answer.

    `client`: 0 for a reader of the status socket. `name`: the client's, once it is known.
    """

    def __init__(self, times: RequestTimes, client: int, name: str = "") -> None:
        self.name = name
        self._times = times
        self._client = client
        self._open: dict[int | None, tuple[type[Request], int, float]] = {}

    def began(self, request: Request) -> None:
        """A request has arrived. One without an answer is not measured."""
        if request.answered_by is not None:
            size_bytes = sum(request.sizes) if isinstance(request, messages.AskForGrants) else 0
            self._open[id_of(request)] = type(request), size_bytes, time.monotonic()

    def answered(self, answer: Answer) -> None:
        """The connection has an answer. Pushes, and the second answer to a claim, are ignored."""
        number = id_of(answer)
        kind, size_bytes, began = self._open.get(number, (Request, 0, 0.0))
        expected: Any = kind.answered_by
        if expected is not None and isinstance(answer, (expected, messages.Error)):
            del self._open[number]
            about = {"payload_bytes": size_bytes, "client": self._client, "name": self.name, "unix_s": time.time()}
            self._times.took(kind.__name__, time.monotonic() - began, **about)


async def paced(channel: AsyncChannel, rates: Rates, uid: int, cost: float = 1.0) -> None:
    """Returns once a request of the uid may be processed. The request counts `cost` against the rate. The reader of a
    connection waits here, so the sender gets backpressure. Does not wait if the channel is closed."""
    delay_s = rates.delay_s(uid, asyncio.get_running_loop().time(), cost)
    if delay_s and not channel.closed:
        await asyncio.sleep(delay_s)


async def measure_lag(times: RequestTimes) -> None:
    """Measures the event loop's lag until it is cancelled."""
    while True:
        due = time.monotonic() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        times.lagged(time.monotonic() - due)
