"""The pressure actor: reads the gauges at the pace that the governor wants, or at once when tasks stall for memory.

Owns when a sample is taken. A sample that takes long (a driver that hangs) delays the next one and nothing else: it is
taken in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...ipc import messages
from ..core.governor.events import Sampled
from ..gauges.gauges import Gauges
from ..logs import logger

_log = logger("pressure")


class PressureActor:
    """Tells `report` of every sample. `every_s` says how long to wait for the next."""

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
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def reading(self, message: messages.ReadDevice) -> None:
        """What the owner of tensors sees of its device."""
        self._gauges.report(message.device, message.used_bytes, message.total_bytes, self._clock())

    def sample_now(self) -> None:
        """Takes the next sample at once; from any thread."""
        self._loop.call_soon_threadsafe(self._wake.set)

    async def run(self) -> None:
        """Samples until it is cancelled."""
        try:
            while True:
                self._wake.clear()
                self._report(await asyncio.to_thread(self._gauges.sample, self._clock()))
                try:
                    async with asyncio.timeout(self._every_s()):
                        await self._wake.wait()
                except TimeoutError:
                    pass
        finally:
            self._gauges.close()
