"""`drill`: what is asked, what is played, and that all of it ends with the command."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tensord.client.ctl.orders import drill
from tensord.daemon.governor.forms.thresholds import Thresholds
from tensord.daemon.governor.modes.modes import TierMode
from tensord.ipc.gaugefile import DrillReading, read_drill
from tensord.ipc.messages.control import Drilled, TierState
from tensord.ipc.messages.modes import Mode, Tier

from ....daemon_process import PATIENCE_S, Daemon, until
from ..conftest import Ctl
from ..documents import CARD, GIB, MIB

EXAMPLE = Path(__file__).parents[4] / "docs" / "drill.txt"
PLAY = "0 card-1 50% 80GiB\n0.1 card-1 97% 80GiB\n0.2 card-1 50% 80GiB\n0.3 card-1 50% 80GiB\n"
LONG = "0 card-1 97% 80GiB\n3600 card-1 50% 80GiB\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "drill"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "normal -"),
        ({"before": Mode.PRESSURE}, "pressure -> normal -"),
        (
            {"offload_entries": 1200, "offload_bytes": 300 * MIB, "drop_entries": 2},
            "normal offload 1,200 (300 MiB), drop 2 (0 B)",
        ),
        ({"refuses": True}, "normal registrations refused"),
        ({"refuses": True, "gauge": "host", "shrink_bytes": 2 * GIB}, "normal ring gives back 2.00 GiB, puts refused"),
    ],
)
def test_a_line_says_which_mode_follows_and_what_would_go(told: dict[str, object], said: str) -> None:
    told = dict(told)
    gauge, refuses = str(told.pop("gauge", CARD)), bool(told.pop("refuses", False))
    before: Mode = told.pop("before", Mode.NORMAL)  # type: ignore[assignment]
    tier = Tier.HOST if gauge == "host" else Tier.DEVICE
    state = TierState(gauge, tier, Mode.NORMAL, 78 * GIB, 80 * GIB, refuses)
    line = drill.line(DrillReading(12.5, CARD, 78 * GIB, 80 * GIB), Drilled(1, before, state, **told))  # type: ignore[arg-type]
    assert " ".join(line.split()) == f"12.5s {CARD} 78.0 GiB 97.5 % {said}"


@pytest.mark.parametrize(
    ("there", "act", "said"),
    [
        (["host", "a", "c"], False, "Asking only: 2 made-up readings of a, host, 1m00s. Nothing changes"),
        (["host", "a"], True, "ACTING: 2 made-up readings of a, host, 1m00s. Entries are evicted"),
        (["b", "a"], False, "readings of a, host (no gauge here is called host; there is b, a), "),
        ([], False, "(no gauge here is called a, host; there is none), "),
    ],
)
def test_a_drill_says_whether_it_acts_and_which_gauges_there_are(there: list[str], act: bool, said: str) -> None:
    readings = [DrillReading(0, "a", 1, 2), DrillReading(120, "host", 1, 2)]
    assert said in drill.heading(readings, there, act=act, speed=2.0)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"0 card 50% 80GiB\nx card 50% 80GiB\n", "line 2"),
        (b"0 card 50% 80GiB\n\n# fine\n1 card much 80GiB\n", "line 4"),
        (b"5 card 50% 80GiB\n1 card 50% 80GiB\n", "line 2"),
        (b"0 card 50%\n", "line 1"),
        (b"# nothing\n", "no line"),
        (b"", "no line"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (None, "No such file"),
    ],
)
def test_garbage_is_refused_with_its_line_before_anything_is_played(
    alone: Ctl, file: Path, text: bytes | None, named: str
) -> None:
    if text is not None:
        file.write_bytes(text)
    told = alone("drill", "--act", str(file), code=2)
    assert named in told.err
    assert told.out == ""


def test_without_a_daemon_nothing_is_said_to_be_played(alone: Ctl) -> None:
    told = alone("drill", str(EXAMPLE), code=1)
    assert "systemctl start tensord" in told.err
    assert told.out == ""


def drilled_gauges(daemon: Daemon) -> list[str]:
    return [gauge["gauge"] for gauge in daemon.status()["governor"]["gauges"] if gauge["source"] == "drill"]


def test_a_drill_that_only_asks_shows_the_modes_and_changes_nothing(daemon: Daemon, ctl: Ctl, file: Path) -> None:
    file.write_text(PLAY)
    told = ctl("drill", "--speed", "100", str(file)).out.splitlines()
    assert told[0].startswith("Asking only: 4 made-up readings of card-1 (no gauge here is called card-1; there is ")
    lines = [line for line in told if "card-1" in line][1:]
    assert [" ".join(line.split()[6:]) for line in lines] == [
        "relaxed -",
        "relaxed -> emergency registrations refused",
        "emergency registrations refused",
        "emergency -> relaxed -",
    ]
    governor = daemon.status()["governor"]
    assert not drilled_gauges(daemon)
    assert not [each for each in governor["transitions"] if each["gauge"] == "card-1"]


def test_a_drill_that_acts_stands_in_the_gauge_s_place_until_it_ends(daemon: Daemon, ctl: Ctl, file: Path) -> None:
    file.write_text(LONG)
    with ctl.spawn("drill", "--act", str(file)) as playing:
        assert playing.stdout is not None
        assert playing.stdout.readline().startswith("ACTING: ")
        until(lambda: drilled_gauges(daemon) == ["card-1"], "the reading took its place")
        assert "drills gauge 'card-1'" in ctl("drill", "--act", str(file), code=1).err, "a second one is refused"
        (shown,) = (line for line in ctl("status").out.splitlines() if "card-1" in line)
        assert "emergency" in shown
        playing.send_signal(signal.SIGINT)
        assert playing.wait(PATIENCE_S) == 130
    until(lambda: not drilled_gauges(daemon), "the gauge is its own again")
    # The host's own gauge may change its mode meanwhile, on a machine that is busy with others.
    transitions = [each for each in daemon.status()["governor"]["transitions"] if each["gauge"] == "card-1"]
    assert [each["mode"] for each in transitions] == ["emergency", "relaxed"]


def test_a_drill_ends_with_the_daemon(daemon: Daemon, ctl: Ctl, file: Path) -> None:
    file.write_text("".join(f"{at / 100} card-1 50% 80GiB\n" for at in range(10_000)))
    with ctl.spawn("drill", str(file)) as playing:
        assert playing.stdout is not None
        while not playing.stdout.readline().startswith("0.0s"):
            pass
        daemon.terminate()
        _, err = playing.communicate(timeout=PATIENCE_S)
        assert playing.returncode == 1
        assert err.startswith("tensorctl: ")
        assert err.count("\n") == 1


def test_the_example_goes_through_all_levels_and_back() -> None:
    state = TierMode(Thresholds())
    seen = [state.level]
    for reading in read_drill(EXAMPLE.read_text()):
        state.sample(reading.used_bytes / reading.total_bytes)
        if state.level is not seen[-1]:
            seen.append(state.level)
    up = [Mode.RELAXED, Mode.NORMAL, Mode.PRESSURE, Mode.CRITICAL, Mode.EMERGENCY]
    assert seen == [*up, *reversed(up[:-1])]
