"""Each check, of facts that are written down, and `tensorctl doctor` beside real daemons."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tensord.client.ctl import doctor
from tensord.client.ctl.doctor import Finding, Level, fail, findings_text, ok, warn
from tensord.client.ctl.output import WIDTH
from tensord.shm.ring import segments

from ...daemon_process import Daemon
from .conftest import Ctl
from .documents import CARD, gauge

OK, WARN, FAIL = Level
GIB = 1 << 30


@pytest.mark.parametrize(
    ("what", "mode", "level", "said"),
    [
        ("control", 0o660, OK, "the daemon answers at "),
        ("control", 0o666, WARN, "every user of this host may read and write every entry"),
        ("status", 0o666, OK, ""),
    ],
)
def test_a_control_socket_is_not_for_everybody(tmp_path: Path, what: str, mode: int, level: Level, said: str) -> None:
    path = tmp_path / "a.sock"
    path.touch()
    path.chmod(mode)
    judge(doctor.socket(what, path, lambda: None), level, said)


def test_only_a_user_s_own_daemon_loses_its_memory_at_logout_and_logind_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for uid, removes, lingers in itertools.product((999, 1000), (False, True), (False, True)):
        lost = (uid, removes, lingers) == (1000, True, False)
        assert doctor.logout(uid, removes=removes, lingers=lingers).level is (WARN if lost else OK)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not doctor.removes_ipc()
    (tmp_path / "busctl").write_text("#!/bin/sh\necho b true\n")
    (tmp_path / "busctl").chmod(0o755)
    assert doctor.removes_ipc()


def test_memory_that_no_file_can_be_made_in_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(segments, "SHM_FOLDER", tmp_path / "absent")
    judge(doctor.memory(4 * GIB, 0), FAIL, "remount,rw")


HOST, DEVICE = gauge("host", 1, 2, "normal"), gauge(CARD, 1, 2, "normal")


@pytest.mark.parametrize(
    ("found", "level", "said"),
    [
        (doctor.membarrier(plain=True, expedited=True, in_use=None), OK, "is offered"),
        (doctor.membarrier(plain=True, expedited=True, in_use="expedited"), OK, "in use"),
        (doctor.membarrier(plain=True, expedited=True, in_use="global"), WARN, "tensorctl clients"),
        (doctor.membarrier(plain=True, expedited=False, in_use=None), WARN, "8 to 16 ms"),
        (doctor.membarrier(plain=False, expedited=False, in_use=None), FAIL, "seccomp"),
        (doctor.versions("1.0", "1.0"), OK, "tensorctl 1.0, daemon 1.0"),
        (doctor.versions("1.1", "1.0"), WARN, "install the same version"),
        (doctor.configuration(None, [], served=False), OK, ""),
        (doctor.configuration(None, ["TENSORD_PORT"], served=False), WARN, "TENSORD_PORT"),
        (doctor.configuration("ring_bites", [], served=False), FAIL, "ring_bites"),
        (doctor.configuration("ring_bites", [], served=True), WARN, "keeps its present configuration"),
        (doctor.health({"problems": [], "notices": []})[0], OK, "no problem"),
        (doctor.health({"problems": ["the ring is small"], "notices": []})[0], WARN, "the ring is small"),
        (doctor.health({"problems": [], "notices": ["a notice"]})[0], WARN, "a notice"),
    ],
)
def test_what_the_daemon_and_the_programs_tell_is_judged(found: Finding, level: Level, said: str) -> None:
    judge(found, level, said)


def test_linger_and_the_drivers_of_gpus_are_files(tmp_path: Path) -> None:
    assert not doctor.lingers(0, tmp_path)
    judge(doctor.gauges([HOST], tmp_path), OK, "host by cgroup")
    for name in ("var/lib/systemd/linger/root", "dev/kfd"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert doctor.lingers(0, tmp_path)
    assert not doctor.lingers(4_000_000_000, tmp_path)
    judge(doctor.gauges([HOST], tmp_path), WARN, "tensord[amd]")
    judge(doctor.gauges([HOST, DEVICE], tmp_path), OK, f"host by cgroup, {CARD} by nvidia")


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


SERVED = {"versions", "health", "gauges"}
CHECKS = SERVED | {"control socket", "status socket", "configuration", "memory", "membarrier", "RemoveIPC", "leftovers"}


def _findings(ctl: Ctl, code: int) -> dict[str, dict[str, str]]:
    return {finding["check"]: finding for finding in json.loads(ctl("doctor", "--json", code=code).out)}


def test_a_running_daemon_has_nothing_that_fails(daemon: Daemon, ctl: Ctl) -> None:
    found = _findings(ctl, 0)
    assert found.keys() == CHECKS
    assert {check: finding for check, finding in found.items() if finding["level"] == "FAIL"} == {}
    assert str(daemon.socket) in found["control socket"]["text"]
    assert "16.0 MiB has its memory" in found["memory"]["text"]
    assert max(map(len, ctl("doctor").out.splitlines())) <= 100


def test_without_a_daemon_the_sockets_and_the_daemon_fail_and_the_rest_is_checked(alone: Ctl) -> None:
    found = _findings(alone, 1)
    assert found.keys() == CHECKS - SERVED
    for check in ("control socket", "status socket"):
        assert found[check]["level"] == "FAIL" and "no daemon at" in found[check]["text"]
    assert all(finding["remedy"] for finding in found.values() if finding["level"] != "OK")


def nothing(path: Path) -> None:
    """The socket is gone."""


def dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize("put", [nothing, Path.touch, dead_socket])
def test_a_daemon_whose_socket_was_removed_is_named_with_its_pid(
    daemon: Daemon, ctl: Ctl, put: Callable[[Path], None]
) -> None:
    daemon.terminate()
    daemon.constants = {"tensord.daemon.connections.sockets.LOOK_EVERY_S": 3600.0}
    daemon.start()
    for path in (daemon.socket, daemon.status_socket):
        path.unlink()
        put(path)
    with Daemon() as other:
        other.start()
        found = _findings(ctl, 1)
    for check in ("control socket", "status socket"):
        assert f"; a daemon of instance {daemon.instance} lives, pid {daemon.pid}: its" in found[check]["text"]
        assert "restart it" in found[check]["remedy"]
    daemon.kill()
    found = _findings(ctl, 1)
    for check in ("control socket", "status socket"):
        assert "lives" not in found[check]["text"]


def test_memory_of_a_killed_daemon_is_found(daemon: Daemon, ctl: Ctl) -> None:
    def named(code: int) -> bool:
        listed = json.loads(ctl("doctor", "--json", code=code).out)
        return any(f"--instance {daemon.instance}`" in each["remedy"] for each in listed)

    daemon.kill()
    assert named(1)
    daemon.start()
    assert not named(0)


@pytest.mark.parametrize(
    ("variable", "value", "check", "level", "said"),
    [
        ("RING_BYTES", "15TiB", "memory", "FAIL", "the ring of 15.0 TiB needs"),
        ("RING_BYTES", "much", "configuration", "FAIL", "much"),
        ("RING_BITES", "1", "configuration", "WARN", "did you mean 'TENSORD_RING_BYTES'"),
    ],
)
def test_a_wrong_configuration_and_a_ring_that_does_not_fit_are_found(
    alone: Ctl, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, check: str, level: str, said: str
) -> None:
    monkeypatch.setenv(f"TENSORD_{variable}", value)
    found = _findings(alone, 1)[check]
    assert found["level"] == level and said in found["text"]
