"""When gauges are read, at the pace of the governor and at once when tasks stall; how old reports of owners are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensord.errors import DeviceFull
from tensord.ipc.messages import control as messages

from ..daemon_process import MIB, PATIENCE_S, Daemon
from ..faults.raw import RawClient


def test_a_sample_that_shows_pressure_hastens_the_next_one(tmp_path: Path) -> None:
    file = tmp_path / "gauges"
    file.write_text("host 90GiB 100GiB\n")
    often = {"gauges_sample_s": "1h", "gauges_sample_pressed_s": "10ms"}
    with Daemon(gauges_device="none", gauges_host="file", gauges_file=file, **often) as daemon:
        daemon.start().until(lambda status: status["governor"]["gauges"], "the first sample")
        beside = tmp_path / "new"
        beside.write_text("host 1GiB 100GiB\n")
        beside.rename(file)
        daemon.until(lambda status: status["governor"]["gauges"][0]["used_bytes"] == 1 << 30, "the next sample")


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
        with pytest.raises(DeviceFull, match="734003200 may have been taken since"):
            reserve(second)
        report(second, 701 * MIB, time.monotonic())
        running.until(lambda status: status["governor"]["gauges"][0]["used_bytes"] == 701 * MIB, "what was allocated")
        with pytest.raises(DeviceFull, match=r"and 338690048 are free \(0 more"):
            reserve(second)


def test_a_report_of_a_time_to_come_counts_as_of_its_arrival(running: Daemon) -> None:
    with owner(running) as client:
        report(client, 5, 3e8)
        gauge = running.until(lambda status: status["governor"]["gauges"], "the report")[0]
        assert gauge["age_s"] < PATIENCE_S and not gauge["stale"]
