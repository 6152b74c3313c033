"""`top`: a screen with the daemon's state, redrawn until the user quits.

Owns: the times of queries, the terminal, the keys. Does not own: the screen's content (frame.py).

Invariants: the daemon's cost of a redraw does not depend on the number of entries: one page of entries is queried, and
only every few seconds.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from ...errors import TensordError
from ...ipc.schema import ENTRIES_MAX
from .daemon import Daemon, pass_daemon
from .parameters import DURATION
from .tables import WIDTH

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

INTERVAL_S_MIN: Final = 0.1
INTERVAL_S_MAX: Final = 3600.0
_ENTRIES_EVERY_S: Final = 5.0
_QUIT: Final = b"qQ\x04"


class TopView:
    """The state of a daemon, queried again at each `draw`."""

    def __init__(self, daemon: Daemon, console: Console) -> None:
        self._daemon = daemon
        self._console = console
        self._before: dict[str, Any] | None = None
        self._entries: list[dict[str, Any]] = []
        self._entries_at = float("-inf")

    def draw(self, width: int, height: int | None = None) -> RenderableType:
        """The present screen.

        Raises:
            TensordError: the daemon does not answer.
        """
        from .frame import ASCII, BLOCKS, frame

        status = self._daemon.status()
        clients = self._daemon.clients()
        now = time.monotonic()
        if now - self._entries_at >= _ENTRIES_EVERY_S:
            self._entries = list(self._daemon.entries(most=ENTRIES_MAX))
            self._entries_at = now
        before, self._before = self._before, status
        return frame(
            status,
            clients,
            self._entries,
            width,
            now_unix_s=time.time(),
            height=height,
            before=before,
            glyphs=ASCII if self._console.options.ascii_only else BLOCKS,
        )

    def draw_or_say(self) -> RenderableType:
        """The screen in the terminal's size; an error text while the daemon is away."""
        from rich.text import Text

        try:
            return self.draw(self._console.width, self._console.height)
        except TensordError as error:
            return Text(f"{error}\n\ntrying again ...")


@click.command()
@click.option("--interval", type=DURATION, default="1s", show_default=True, metavar="TIME", help="Time per redraw.")
@click.option("--once", is_flag=True, help="Print one screen and end; the default if stdout is not a terminal.")
@pass_daemon
def top(daemon: Daemon, interval: float, once: bool) -> None:
    """Gauges with their modes, tiers, lookups, clients and the most used entries, redrawn until q or Ctrl-C.

    The marks on a gauge's bar are the thresholds of modes. Continues through a restart of the daemon. Needs 80 columns,
    and rich: pip install 'tensord[top]'.
    """
    if not INTERVAL_S_MIN <= interval <= INTERVAL_S_MAX:
        raise click.UsageError(
            f"--interval {interval:g} s: must be at least {INTERVAL_S_MIN:g} s and at most {INTERVAL_S_MAX:g} s"
        )
    try:
        from rich.console import Console
    except ImportError:
        raise click.ClickException("top draws with rich, which is not installed: pip install 'tensord[top]'") from None
    console = Console(highlight=False, markup=False, emoji=False)
    view = TopView(daemon, console)
    if once or not console.is_terminal or console.is_dumb_terminal:
        width = console.width if console.is_terminal else WIDTH
        Console(highlight=False, markup=False, emoji=False, width=width).print(view.draw(width))
        return
    try:
        _watch(view, console, interval)
    except KeyboardInterrupt:
        return


def _watch(view: TopView, console: Console, interval_s: float) -> None:
    from rich.live import Live

    with (
        _keys() as quits,
        Live(view.draw_or_say(), console=console, screen=True, auto_refresh=False, redirect_stdout=False) as live,
    ):
        while not quits(interval_s):
            live.update(view.draw_or_say(), refresh=True)


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits for a time or a key, and returns whether the key was one to quit."""
    stdin = sys.stdin.fileno()
    # SIGTERM raises KeyboardInterrupt, so that the terminal is restored in every case.
    term = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not os.isatty(stdin):
            yield _slept
            return
        was = termios.tcgetattr(stdin)
        tty.setcbreak(stdin)
        try:
            yield lambda wait_s: _pressed(stdin, wait_s)
        finally:
            termios.tcsetattr(stdin, termios.TCSADRAIN, was)
    finally:
        signal.signal(signal.SIGTERM, term)


def _slept(wait_s: float) -> bool:
    time.sleep(wait_s)
    return False


def _pressed(stdin: int, wait_s: float) -> bool:
    ready, _, _ = select.select([stdin], [], [], wait_s)
    # An empty read means that the terminal is gone.
    return bool(ready) and os.read(stdin, 1) in (b"", *(bytes([key]) for key in _QUIT))
