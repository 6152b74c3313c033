"""Signals that reach the daemon at its start: once its sockets listen, none of them ends it other than as later."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

import pytest

from tensord.daemon.connections.sockets import Sockets

from ..daemon_process import Daemon

_BEFORE: Final = f"{__name__}:signal_when_listening"


def signal_when_listening(number: int, config: str, text: str) -> None:
    """Runs in the daemon: as soon as its sockets listen, `text` goes to the file `config`, then the signal comes."""
    begin = Sockets.__enter__

    def enter(sockets: Sockets) -> Sockets:
        Path(config).write_text(text)
        os.kill(os.getpid(), number)
        return begin(sockets)

    Sockets.__enter__ = enter  # type: ignore[method-assign, assignment]


def starting(daemon: Daemon, number: signal.Signals) -> None:
    file = daemon.folder / "tensord.toml"
    file.touch()
    daemon.flags["config"] = file
    daemon.before = _BEFORE, {"number": number, "config": str(file), "text": "max_bytes = 1048576\n"}


@pytest.mark.parametrize(("number", "kept"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_signal_to_stop_at_the_start_ends_it_as_later(number: signal.Signals, kept: bool) -> None:
    with Daemon() as daemon:
        starting(daemon, number)
        assert daemon.spawn().wait(30.0) == 0, daemon.log
        assert "stopping" in daemon.log
        assert not daemon.socket.exists() and not daemon.status_socket.exists()
        assert bool(daemon.segments()) == kept
