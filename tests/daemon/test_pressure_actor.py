"""When gauges are read, at the pace of the governor and at once when tasks stall; how old reports of owners are."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

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
from tensord.errors import DeviceFull
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.modes import Tier

from ..daemon_process import MIB, PATIENCE_S, Daemon
from ..faults.raw import RawClient

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


def _actor(reports: Reports, *cards: Any, **more: Any) -> PressureActor:
    gauges = Gauges([(Tier.DEVICE, [card]) for card in cards], logger("test"))
    return PressureActor(gauges, clock=time.monotonic, **{"report": reports.take, "every_s": reports.pace, **more})


class Full:
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


async def test_a_source_that_hangs_is_reported_before_the_next_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pressure, gauges):
        monkeypatch.setattr(module, "DEADLINE_S", 0.05)
    reports, slow = Reports(NEVER_S), Slow()
    running = asyncio.create_task(_actor(reports, slow).run())
    while [each.state for each in reports.last.sources] != ["hanging"]:
        await reports.next()
    slow.go_on.set()
    while [each.state for each in reports.last.sources] != ["ok"]:
        await reports.next()
    running.cancel()


async def test_a_sample_that_shows_pressure_hastens_the_next_one() -> None:
    reports = Reports(NEVER_S)
    governor: GovernorActor

    def report(sampled: Sampled) -> None:
        # The governor hears of a sample after it was taken; by then its successor is waited for.
        reports.take(sampled)
        asyncio.get_running_loop().call_later(0.01, governor.inbox.tell_now, sampled)

    actor = _actor(reports, Full(), report=report, every_s=lambda: governor.sample_every_s)
    governor = GovernorActor(
        Governor(GovernorLimits(sample_s=NEVER_S, sample_pressed_s=0.01)),
        clock=time.monotonic,
        tell_store=lambda _: None,
        reading=lambda _: None,
        hasten=actor.hasten,
        tell_watchers=lambda _: None,
    )
    running = [asyncio.create_task(each.run()) for each in (governor, actor)]
    for _ in range(3):
        await reports.next()
    for each in running:
        each.cancel()


async def test_a_stall_has_a_sample_taken_at_once() -> None:
    reports = Reports(NEVER_S)
    actor = _actor(reports)
    running = asyncio.create_task(actor.run())
    await reports.next()
    actor.sample_now()
    await reports.next()
    assert reports.count == 2
    running.cancel()


# ---- a device that only its owners measure: a report is as old as its reading, and not as its message


CARD = "0000:65:00.0"
TOTAL = 1024 * MIB


@pytest.fixture
def running() -> Iterator[Daemon]:
    with Daemon(
        gauges_device="owners", gauges_host="none", gauges_sample_s="10ms", gauges_sample_pressed_s="10ms"
    ) as daemon:
        yield daemon.start()


def owner(daemon: Daemon) -> RawClient:
    client = RawClient(daemon.socket, attach=False)
    client.ask(lambda n: messages.OpenDevice(n, CARD))
    return client


def report(client: RawClient, used_bytes: int, read_at_s: float) -> None:
    client.channel.send(messages.ReadDevice(CARD, used_bytes, TOTAL, read_at_s), timeout_s=PATIENCE_S)


def reserve(client: RawClient) -> int:
    token: int = client.ask(lambda n: messages.ReserveDevice(n, CARD, 700 * MIB, 60.0)).reservation
    return token


def test_memory_that_was_taken_since_an_owner_read_its_device_is_not_granted_again(running: Daemon) -> None:
    """The first has reserved, allocated and released. The second read the device before, and its report comes after."""
    with owner(running) as first, owner(running) as second:
        report(first, 0, time.monotonic())
        running.until(lambda status: status["governor"]["gauges"], "the first report")
        token = reserve(first)
        before_s = time.monotonic()
        first.ask(lambda n: messages.ReleaseReservation(n, token))  # 700 MiB are allocated now
        report(second, 1 * MIB, before_s)
        running.until(lambda status: status["governor"]["gauges"][0]["used_bytes"] == MIB, "the late report")
        with pytest.raises(DeviceFull, match="734003200 more are reserved"):
            reserve(second)
        report(second, 701 * MIB, time.monotonic())
        running.until(lambda status: status["governor"]["gauges"][0]["used_bytes"] == 701 * MIB, "what was allocated")
        with pytest.raises(DeviceFull, match=r"and 338690048 are free \(0 more"):
            reserve(second)


@pytest.mark.parametrize("read_at_s", [0.0, 3e8])
def test_a_report_without_a_time_or_of_a_time_to_come_counts_as_of_its_arrival(
    running: Daemon, read_at_s: float
) -> None:
    with owner(running) as client:
        report(client, 5, read_at_s)
        gauge = running.until(lambda status: status["governor"]["gauges"], "the report")[0]
        assert gauge["age_s"] < PATIENCE_S and not gauge["stale"]
