"""When gauges are read: at the governor's pace, which may change with every sample, and at once when tasks stall."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from tensord.daemon.actors import pressure
from tensord.daemon.actors.governor import GovernorActor
from tensord.daemon.actors.pressure import PressureActor
from tensord.daemon.gauges import gauges
from tensord.daemon.gauges.gauges import Gauges
from tensord.daemon.gauges.reading import Reading, Result
from tensord.daemon.governor.forms.events import Sampled
from tensord.daemon.governor.forms.limits import GovernorLimits
from tensord.daemon.governor.governor import Governor
from tensord.daemon.process.logs import logger
from tensord.ipc.messages.modes import Tier

PATIENCE_S = 30.0
NEVER_S = 3600.0


class Reports:
    """What was sampled, and how long the governor wants to wait for the next."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.asked = 0
        self.count = 0
        self.last = Sampled(())
        self.arrived = asyncio.Event()

    def pace(self) -> float:
        self.asked += 1
        return self.every_s

    def take(self, sampled: Sampled) -> None:
        self.last = sampled
        self.count += 1
        self.arrived.set()

    async def next(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.arrived.wait()
        self.arrived.clear()


def _actor(reports: Reports) -> PressureActor:
    return PressureActor(Gauges([], None), clock=time.monotonic, report=reports.take, every_s=reports.pace)


def _governor(hasten: Callable[[], object], sample_s: float, sample_pressed_s: float) -> GovernorActor:
    return GovernorActor(
        Governor(GovernorLimits(sample_s=sample_s, sample_pressed_s=sample_pressed_s)),
        clock=time.monotonic,
        tell_store=lambda _: None,
        reading=lambda _: None,
        hasten=hasten,
        tell_watchers=lambda _: None,
    )


class Full:
    """A card that shows pressure."""

    name = "full"

    def read(self, now: float) -> Result:
        return {"card": Reading(90, 100)}

    def close(self) -> None:
        pass


class Slow(Full):
    """A card whose reading returns when the test says so."""

    name = "slow"

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def read(self, now: float) -> Result:
        assert self.go_on.wait(PATIENCE_S)
        return {"slow card": Reading(10, 100)}


def test_a_source_that_hangs_is_reported_before_the_next_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pressure, gauges):
        monkeypatch.setattr(module, "DEADLINE_S", 0.05)

    async def go() -> None:
        reports, slow = Reports(NEVER_S), Slow()
        actor = PressureActor(
            Gauges([(Tier.DEVICE, [slow])], logger("test")),
            clock=time.monotonic,
            report=reports.take,
            every_s=reports.pace,
        )
        running = asyncio.create_task(actor.run())
        while [each.state for each in reports.last.sources] != ["hanging"]:
            await reports.next()
        slow.go_on.set()
        while [each.state for each in reports.last.sources] != ["ok"]:
            await reports.next()
        running.cancel()

    asyncio.run(go())


def test_a_sample_that_shows_pressure_hastens_the_next_one() -> None:
    async def go() -> None:
        reports = Reports(NEVER_S)

        def report(sampled: Sampled) -> None:
            # The governor hears of a sample after it was taken; by then its successor is waited for.
            reports.take(sampled)
            asyncio.get_running_loop().call_later(0.01, governor.inbox.tell_now, sampled)

        actor = PressureActor(
            Gauges([(Tier.DEVICE, [Full()])], logger("test")),
            clock=time.monotonic,
            report=report,
            every_s=lambda: governor.sample_every_s,
        )
        governor = _governor(actor.hasten, sample_s=NEVER_S, sample_pressed_s=0.01)
        running = [asyncio.create_task(each.run()) for each in (governor, actor)]
        for _ in range(3):
            await reports.next()
        for each in running:
            each.cancel()

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
