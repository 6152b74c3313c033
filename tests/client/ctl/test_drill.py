from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest

from tensord.client.ctl import drill
from tensord.client.ctl.tables import WIDTH
from tensord.daemon.policy.modes import Thresholds, TierMode
from tensord.ipc.gaugefile import DrillReading, read_drill
from tensord.ipc.messages import Drilled, TierState
from tensord.ipc.modes import Mode, Tier

from ...daemon_process import PATIENCE_S, Daemon, until
from .conftest import Ctl
from .documents import CARD, GIB, MIB

EXAMPLE = Path(__file__).parents[3] / "docs" / "drill.txt"
READING = DrillReading(12.5, CARD, 78 * GIB, 80 * GIB)


def drilled(before: Mode, mode: Mode, *, refuses: bool = False, gauge: str = CARD, **more: int) -> Drilled:
    tier = Tier.HOST if gauge == "host" else Tier.DEVICE
    return Drilled(1, before, TierState(gauge, tier, mode, 78 * GIB, 80 * GIB, refuses), **more)


def test_a_line_says_which_mode_follows_and_what_would_go() -> None:
    told = drilled(Mode.PRESSURE, Mode.CRITICAL, offload_entries=1200, offload_bytes=300 * MIB, drop_entries=2)
    line = drill.line(READING, told)
    assert line.split()[:5] == ["12.5s", CARD, "78.0", "GiB", "97.5"]
    assert "pressure -> critical" in line
    assert line.endswith("offload 1,200 (300 MiB), drop 2 (0 B)")


def test_a_line_without_consequences_says_so() -> None:
    line = drill.line(READING, drilled(Mode.NORMAL, Mode.NORMAL))
    assert line.split()[-2:] == ["normal", "-"]


def test_a_refused_drill_names_the_reason() -> None:
    assert drill.consequences(drilled(Mode.CRITICAL, Mode.EMERGENCY, refuses=True)) == "registrations refused"
    host = drilled(Mode.CRITICAL, Mode.EMERGENCY, refuses=True, gauge="host", shrink_bytes=2 * GIB)
    assert drill.consequences(host) == "ring gives back 2.00 GiB, puts refused"


def test_lines_fit_100_columns() -> None:
    told = drilled(Mode.WORKFLOW_AWARE, Mode.EMERGENCY, offload_entries=1234, offload_bytes=9 * GIB)
    assert len(drill.line(READING, told)) <= WIDTH


def test_a_drill_says_whether_it_acts() -> None:
    readings = [DrillReading(0, CARD, 1, 2), DrillReading(120, "host", 1, 2)]
    asking = drill.heading(readings, act=False, speed=2.0)
    assert asking.startswith(f"Asking only: 2 made-up readings of {CARD}, host, 1m00s. Nothing changes")
    acting = drill.heading(readings, act=True, speed=1.0)
    assert acting.startswith(f"ACTING: 2 made-up readings replace {CARD}, host for 2m00s.")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0 card 50% 80GiB\nx card 50% 80GiB\n", "line 2"),
        ("0 card 50% 80GiB\n\n# fine\n1 card much 80GiB\n", "line 4"),
        ("5 card 50% 80GiB\n1 card 50% 80GiB\n", "line 2"),
        ("0 card 50%\n", "line 1"),
        ("# nothing\n", "no line"),
        ("", "no line"),
    ],
)
def test_garbage_is_refused_with_its_line_before_anything_is_played(
    alone: Ctl, tmp_path: Path, text: str, named: str
) -> None:
    file = tmp_path / "drill"
    file.write_text(text)
    told = alone("drill", "--act", str(file), code=2)
    assert named in told.err
    assert told.out == ""


