"""The pressure actor: reads the gauges at the interval set by the governor, or at once when tasks stall for memory.

Owns: the times of the samples. Does not own the gauges' sources (`gauges`), nor the consequences of a sample (the
governor). A sample begins a reading of every source, each in a thread of its own, and reports the answers as they come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from ..gauges.gauges import DEADLINE_S, Gauges
from ..governor.forms.events import Sampled


class PressureActor:
    """Gives every sample to `report`. `every_s` returns the interval between samples; call `hasten` when it has become
    shorter."""

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
        gauges.answered = self._answered

    def sample_now(self) -> None:
        self._at_once = True
        self._look.set()

    def hasten(self) -> None:
        """Computes the remaining wait again, because `every_s` has become shorter."""
        self._look.set()

    async def run(self) -> None:
        try:
            while True:
                self._at_once = False
                began_at = self._clock()
                self._gauges.begin(began_at)
                # The governor may shorten the interval meanwhile, due to this sample.
                while not self._at_once and (left_s := began_at + self._every_s() - self._clock()) > 0:
                    self._look.clear()
                    if self._gauges.has_news(self._clock()):
                        self._report(self._gauges.take(self._clock(), self._every_s()))
                    # A reading that passes its deadline is reported then, however long the interval is.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(min(left_s, DEADLINE_S)):
                            await self._look.wait()
                # If samples take longer than the interval, nothing above waits.
                await asyncio.sleep(0)
        finally:
            self._gauges.close()

    def _answered(self) -> None:
        """Called in the thread of a source, even after the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._look.set)
