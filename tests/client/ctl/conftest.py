"""tensorctl as its user meets it: words in, an exit code and two streams out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tensord
from tensord.client.ctl import main
from tensord.client.ctl.daemon import Daemon as Asked

from ...daemon_process import PATIENCE_S, Daemon

COMMAND = (sys.executable, "-m", "tensord.client.ctl")
SPACES = [tensord.Namespace(model=model, revision="r", dtype="f4", processor="p") for model in ("a", "b")]
KEYS = [space.key("encoder", "image", bytes([number])) for space in SPACES for number in range(3)]


@dataclass(frozen=True)
class Told:
    """What came of one command line."""

    code: int
    out: str
    err: str


class Ctl:
    """Runs command lines against the daemon behind `socket`."""

    def __init__(self, capsys: pytest.CaptureFixture[str], socket: Path) -> None:
        self._capsys = capsys
        # A test that is about the time limit gives its own, which comes later and counts.
        self.flags = ("--socket", str(socket), "--timeout", f"{PATIENCE_S:g}s")

    def __call__(self, *words: str, code: int = 0) -> Told:
        """Runs it in this process. The exit code must be `code`; a failure tells one line, and never a traceback."""
        self._capsys.readouterr()
        told = Told(main([*self.flags, *words]), *self._capsys.readouterr())
        assert told.code == code, told
        assert "Traceback" not in told.err
        if code == 2 or (code == 1 and not told.out):
            assert told.err.startswith("tensorctl: "), told
            assert told.err.count("\n") == 1, told
        return told


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TENSORD_"):
            monkeypatch.delenv(name)


@pytest.fixture
def ctl(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> Ctl:
    return Ctl(capsys, daemon.socket)


@pytest.fixture
def alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ctl:
    """tensorctl where no daemon is."""
    return Ctl(capsys, tmp_path / "control.sock")


@pytest.fixture
def recorded(alone: Ctl, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ctl]:
    """tensorctl before a daemon that answers with these bodies, by the names of the queries."""

    def recorded(**bodies: dict[str, Any]) -> Ctl:
        def ask(_: Asked, query: type[object], *fields: object) -> Any:
            return bodies[query.__name__]

        monkeypatch.setattr(Asked, "ask", ask)
        return alone

    return recorded
