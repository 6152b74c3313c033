"""The pressure actor: reads the gauges at the interval set by the governor, or at once when tasks stall for memory.

Owns: the times of the samples. Does not own the gauges' sources (`gauges`), nor the consequences of a sample (the
governor).

Invariant: one sample is taken at a time, in a thread. A slow sample (a hanging driver) delays only the next sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from ...ipc import messages
from ..core.governor.events import Sampled
from ..gauges.gauges import Gauges
from ..logs import logger

_log = logger("pressure")


class PressureActor:
    """Gives every sample to `report`.

    `every_s` returns the interval between samples. Call `hasten` when it has become shorter.
    """

    def __init__(
        self,
        gauges: Gauges,
        *,
        clock: Callable[[], float],
        report: Callable[[Sampled], object],
        every_s: Callable[[], float],
    ) -> None:
        self._gauges = gauges
        self._clock = clock
        self._report = report
        self._every_s = every_s
        self._look = asyncio.Event()
        self._at_once = False
        self._loop = asyncio.get_running_loop()

    def reading(self, message: messages.ReadDevice) -> None:
        """Passes a client's reading of its device to the gauges."""
        self._gauges.report(message.device, message.used_bytes, message.total_bytes, self._clock())

    def sample_now(self) -> None:
        """Takes the next sample at once. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._take_at_once)

    def hasten(self) -> None:
        """Computes the remaining wait again, because `every_s` has become shorter."""
        self._look.set()

    async def run(self) -> None:
        """Samples until it is cancelled."""
        try:
            while True:
                self._at_once = False
                began_at = self._clock()
                self._report(await asyncio.to_thread(self._gauges.sample, began_at))
                await self._until_next(began_at)
        finally:
            self._gauges.close()

    async def _until_next(self, began_at: float) -> None:
        """Waits until the next sample is due. The governor may shorten the interval meanwhile, due to this sample."""
        while not self._at_once and (left_s := began_at + self._every_s() - self._clock()) > 0:
            self._look.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._look.wait()

    def _take_at_once(self) -> None:
        self._at_once = True
        self._look.set()
