from __future__ import annotations

from pathlib import Path

import pytest

from tensord.client.ctl.doctor import facts
from tensord.client.ctl.doctor.finding import Level
from tensord.client.ctl.doctor.pressure import gauges, metrics

from ....daemon_process import Daemon
from ..documents import CARD, gauge, source

HOST = gauge("host", 1, 2, "normal")
NONE_THERE = {"nvidia": False, "amd": False}
PATH = Path("/run/tensord/metrics.sock")


def test_gauges_that_are_measured_are_fine() -> None:
    found = gauges([HOST, gauge(CARD, 1, 2, "normal")], {"nvidia": True})
    assert (found.level, found.text) == (Level.OK, f"host by cgroup, {CARD} by nvidia")
    assert gauges([HOST], NONE_THERE).level is Level.OK
    assert gauges(None, {"nvidia": True}).level is Level.OK


@pytest.mark.parametrize(
    ("changed", "named"), [({"stale": True}, CARD), ({"source": "drill"}, "drill"), ({"source": "file"}, "file")]
)
def test_gauges_that_are_made_up_or_stale_are_warned_of(changed: dict[str, object], named: str) -> None:
    found = gauges([HOST, gauge(CARD, 1, 2, "normal", **changed)], NONE_THERE)
    assert found.level is Level.WARN
    assert named in found.text
    assert found.remedy


def test_a_source_that_hangs_is_warned_of_with_the_age_of_what_it_read() -> None:
    hanging = source("nvidia", state="hanging", since_s=65.0, why="no answer for 65 s", problem=True)
    found = gauges([HOST, gauge(CARD, 1, 2, "normal", stale=True, age_s=67.0)], {"nvidia": True}, [hanging])
    assert found.level is Level.WARN
    assert "source nvidia hanging for 1m05s: no answer for 65 s" in found.text
    assert f"{CARD}, read 1m07s ago" in found.text


def test_a_gpu_without_a_gauge_is_warned_of() -> None:
    found = gauges([HOST], {"nvidia": False, "amd": True})
    assert found.level is Level.WARN
    assert "tensord[amd]" in found.remedy


def test_a_host_without_a_gauge_is_warned_of() -> None:
    assert gauges([], NONE_THERE).level is Level.WARN


def test_metrics_that_cannot_be_scraped_are_warned_of() -> None:
    assert metrics(None, None).level is Level.OK
    assert metrics(PATH, None).level is Level.OK
    found = metrics(PATH, "Permission denied")
    assert found.level is Level.WARN
    assert "Permission denied" in found.text


def test_metrics_are_scraped_to_see(daemon: Daemon, tmp_path: Path) -> None:
    assert facts.scrape(daemon.socket.with_name("metrics.sock"), 30.0) is None
    assert facts.scrape(tmp_path / "metrics.sock", 30.0) == "No such file or directory"
    assert facts.scrape(daemon.socket, 0.05) is not None


def test_a_setting_that_names_a_card_that_is_not_there_is_a_warning() -> None:
    missing = [{"setting": "device.baseline", "card": "nope"}]
    found = gauges([HOST, gauge(CARD, 1, 2, "normal")], NONE_THERE, (), missing)
    assert found.level is Level.WARN and "device.baseline names nope, and no card is called so" in found.text
