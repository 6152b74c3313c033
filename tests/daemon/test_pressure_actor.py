"""When gauges are read: at the governor's pace, which may change with every sample, and at once when tasks stall."""

from __future__ import annotations

import asyncio
import time

from tensord.daemon.actors.pressure import PressureActor
from tensord.daemon.core.governor.events import Sampled
from tensord.daemon.gauges.gauges import Gauges

PATIENCE_S = 30.0
NEVER_S = 3600.0


class Reports:
    """What was sampled, and how long the governor wants to wait for the next."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.count = 0
        self.arrived = asyncio.Event()

    def take(self, _: Sampled) -> None:
        self.count += 1
        self.arrived.set()

    async def next(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.arrived.wait()
        self.arrived.clear()


def _actor(reports: Reports) -> PressureActor:
    return PressureActor(Gauges([], None), clock=time.monotonic, report=reports.take, every_s=lambda: reports.every_s)


def test_a_sample_that_shows_pressure_hastens_the_next_one() -> None:
    async def go() -> None:
        reports = Reports(NEVER_S)
        running = asyncio.create_task(_actor(reports).run())
        await reports.next()
        # The governor hears of a sample after it was taken; by then its successor is waited for.
        reports.every_s = 0.01
        await reports.next()
        running.cancel()

    asyncio.run(go())


def test_a_stall_has_a_sample_taken_at_once() -> None:
    async def go() -> None:
        reports = Reports(NEVER_S)
        actor = _actor(reports)
        running = asyncio.create_task(actor.run())
        await reports.next()
        actor.sample_now()
        await reports.next()
        assert reports.count == 2
        running.cancel()

    asyncio.run(go())
