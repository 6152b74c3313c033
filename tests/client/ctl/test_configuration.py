"""The connection to a daemon, and the settings of a daemon that runs, and of one that is not started yet."""

from __future__ import annotations

import json
import os

import pytest

from tensord.client.ctl.daemon import Daemon as Asked
from tensord.errors import TimedOut
from tensord.ipc.messages import control as messages

from ...daemon_process import PATIENCE_S, Daemon
from .conftest import Ctl


def _settings(ctl: Ctl, *name: str) -> dict[str, tuple[str, str]]:
    rows = json.loads(ctl("config", *name, "--json").out)
    return {row["key"]: (row["value"], row["source"]) for row in rows}


def test_config_tells_what_the_running_daemon_has_and_from_where(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Daemon() as daemon:
        file = daemon.folder / "tensord.toml"
        file.write_text("[limits]\nclients_max = 7\n")
        daemon.flags["config"] = file
        ctl = Ctl(capsys, daemon.start().socket)
        # What a daemon started here would have is another matter.
        monkeypatch.setenv("TENSORD_POLICY", "lru")
        found = _settings(ctl)
        assert found["limits.clients_max"] == ("7", f"file {file}")
        assert found["ring_bytes"] == ("16MiB", "flag --ring-bytes")
        assert found["policy"] == ("hazard", "default")
        assert _settings(ctl, "limits").keys() == {key for key in found if key.startswith("limits.")}
        assert ctl("config", "policy").out.splitlines()[1].split() == ["policy", "hazard", "default"]
        assert "No such setting 'ring_bites'; did you mean 'ring_bytes'?" in ctl("config", "ring_bites", code=2).err
        ctl("limit", "4MiB")
        assert _settings(ctl, "max_bytes") == {"max_bytes": ("4MiB", "tensorctl limit")}
        # The next daemon derives the size, and keeps that of the memory it finds.
        del daemon.flags["ring_bytes"]
        daemon.restart()
        assert _settings(ctl, "ring_bytes") == {"ring_bytes": ("16MiB", "ring")}


def test_a_reload_is_answered_with_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    with Daemon() as daemon:
        file = daemon.folder / "tensord.toml"
        file.write_text("")
        daemon.flags["config"] = file
        ctl = Ctl(capsys, daemon.start().socket)
        file.write_text("max_tokens = 5\n[memory]\nhuge_pages = true\n[pressure]\nnormal = 0.5\n")
        told = ctl("reload").out
        assert "max_tokens none -> 5\n" in told
        assert "memory.huge_pages" in told and "needs a restart" in told
        assert "2 settings changed" in told
        status = daemon.status()
        assert (status["store"]["max_tokens"], status["governor"]["thresholds"]["normal"]) == (5, 0.5)
        assert "these wait for a restart: memory.huge_pages" in ctl("config").err
        for wrong, why in (
            ("max_token = 6\n", "did you mean 'max_tokens'"),
            ("max_tokens = 6\n[pressure]\nnormal = 0.02\nhysteresis = 0.03\n", "[pressure]"),
        ):
            file.write_text(wrong)
            err = ctl("reload", code=1).err
            assert "refused, the configuration is unchanged" in err and why in err
        assert daemon.status()["store"]["max_tokens"] == 5
        assert "the last reload was refused" in ctl("config", "max_tokens").err
        assert _settings(ctl, "max_tokens") == {"max_tokens": ("5", f"file {file}")}
        assert "reload applied" in daemon.log and "reload failed" in daemon.log


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_reload_by_another_user_says_who_may(daemon: Daemon, ctl: Ctl) -> None:
    for path in (daemon.socket, daemon.status_socket):
        path.chmod(0o666)
    daemon.folder.chmod(0o711)
    os.setresuid(1234, 1234, 0)
    try:
        err = ctl("reload", code=1).err
    finally:
        os.setresuid(0, 0, 0)
    assert f"cannot send SIGHUP to pid {daemon.pid} of uid 0" in err


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(daemon: Daemon) -> None:
    asked = Asked(daemon.socket, timeout_s=PATIENCE_S)
    assert asked.status()["pid"] == daemon.pid
    daemon.pause()
    asked.timeout_s = 0.2
    with pytest.raises(TimedOut, match=r"--timeout"):
        asked.status()
    daemon.resume()
    asked.timeout_s = PATIENCE_S
    assert asked.ask(messages.ClientsQuery)["clients"] == []
    asked.close()


def test_orders_take_no_lane(daemon: Daemon) -> None:
    asked = Asked(daemon.socket, timeout_s=PATIENCE_S)
    asked.order(messages.Limit, 1 << 20)
    (row,) = daemon.client_rows()
    assert (row["name"], row["lane"]) == ("tensorctl", None)
    assert daemon.lanes() == []
    asked.close()
