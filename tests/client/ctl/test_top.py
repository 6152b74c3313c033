"""`top` in a terminal of its own, and where there is none."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ...daemon_process import PATIENCE_S, Daemon, until
from .conftest import COMMAND, Ctl

KEY = bytes(range(32))


class Terminal:
    """What somebody sees who runs `top`, and the keys that they press."""

    def __init__(self, ctl: Ctl, *words: str) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (40, 100))
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            [*COMMAND, *ctl.flags, "top", "--interval", "0.1s", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        self._slave = slave
        os.set_blocking(self._master, False)
        self.seen = ""

    @property
    def settings(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    def shows(self, text: str) -> None:
        """Waits until `text` is drawn; what was drawn before does not count."""

        def drawn() -> bool:
            try:
                self.seen += os.read(self._master, 65536).decode(errors="replace")
            except BlockingIOError:
                pass
            assert self.process.poll() is None, self.seen
            return text in self.seen

        until(drawn, f"{text!r} on the terminal")
        self.seen = ""

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def ended(self) -> int:
        # What nobody reads would keep it from ending.
        until(lambda: self._emptied() is not None, "its end")
        return self.process.wait()

    def _emptied(self) -> int | None:
        try:
            os.read(self._master, 65536)
        except BlockingIOError:
            pass
        return self.process.poll()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def terminal(ctl: Ctl) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(*words: str) -> Terminal:
        made.append(Terminal(ctl, *words))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_once_draws_one_picture(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client(name="encoder-1")
    client.put(KEY, np.zeros(1000, np.uint8), tokens=7, wait=True)
    daemon.until(lambda now: now["governor"]["gauges"], "the first sample")
    out = ctl("top", "--once").out
    assert out.startswith("tensord ")
    assert out.count("GAUGE ") == 2  # gauges, and the head of the transitions
    assert KEY.hex()[:28] in out
    assert "encoder-1" in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_where_nobody_watches_it_draws_once(ctl: Ctl) -> None:
    with ctl.spawn("top") as drawing:
        try:
            out, err = drawing.communicate(timeout=PATIENCE_S)
        finally:
            drawing.kill()
    assert (drawing.returncode, err) == (0, "")
    assert out.count("tensord ") == 1


@pytest.mark.parametrize("quit", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_top_redraws_until_q_and_restores_the_terminal(terminal: Callable[..., Terminal], quit: bytes) -> None:
    shown = terminal()
    shown.shows("lookups")
    shown.shows("now     lookups 0/s")
    if quit == b"q":
        shown.press(quit)
    else:
        os.kill(shown.process.pid, signal.SIGINT)
    assert shown.ended() == 0
    assert shown.settings == shown.before


def test_top_continues_through_a_restart(daemon: Daemon, terminal: Callable[..., Terminal]) -> None:
    shown = terminal()
    shown.shows("epoch 1,")
    daemon.terminate()
    shown.shows("trying again")
    daemon.start()
    shown.shows("epoch 2,")


def test_without_rich_it_says_what_to_install(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert "pip install 'tensord[top]'" in ctl("top", "--once", code=1).err


def test_no_other_command_needs_rich() -> None:
    code = "import sys; sys.modules['rich'] = None; from tensord.client.ctl import main; main(['--version'])"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
