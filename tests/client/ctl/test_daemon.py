from __future__ import annotations

from pathlib import Path

import pytest

from tensord.client.ctl.daemon import Daemon as Asked
from tensord.errors import TimedOut
from tensord.ipc.messages import control as messages

from ...daemon_process import PATIENCE_S, Daemon


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


def test_the_status_socket_is_the_one_beside_the_control_socket_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Asked(Path("/a/control.sock")).status_path == Path("/a/status.sock")
    assert Asked(Path("/a/control.sock"), Path("/b/s")).status_path == Path("/b/s")
    monkeypatch.setenv("TENSORD_SOCKET", "/c/control.sock")
    assert Asked().status_path == Path("/c/status.sock")
    monkeypatch.setenv("TENSORD_STATUS_SOCKET", "/d/s")
    assert Asked().status_path == Path("/d/s")
    assert Asked(Path("/a/control.sock")).status_path == Path("/a/status.sock")