def test_a_file_that_is_no_text_or_not_there_is_refused(alone: Ctl, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in alone("drill", str(tmp_path / "binary"), code=2).err
    assert "No such file" in alone("drill", str(tmp_path / "none"), code=2).err
    assert "directory" in alone("drill", str(tmp_path), code=2).err


def test_a_speed_that_is_no_number_and_an_empty_path_are_refused_by_name(alone: Ctl) -> None:
    for speed in ("nan", "inf", "-1"):
        assert speed in alone("drill", "--speed", speed, str(EXAMPLE), code=2).err
    assert "'' is not a path" in alone("drill", "", code=2).err


def test_without_a_daemon_nothing_is_said_to_be_played(alone: Ctl) -> None:
    told = alone("drill", str(EXAMPLE), code=1)
    assert "systemctl start tensord" in told.err
    assert told.out == ""


PLAY = "0 card-1 50% 80GiB\n0.1 card-1 97% 80GiB\n0.2 card-1 50% 80GiB\n0.3 card-1 50% 80GiB\n"


def drilled_gauges(daemon: Daemon) -> list[str]:
    return [gauge["gauge"] for gauge in daemon.status()["governor"]["gauges"] if gauge["source"] == "drill"]


def test_a_drill_that_only_asks_shows_the_modes_and_changes_nothing(daemon: Daemon, ctl: Ctl, tmp_path: Path) -> None:
    file = tmp_path / "drill"
    file.write_text(PLAY)
    told = ctl("drill", "--speed", "100", str(file)).out.splitlines()
    assert told[0].startswith("Asking only: 4 made-up readings of card-1")
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


def test_a_drill_that_acts_stands_in_the_gauge_s_place_until_it_ends(daemon: Daemon, ctl: Ctl, tmp_path: Path) -> None:
    file = tmp_path / "drill"
    file.write_text("0 card-1 97% 80GiB\n3600 card-1 50% 80GiB\n")
    with ctl.spawn("drill", "--act", str(file)) as playing:
        assert playing.stdout is not None
        assert playing.stdout.readline().startswith("ACTING: ")
        until(lambda: drilled_gauges(daemon) == ["card-1"], "the reading took its place")
        (shown,) = (line for line in ctl("status").out.splitlines() if "card-1" in line)
        assert "emergency" in shown
        playing.send_signal(signal.SIGINT)
        assert playing.wait(PATIENCE_S) == 130
    until(lambda: not drilled_gauges(daemon), "the gauge is its own again")
    # The host's own gauge may change its mode meanwhile, on a machine that is busy with others.
    transitions = [each for each in daemon.status()["governor"]["transitions"] if each["gauge"] == "card-1"]
    assert [each["mode"] for each in transitions] == ["emergency", "relaxed"]


def test_a_second_drill_of_a_gauge_is_refused(daemon: Daemon, ctl: Ctl, tmp_path: Path) -> None:
    file = tmp_path / "drill"
    file.write_text("0 card-1 97% 80GiB\n3600 card-1 50% 80GiB\n")
    with ctl.spawn("drill", "--act", str(file)) as playing:
        until(lambda: drilled_gauges(daemon), "the first took its place")
        assert "drills gauge 'card-1'" in ctl("drill", "--act", str(file), code=1).err
        playing.kill()


def test_a_drill_ends_with_the_daemon(daemon: Daemon, ctl: Ctl, tmp_path: Path) -> None:
    file = tmp_path / "drill"
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


def test_a_drill_can_come_from_standard_input(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PLAY))
    assert "relaxed -> emergency" in ctl("drill", "--speed", "1000", "-").out


def test_the_example_goes_through_all_levels_and_back() -> None:
    state = TierMode(Thresholds())
    seen = [state.level]
    for reading in read_drill(EXAMPLE.read_text()):
        state.sample(reading.used_bytes / reading.total_bytes)
        if state.level is not seen[-1]:
            seen.append(state.level)
    up = [Mode.RELAXED, Mode.NORMAL, Mode.PRESSURE, Mode.CRITICAL, Mode.EMERGENCY]
    assert seen == [*up, *reversed(up[:-1])]


def test_a_drill_of_a_gauge_that_the_daemon_has_not_says_so_and_which_it_has(ctl: Ctl, tmp_path: Path) -> None:
    file = tmp_path / "drill"
    file.write_text("0 card-1 50% 80GiB\n")
    assert "(no gauge here is called card-1; there is " in ctl("drill", str(file)).out.splitlines()[0]


def test_gauges_that_are_known_and_those_that_are_not_are_told_apart() -> None:
    readings = [DrillReading(0.0, name, 1, 2) for name in ("a", "b", "host")]
    for there, told in (
        (["host", "a", "b", "c"], "readings of a, b, host, "),
        (["a", "host"], "readings of a, b, host (no gauge here is called b; there is a, host), "),
        ([], "(no gauge here is called a, b, host; there is none), "),
    ):
        assert told in drill.heading(readings, act=False, speed=1.0, there=there)
