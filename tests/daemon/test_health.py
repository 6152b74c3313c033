"""What health says of a daemon that serves, but not as it should."""

from __future__ import annotations

from tensord.ipc.messages import control as messages

from ..daemon_process import Daemon


def test_a_daemon_that_serves_as_it_should_has_no_problems(daemon: Daemon) -> None:
    told = daemon.ask(messages.HealthQuery)
    assert (told["healthy"], told["problems"]) == (True, [])


def test_status_says_which_daemon_it_is(daemon: Daemon) -> None:
    before = daemon.status()
    assert (before["pid"], before["protocol"]) == (daemon.pid, messages.PROTOCOL_VERSION)
    after = daemon.until(lambda status: status["uptime_s"] > before["uptime_s"] and status, "time goes on")
    assert after["version"] == before["version"]
