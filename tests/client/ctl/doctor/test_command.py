from __future__ import annotations

import json
import socket

import pytest

from tensord.client.ctl.doctor import command
from tensord.client.ctl.doctor.finding import fail, ok, warn

from ....daemon_process import Daemon
from ..conftest import Ctl

SERVED = {"versions", "health", "gauges"}
CHECKS = SERVED | {
    "control socket", "status socket", "configuration", "/dev/shm", "memory", "membarrier", "RemoveIPC", "leftovers",
}  # fmt: skip


def _findings(ctl: Ctl, code: int) -> dict[str, dict[str, str]]:
    return {finding["check"]: finding for finding in json.loads(ctl("doctor", "--json", code=code).out)}


def test_a_running_daemon_has_nothing_that_fails(daemon: Daemon, ctl: Ctl) -> None:
    found = _findings(ctl, 0)
    assert found.keys() - {"cgroup"} == CHECKS
    assert {check: finding for check, finding in found.items() if finding["level"] == "FAIL"} == {}
    assert str(daemon.socket) in found["control socket"]["text"]
    assert "16.0 MiB has its memory" in found["/dev/shm"]["text"]
    assert max(map(len, ctl("doctor").out.splitlines())) <= 100


def test_without_a_daemon_the_sockets_and_the_daemon_fail_and_the_rest_is_checked(alone: Ctl) -> None:
    found = _findings(alone, 1)
    assert found.keys() - {"cgroup"} == CHECKS - SERVED
    failed = {check for check, finding in found.items() if finding["level"] == "FAIL"}
    assert {"control socket", "status socket"} <= failed
    assert all(finding["remedy"] for finding in found.values() if finding["level"] != "OK")


@pytest.mark.parametrize("put", ["", "file", "dead socket", "socket"])
def test_a_daemon_whose_socket_was_removed_is_named_with_its_pid(daemon: Daemon, ctl: Ctl, put: str) -> None:
    daemon.terminate()
    daemon.constants = {"tensord.daemon.connections.sockets.LOOK_EVERY_S": 3600.0 if put != "socket" else 0.02}
    daemon.start()
    if put == "socket":
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(daemon.folder / "other"))
        (daemon.folder / "other").rename(daemon.socket)
        daemon.until(lambda status: status["socket_problems"], "the daemon to see it")
        found = _findings(ctl, 1)
        finding = found["health"]
        assert found["control socket"]["level"] == "FAIL" and "socket is gone" in found["control socket"]["text"]
        assert str(daemon.socket) in ctl("status").out
        assert str(daemon.socket) in finding["text"] and "another socket" in finding["text"]
        return
    for path in (daemon.socket, daemon.status_socket):
        path.unlink()
        if put == "file":
            path.write_text("mine")
        elif put == "dead socket":
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(path))
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
    daemon.kill()
    listed = json.loads(ctl("doctor", "--json", code=1).out)
    assert any(f"--instance {daemon.instance}`" in found["remedy"] for found in listed if found["check"] == "leftovers")
    daemon.start()
    listed = json.loads(ctl("doctor", "--json").out)
    assert not any(f"--instance {daemon.instance}`" in found["remedy"] for found in listed)


def test_a_wrong_configuration_and_a_ring_that_does_not_fit_are_found(
    alone: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORD_RING_BYTES", "15TiB")
    assert _findings(alone, 1)["/dev/shm"]["level"] == "FAIL"
    monkeypatch.setenv("TENSORD_RING_BYTES", "much")
    assert _findings(alone, 1)["configuration"]["level"] == "FAIL"


def test_a_variable_that_the_daemon_ignores_is_found(alone: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORD_RING_BITES", "1")
    found = _findings(alone, 1)["configuration"]
    assert found["level"] == "WARN"
    assert "did you mean 'TENSORD_RING_BYTES'" in found["text"]


@pytest.mark.parametrize(("finding", "code"), [(ok("a", "b"), 0), (warn("a", "b", "c"), 0), (fail("a", "b", "c"), 1)])
def test_only_a_failure_is_exit_code_1(alone: Ctl, monkeypatch: pytest.MonkeyPatch, finding: object, code: int) -> None:
    monkeypatch.setattr(command, "diagnose", lambda _: [ok("x", "y"), finding])
    assert alone("doctor", code=code).out.splitlines()[-1].endswith(f"{code} FAIL")
