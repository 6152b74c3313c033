"""Each check, of facts that are written down: what it finds, and what it says to do."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tensord.client.ctl.doctor import checks
from tensord.client.ctl.doctor.checks import RingRoom, Serving
from tensord.client.ctl.doctor.finding import Finding, Level, fail, findings_text, ok, warn
from tensord.client.ctl.orders.leftovers import Leftover
from tensord.client.ctl.output import WIDTH
from tensord.errors import DaemonUnavailable
from tensord.shm.ring.cgroups import Cgroup

from ..documents import CARD, gauge

OK, WARN, FAIL = Level
MIB, GIB = 1 << 20, 1 << 30

PATH = Path("/run/tensord/control.sock")


@pytest.mark.parametrize(
    ("changed", "level", "said"),
    [
        ({}, OK, "the daemon answers at /run/tensord/control.sock"),
        ({"error": DaemonUnavailable("no daemon at /x")}, FAIL, "no daemon at /x -> `systemctl status tensord`"),
        ({"mode": 0o666}, WARN, "every user of this host may read and write every entry"),
        ({"what": "status", "mode": 0o666}, OK, ""),
        ({"folder_mode": 0o777}, FAIL, "every user may write to /run/tensord"),
        ({"folder_mode": stat.S_ISVTX | 0o777}, OK, ""),
        ({"without_file": [Serving("a", 7)]}, FAIL, "a daemon of instance a lives, pid 7: its socket is gone"),
    ],
)
def test_a_socket_is_one_at_which_the_daemon_answers(changed: dict[str, Any], level: Level, said: str) -> None:
    usual = {"what": "control", "path": PATH, "folder_mode": 0o755, "mode": 0o660, "error": None}
    found = checks.socket(**{**usual, **changed})
    assert found.level is level
    assert said in f"{found.text} -> {found.remedy}"


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("", OK),  # no logind
        ("[Login]\n#RemoveIPC=no\n", WARN),
        ("[Login]\nRemoveIPC = off\n", OK),
        ("[Login]\nRemoveIPC=no\n\n# /etc/a.conf\n[Login]\nKillUserProcesses=yes\n", OK),
        ("[Login]\nRemoveIPC=no\n\n# /etc/a.conf\n[Login]\nRemoveIPC=yes\n", WARN),
    ],
)
def test_only_a_user_s_own_daemon_loses_its_memory_at_logout_and_logind_s_last_word_counts(
    text: str, level: Level
) -> None:
    assert checks.logout(1000, text, lingers=False).level is level
    assert checks.logout(1000, text, lingers=True).level is OK
    assert checks.logout(999, text, lingers=False).level is OK


RING = {"tensord.a.ring": 3 << 20}


@pytest.mark.parametrize(
    ("found", "answers", "level", "said"),
    [
        (Leftover("a", RING, 7, True), None, OK, "no shared memory without"),
        (Leftover("a", RING, 7, False), None, WARN, "3.00 MiB in 1 segment of uid 7, and no daemon serves it"),
        (Leftover("a", RING, 7, False), None, WARN, "`tensorctl purge --instance a`"),
        (Leftover("a", RING, 7, None), None, OK, "only that user"),
        (Leftover("a", RING, 7, None), "a", OK, "no shared memory without"),
    ],
)
def test_memory_that_no_daemon_serves_is_named(found: Leftover, answers: str | None, level: Level, said: str) -> None:
    (finding,) = checks.leftover([found], answers)
    assert finding.level is level
    assert said in finding.text + finding.remedy
    assert "tensord.a.ring" not in finding.text


ROOM = RingRoom(4 * GIB, 0, 16 * GIB, 10 * GIB, 20 * GIB, 32 * GIB)
FULL = ROOM._replace(ready_bytes=4 * GIB)
WIDE, TIGHT = Cgroup("/wide", 30 * GIB, GIB), Cgroup("/wide/tight", 5 * GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("check", "room", "level", "said"),
    [
        ("/dev/shm", ROOM, OK, "10.0 GiB free; the ring of 4.00 GiB fits"),
        ("/dev/shm", ROOM._replace(shm_total_bytes=64 * MIB, shm_free_bytes=64 * MIB), FAIL, "size=4G"),
        ("/dev/shm", ROOM._replace(shm_problem="/dev/shm is mounted read-only"), FAIL, "remount,rw"),
        # Memory that the ring already has is not required again.
        ("/dev/shm", FULL._replace(shm_total_bytes=4 * GIB, shm_free_bytes=16 * MIB), OK, "has its memory"),
        ("/dev/shm", FULL._replace(ready_bytes=3 * GIB, shm_free_bytes=16 * MIB), FAIL, "needs 1.00 GiB more"),
        ("memory", ROOM, OK, "20.0 GiB of 32.0 GiB are available"),
        ("memory", ROOM._replace(available_bytes=3 * GIB), FAIL, "smaller ring_bytes"),
        ("memory", ROOM._replace(available_bytes=5 * GIB), WARN, "1.00 GiB are left"),
        ("memory", ROOM._replace(available_bytes=6 * GIB), OK, ""),
        ("memory", FULL._replace(available_bytes=3 * GIB), OK, ""),
        ("cgroup", ROOM._replace(cgroups=(WIDE,)), OK, "/wide"),
        ("cgroup", ROOM._replace(cgroups=(TIGHT, WIDE)), FAIL, "/wide/tight may have"),
        ("cgroup", ROOM._replace(cgroups=(WIDE, replace(TIGHT, used_bytes=GIB))), WARN, "MemoryMax"),
    ],
)
def test_memory_must_hold_the_ring_and_something_beside_it(check: str, room: RingRoom, level: Level, said: str) -> None:
    judge({each.check: each for each in checks.memory(room)}[check], level, said)


HOST, DEVICE = gauge("host", 1, 2, "normal"), gauge(CARD, 1, 2, "normal")


@pytest.mark.parametrize(
    ("found", "level", "said"),
    [
        (checks.membarrier(plain=True, expedited=True, in_use=None), OK, "is offered"),
        (checks.membarrier(plain=True, expedited=True, in_use="expedited"), OK, "in use"),
        (checks.membarrier(plain=True, expedited=True, in_use="global"), WARN, "tensorctl clients"),
        (checks.membarrier(plain=True, expedited=False, in_use=None), WARN, "8 to 16 ms"),
        (checks.membarrier(plain=False, expedited=False, in_use=None), FAIL, "seccomp"),
        (checks.versions("1.0", "1.0", 1, 1), OK, "tensorctl 1.0 of protocol 1, daemon 1.0 of protocol 1"),
        (checks.versions("1.1", "1.0", 1, 1), WARN, "install the same version"),
        (checks.versions("1.1", "1.0", 2, 1), FAIL, "install the same version"),
        (checks.configuration(None, [], served=False), OK, ""),
        (checks.configuration(None, ["TENSORD_PORT"], served=False), WARN, "TENSORD_PORT"),
        (checks.configuration("ring_bites", [], served=False), FAIL, "ring_bites"),
        (checks.configuration("ring_bites", [], served=True), WARN, "keeps its present configuration"),
        (checks.health({"problems": [], "notices": []})[0], OK, "no problem"),
        (checks.health({"problems": ["the ring is small"], "notices": []})[0], WARN, "the ring is small"),
        (checks.health({"problems": [], "notices": ["a notice"]})[0], WARN, "a notice"),
        (checks.gauges([HOST, DEVICE], {"nvidia": True}), OK, f"host by cgroup, {CARD} by nvidia"),
        (checks.gauges([HOST], {"nvidia": False}), OK, ""),
        (checks.gauges([HOST], {"nvidia": False, "amd": True}), WARN, "tensord[amd]"),
    ],
)
def test_what_the_daemon_and_the_programs_tell_is_judged(found: Finding, level: Level, said: str) -> None:
    judge(found, level, said)


def judge(found: Finding, level: Level, said: str) -> None:
    assert found.level is level
    assert said in found.text + found.remedy
    assert bool(found.remedy) == (level is not OK)


def test_findings_fit_100_columns_and_are_summed_up() -> None:
    lines = findings_text([ok("a", "x"), warn("long name", "word " * 40, "do " * 50), fail("c", "y", "z")]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0] == "OK    a          x"
    assert lines[-1] == "1 OK, 1 WARN, 1 FAIL"
    assert any(line.strip() == "-> z" for line in lines)
