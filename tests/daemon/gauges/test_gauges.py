from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tensord.daemon.config import sections
from tensord.daemon.config.config import Config
from tensord.daemon.gauges.gauges import ABSENT_S, Gauges, open_gauges
from tensord.daemon.gauges.reading import GaugeAbsent, Reading, Result
from tensord.daemon.governor.forms.events import Sample
from tensord.daemon.process.logs import logger
from tensord.ipc.messages.modes import Tier

from ...daemon_process import until

CARD = "0000:65:00.0"
LOG = logger("test")


class Scripted:
    """A source that answers, or raises, what it is told to."""

    def __init__(self, name: str, answer: Result | BaseException) -> None:
        self.name = name
        self.answer = answer
        self.reads = 0

    def read(self, now: float) -> Result:
        self.reads += 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def close(self) -> None:
        pass


def wanted(**settings: Any) -> sections.GaugesSection:
    argv = [word for name, value in settings.items() for word in (f"--gauges-{name}", str(value))]
    return Config.load(argv, {}).gauges


def is_idle(gauges: Gauges) -> bool:
    return all(each.began_at is None for each in gauges._threads)


def sampled(gauges: Gauges, now: float) -> dict[str, Sample]:
    """Reads every source that does not hang, and takes what they answer."""
    gauges.begin(now)
    until(lambda: is_idle(gauges), "all answers")
    return {sample.gauge: sample for sample in gauges.take(now).samples}


def test_without_any_library_the_owners_reports_count_and_absent_sources_are_one_quiet_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    gauges = open_gauges(wanted(host="none"), LOG, root=tmp_path)
    gauges.report(CARD, 3, 10, read_at=1.5)
    with capture_logs() as lines:
        for now in (2.0, 3.0, 4.0):
            assert sampled(gauges, now) == {CARD: Sample(CARD, Tier.DEVICE, 3, 10, "owners", 1.5)}
    left_out = [
        (line["source"], line["log_level"]) for line in lines if line["event"] == "gauge source absent; not used"
    ]
    assert left_out == [("amd", "info"), ("nvidia", "info"), ("sysfs", "info")]
    assert [line["source"] for line in lines if line["event"] == "gauges found"] == ["owners"]


@pytest.mark.parametrize("device", ["auto", "amd", "nvidia", "sysfs", "owners"])
def test_every_choice_can_be_sampled_and_closed_on_any_machine(device: str, tmp_path: Path) -> None:
    gauges = open_gauges(wanted(device=device), LOG, root=tmp_path)
    assert "host" in sampled(gauges, 0.0)
    gauges.close()
    gauges.close()
    gauges.begin(1.0)
    assert is_idle(gauges)


def test_a_missing_source_is_tried_again_at_intervals() -> None:
    source = Scripted("late", GaugeAbsent("no driver yet"))
    gauges = Gauges([(Tier.DEVICE, [source])], LOG)
    for now in (0.0, 1.0, ABSENT_S - 1):
        assert sampled(gauges, now) == {}
    assert source.reads == 1
    source.answer = {CARD: Reading(1, 2)}
    assert set(sampled(gauges, ABSENT_S)) == {CARD}


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError(), RuntimeError()])
def test_whatever_a_library_raises_is_a_failure_and_is_read_again(error: BaseException) -> None:
    source = Scripted("one", error)
    gauges = Gauges([(Tier.DEVICE, [source])], LOG)
    gauges.begin(0.0)
    until(lambda: is_idle(gauges), "the answer")
    (state,) = gauges.take(0.0).sources
    assert state.problem and type(error).__name__ in state.why
    source.answer = {CARD: Reading(1, 2)}
    assert sampled(gauges, 1.0)[CARD].used_bytes == 1
    gauges.close()
