"""`baseline`: how much of a card is held by plan, shown and set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tensord.client.ctl.baseline import named

from ...daemon_process import Daemon
from .conftest import Ctl

CARDS = ["0000:65:00.0", "0000:66:00.0"]


@pytest.fixture
def carded(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with two cards of 80 GiB, of which the first uses 75."""
    gauges = tmp_path / "gauges"
    gauges.write_text(f"{CARDS[0]} {75 << 30} {80 << 30}\n{CARDS[1]} {10 << 30} {80 << 30}\n")
    every = {"gauges_sample_s": "20ms", "gauges_sample_pressed_s": "20ms"}
    with Daemon(gauges_device="file", gauges_host="none", gauges_file=gauges, **every) as daemon:
        daemon.start()
        daemon.until(lambda status: len(status["governor"]["gauges"]) == 2, "the first sample")
        yield daemon


def test_a_baseline_is_set_shown_and_ended_and_the_mode_follows(
    carded: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    ctl = Ctl(capsys, carded.socket)
    assert ctl("baseline").out.splitlines() == [f"{card}: no baseline" for card in CARDS]
    assert ctl("baseline", "--card", "0", "72GiB").out == f"{CARDS[0]}: baseline 72.0 GiB\n"
    carded.until(lambda status: status["governor"]["gauges"][0]["mode"] == "relaxed", "the mode to be of the rest")
    assert "72.0 GiB of 80.0 GiB, declared; 37.5 % of the rest is used" in ctl("baseline", "--card", CARDS[0]).out
    assert "beside a declared baseline" in ctl("status").out.replace("\n", " ")
    ctl("baseline", "--card", "0", "0")
    carded.until(lambda status: status["governor"]["gauges"][0]["mode"] == "critical", "the mode of the whole card")


def test_a_baseline_that_is_not_in_force_as_it_was_set_says_what_is(
    carded: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    ctl = Ctl(capsys, carded.socket)
    said = ctl("baseline", "--card", "0", "1TiB").out
    assert said == f"{CARDS[0]}: baseline 1.00 TiB, and 76.0 GiB are in force: at most 95 % of the 80.0 GiB\n"
    carded.client().declare_baseline(CARDS[1], 8 << 30)
    assert ctl("baseline", "--card", "1", "4GiB").out == (
        f"{CARDS[1]}: baseline 4.00 GiB, and 8.00 GiB are in force, by clients or the configuration\n"
    )
    assert ctl("baseline", "--card", "1", "0").out == (
        f"{CARDS[1]}: the operator's baseline is ended, and 8.00 GiB are in force, by clients or the configuration\n"
    )


def test_a_card_that_is_not_there_is_named(carded: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    ctl = Ctl(capsys, carded.socket)
    assert "name one" in ctl("baseline", "72GiB", code=2).err
    assert "no card is called '7'" in ctl("baseline", "--card", "7", "72GiB", code=2).err


def test_the_only_card_need_not_be_named() -> None:
    assert named(None, CARDS[:1]) == CARDS[0]
    assert named("1", CARDS) == CARDS[1]
    with pytest.raises(click.ClickException, match="the daemon reads no card") as none:
        named(None, [])
    assert not isinstance(none.value, click.UsageError)
