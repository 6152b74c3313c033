"""Each check, of facts that are written down: what it finds, and what it says to do."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tensord.client.ctl.doctor import access, memory, software
from tensord.client.ctl.doctor.access import Caller, FileStat, Serving
from tensord.client.ctl.doctor.finding import Finding, Level, fail, findings_text, ok, warn
from tensord.client.ctl.doctor.memory import RingRoom
from tensord.client.ctl.orders.leftovers import Leftover, LeftoverSegment
from tensord.client.ctl.output import WIDTH
from tensord.errors import DaemonUnavailable, LimitReached, SocketForbidden
from tensord.shm.ring.cgroups import Cgroup
from tensord.shm.ring.layout import LANE_BYTES

from ..documents import CARD, gauge

OK, WARN, FAIL = Level
MIB, GIB = 1 << 20, 1 << 30

PATH = Path("/run/tensord/control.sock")
FOLDER = FileStat(PATH.parent, stat.S_IFDIR | 0o755, 100, 100, "tensord")
SOCKET = FileStat(PATH, stat.S_IFSOCK | 0o660, 100, 100, "tensord")
MEMBER = Caller(1000, "ann", frozenset({1000, 100}), frozenset({"ann", "tensord"}))
STRANGER = Caller(1001, "bob", frozenset({1001}), frozenset({"bob"}))


def of_mode(node: FileStat, mode: int) -> FileStat:
    return node._replace(mode=stat.S_IFMT(node.mode) | mode)


@pytest.mark.parametrize(
    ("changed", "level", "said"),
    [
        ({}, OK, "ann may use it"),
        ({"caller": Caller(100, "tensord", frozenset())}, OK, ""),
        ({"caller": Caller(0, "root", frozenset())}, OK, ""),
        ({"caller": STRANGER}, FAIL, "-> usermod -aG tensord bob"),
        ({"caller": MEMBER._replace(gids=frozenset({1000}))}, FAIL, "-> log in again"),
        # Joining a group is not advised where the group has no access either.
        ({"caller": STRANGER, "node": of_mode(SOCKET, 0o600)}, FAIL, "-> socket_mode = 0660 and socket_group"),
        ({"caller": STRANGER, "node": SOCKET._replace(uid=0, gid=0, group="root")}, FAIL, "-> socket_mode = 0660"),
        # An owner without the right is not helped by everybody's.
        ({"what": "status", "node": of_mode(SOCKET, 0o006)._replace(uid=1000)}, FAIL, "ann may not use it"),
        ({"node": of_mode(SOCKET, 0o666)}, WARN, "every user of this host may read and write every entry"),
        ({"what": "status", "node": of_mode(SOCKET, 0o666)}, OK, ""),
        ({"folder": of_mode(FOLDER, 0o700), "node": None}, FAIL, "ann may not enter /run/tensord (mode 0700, uid 100"),
        ({"folder": of_mode(FOLDER, 0o777)}, FAIL, "every user may write to /run/tensord"),
        ({"folder": of_mode(FOLDER, 0o1777)}, OK, ""),
        ({"folder": None, "node": None}, FAIL, "/run/tensord is not there"),
        ({"node": None}, FAIL, "control.sock is not there"),
        ({"node": SOCKET._replace(mode=stat.S_IFREG | 0o660)}, FAIL, "is not a socket"),
        ({"dead": True}, FAIL, "nobody serves it"),
        ({"node": None, "without_file": [Serving("a", 7)]}, FAIL, "is not there; a daemon of instance a lives, pid 7"),
    ],
)
def test_a_socket_is_one_that_the_caller_may_use(changed: dict[str, Any], level: Level, said: str) -> None:
    usual = {"what": "control", "path": PATH, "node": SOCKET, "folder": FOLDER, "caller": MEMBER}
    found = access.socket(**{**usual, **changed})
    assert found.level is level
    assert said in f"{found.text} -> {found.remedy}"


@pytest.mark.parametrize(
    ("error", "level", "remedy"),
    [
        (None, OK, ""),
        (DaemonUnavailable("no daemon at /x"), FAIL, "journalctl"),
        (LimitReached("status_connections_max is 16"), FAIL, "the daemon runs; close connections"),
        (SocketForbidden("no"), FAIL, "above"),
    ],
)
def test_a_socket_that_does_not_answer_fails_with_the_reason(error: Any, level: Level, remedy: str) -> None:
    found = access.reachable("status", error)
    assert (found.level, remedy in found.remedy) == (level, True)
    assert error is None or found.text == str(error)


@pytest.mark.parametrize(
    ("text", "removes"),
    [
        ("", True),
        ("[Login]\n#RemoveIPC=no\n", True),
        ("[Login]\nRemoveIPC = off\n", False),
        ("[Login]\nRemoveIPC=no\n\n# /etc/a.conf\n[Login]\nKillUserProcesses=yes\n", False),
        ("[Login]\nRemoveIPC=no\n\n# /etc/a.conf\n[Login]\nRemoveIPC=yes\n", True),
    ],
)
def test_logind_s_last_word_counts_and_without_one_it_deletes(text: str, removes: bool) -> None:
    assert access.removes_ipc(text) is removes


def test_only_a_user_s_own_daemon_loses_its_memory_at_logout() -> None:
    usual = {"uid": 1000, "system_uid_max": 999, "has_logind": True, "lingers": False, "removes": True}
    assert access.logout(**usual).level is WARN  # type: ignore[arg-type]
    for changed in ({"uid": 999}, {"uid": 0}, {"has_logind": False}, {"lingers": True}, {"removes": False}):
        assert access.logout(**{**usual, **changed}).level is OK  # type: ignore[arg-type]


RING = LeftoverSegment("tensord.a.ring", 3 << 20, 7)


@pytest.mark.parametrize(
    ("found", "answers", "level", "said"),
    [
        (Leftover("a", (RING,), True), None, OK, "no shared memory without"),
        (Leftover("a", (RING,), False), None, WARN, "3.00 MiB in 1 segment of uid 7, and no daemon serves it"),
        (Leftover("a", (RING,), False), None, WARN, "`tensorctl purge --instance a`"),
        (Leftover("a", (RING,), None), None, OK, "only that user"),
        (Leftover("a", (RING,), None), "a", OK, "no shared memory without"),
    ],
)
def test_memory_that_no_daemon_serves_is_named(found: Leftover, answers: str | None, level: Level, said: str) -> None:
    (finding,) = access.leftover([found], answers)
    assert finding.level is level
    assert said in finding.text + finding.remedy
    assert "tensord.a.ring" not in finding.text


ROOM = RingRoom(4 * GIB, 0, 16 * GIB, 10 * GIB, 20 * GIB, 32 * GIB)
FULL = ROOM._replace(ready_bytes=4 * GIB)
WIDE, TIGHT = Cgroup("/wide", 30 * GIB, GIB), Cgroup("/wide/tight", 5 * GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("found", "level", "said"),
    [
        (memory.shm(ROOM), OK, "10.0 GiB free; the ring of 4.00 GiB fits"),
        (memory.shm(ROOM._replace(shm_total_bytes=64 * MIB, shm_free_bytes=64 * MIB)), FAIL, "size=4G"),
        (memory.shm(ROOM._replace(shm_problem="/dev/shm is mounted read-only")), FAIL, "remount,rw"),
        # Memory that the ring already has is not required again.
        (memory.shm(FULL._replace(shm_total_bytes=4 * GIB, shm_free_bytes=16 * MIB)), OK, "has its memory"),
        (memory.shm(FULL._replace(ready_bytes=3 * GIB, shm_free_bytes=16 * MIB)), FAIL, "needs 1.00 GiB more"),
        (memory.shm(FULL._replace(shm_free_bytes=LANE_BYTES - 1)), FAIL, "room for 0 more"),
        (memory.shm(FULL._replace(shm_free_bytes=LANE_BYTES)), WARN, "tensorctl limit"),
        (memory.available(ROOM), OK, "20.0 GiB of 32.0 GiB are available"),
        (memory.available(ROOM._replace(available_bytes=3 * GIB)), FAIL, "smaller ring_bytes"),
        (memory.available(ROOM._replace(available_bytes=5 * GIB)), WARN, "1.00 GiB are left"),
        (memory.available(ROOM._replace(available_bytes=6 * GIB)), OK, ""),
        (memory.available(FULL._replace(available_bytes=3 * GIB)), OK, ""),
        (memory.cgroup(ROOM), OK, "no visible memory limit"),
        (memory.cgroup(ROOM._replace(cgroups=(WIDE,))), OK, "/wide"),
        (memory.cgroup(ROOM._replace(cgroups=(TIGHT, WIDE))), FAIL, "/wide/tight may have"),
        (memory.cgroup(ROOM._replace(cgroups=(WIDE, replace(TIGHT, used_bytes=GIB)))), WARN, "MemoryMax"),
        (memory.membarrier(plain=True, expedited=True, in_use=None), OK, "is offered"),
        (memory.membarrier(plain=True, expedited=True, in_use="expedited"), OK, "in use"),
        (memory.membarrier(plain=True, expedited=True, in_use="global"), WARN, "tensorctl clients"),
        (memory.membarrier(plain=True, expedited=False, in_use=None), WARN, "8 to 16 ms"),
        (memory.membarrier(plain=False, expedited=True, in_use=None), OK, ""),
        (memory.membarrier(plain=False, expedited=False, in_use=None), FAIL, "seccomp"),
    ],
)
def test_memory_must_hold_the_ring_and_something_beside_it(found: Finding, level: Level, said: str) -> None:
    assert found.level is level
    assert said in found.text + found.remedy
    assert bool(found.remedy) == (level is not OK)


HOST, DEVICE = gauge("host", 1, 2, "normal"), gauge(CARD, 1, 2, "normal")
UNSTORABLE: Mapping[str, Any] = {"namespace": "ab", "count": 3, "ago_s": 61.0, "code": "ObjectTooLarge", "text": "big"}


@pytest.mark.parametrize(
    ("found", "level", "said"),
    [
        (software.versions("1.0", "1.0", 1, 1), OK, "tensorctl 1.0 of protocol 1, daemon 1.0 of protocol 1"),
        (software.versions("1.1", "1.0", 1, 1), WARN, "install the same version"),
        (software.versions("1.1", "1.0", 2, 1), FAIL, "install the same version"),
        (software.clients("1.0", ["1.0", "1.0"]), OK, "2 connected, all of version 1.0"),
        (software.clients("1.0", ["1.0", "", "0.9"]), WARN, "3 connected, of which 1 of 0.9, 1 of an older release"),
        (software.configuration(None, [], served=False), OK, ""),
        (software.configuration(None, ["TENSORD_PORT"], served=False), WARN, "TENSORD_PORT"),
        (software.configuration("ring_bites", [], served=False), FAIL, "ring_bites"),
        (software.configuration("ring_bites", [], served=True), WARN, "keeps its present configuration"),
        (software.health({"problems": [], "notices": []})[0], OK, "no problem"),
        (software.health({"problems": ["the ring is small"], "notices": []})[0], WARN, "the ring is small"),
        (software.health({"problems": [], "notices": ["a notice"]})[0], WARN, "a notice"),
        (software.gauges([HOST, DEVICE], {"nvidia": True}), OK, f"host by cgroup, {CARD} by nvidia"),
        (software.gauges([HOST], {"nvidia": False}), OK, ""),
        (software.gauges([HOST, {**DEVICE, "source": "file"}], {}), WARN, "by file: no measurement"),
        (software.gauges([HOST], {"nvidia": False, "amd": True}), WARN, "tensord[amd]"),
        (software.gauges([], {}), WARN, "gauges.host = auto"),
        (software.values([]), OK, ""),
        (software.values([{**UNSTORABLE, "ago_s": 4000.0}]), OK, ""),
        (software.values([UNSTORABLE]), WARN, "namespace ab: values 3, the last 1m01s ago: ObjectTooLarge: big"),
    ],
)
def test_what_the_daemon_and_the_programs_tell_is_judged(found: Finding, level: Level, said: str) -> None:
    assert found.level is level
    assert said in found.text + found.remedy
    assert bool(found.remedy) == (level is not OK)


def test_findings_fit_100_columns_and_are_summed_up() -> None:
    lines = findings_text([ok("a", "x"), warn("long name", "word " * 40, "do " * 50), fail("c", "y", "z")]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0] == "OK    a          x"
    assert lines[-1] == "1 OK, 1 WARN, 1 FAIL"
    assert any(line.strip() == "-> z" for line in lines)
