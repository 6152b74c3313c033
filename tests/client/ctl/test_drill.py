from __future__ import annotations

from pathlib import Path

import pytest

from tensord.client.ctl import drill
from tensord.client.ctl.tables import WIDTH
from tensord.daemon.policy.modes import Thresholds, TierMode
from tensord.ipc.gaugefile import Reading, read_drill
from tensord.ipc.messages import Drilled, TierState
from tensord.ipc.modes import Mode, Tier

from .conftest import Ctl
from .documents import CARD, GIB, MIB

EXAMPLE = Path(__file__).parents[3] / "docs" / "drill.txt"
READING = Reading(12.5, CARD, 78 * GIB, 80 * GIB)


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


def test_what_is_refused_is_named() -> None:
    assert drill.consequences(drilled(Mode.CRITICAL, Mode.EMERGENCY, refuses=True)) == "registrations refused"
    host = drilled(Mode.CRITICAL, Mode.EMERGENCY, refuses=True, gauge="host", shrink_bytes=2 * GIB)
    assert drill.consequences(host) == "ring gives back 2.00 GiB, puts refused"


def test_lines_fit_100_columns() -> None:
    told = drilled(Mode.WORKFLOW_AWARE, Mode.EMERGENCY, offload_entries=1234, offload_bytes=9 * GIB)
    assert len(drill.line(READING, told)) <= WIDTH


def test_it_says_whether_it_acts() -> None:
    readings = [Reading(0, CARD, 1, 2), Reading(120, "host", 1, 2)]
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
    assert "no text" in alone("drill", str(tmp_path / "binary"), code=2).err
    assert "No such file" in alone("drill", str(tmp_path / "none"), code=2).err
    assert "directory" in alone("drill", str(tmp_path), code=2).err


def test_without_a_daemon_nothing_is_said_to_be_played(alone: Ctl) -> None:
    told = alone("drill", str(EXAMPLE), code=1)
    assert "systemctl start tensord" in told.err
    assert told.out == ""


def test_the_example_goes_through_all_levels_and_back() -> None:
    state = TierMode(Thresholds())
    seen = [state.level]
    for reading in read_drill(EXAMPLE.read_text()):
        state.sample(reading.used_bytes / reading.total_bytes)
        if state.level is not seen[-1]:
            seen.append(state.level)
    up = [Mode.RELAXED, Mode.NORMAL, Mode.PRESSURE, Mode.CRITICAL, Mode.EMERGENCY]
    assert seen == [*up, *reversed(up[:-1])]
