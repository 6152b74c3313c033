"""The part of the synchronous client that its calls share: the link, the time limit, requests with an answer.

Owns: the state of a client, its start after a fork and its end. Does not own: the connection (link.py).
Invariants: only calls that need an answer of the daemon raise DaemonUnavailable.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Self

from ...errors import DaemonUnavailable
from ...ipc.messages import control as messages
from ...ipc.wire.blocking import BlockingChannel
from ...ipc.wire.connection import Connection
from ..arguments.checks import check_timeout
from ..computing.once import ComputeTally
from ..link.link import Link
from ..pressure.modes import GovernorListener
from ..reading.lease import Lease
from ..reading.view import View
from ..threads import forks


class ClientBase:
    """The link of a client, and the calls that are about the daemon itself."""

    def __init__(self, link: Link, status_path: Path, timeout_s: float) -> None:
        """Does not start `link`. `status_path`: the daemon's status socket."""
        self._link = link
        self._status_path = status_path
        self._timeout_s = timeout_s
        self._tally = ComputeTally()
        self._governor = GovernorListener(link)
        self._closed = weakref.finalize(self, link.end)
        link.owner = weakref.ref(self)
        forks.watch(link)

    @property
    def link(self) -> Link:
        """The connection to the daemon. For the library."""
        return self._link

    @property
    def governor(self) -> GovernorListener:
        """The listener that receives mode changes. For the library."""
        return self._governor

    @property
    def timeout_s(self) -> float:
        """Default time limit of each call, in seconds."""
        return self._timeout_s

    @property
    def connected(self) -> bool:
        """Whether the daemon is there now. Lookups do not depend on it."""
        return self._link.connected

    @property
    def tally(self) -> ComputeTally:
        """Counts of what `get_or_compute` did in this client."""
        return self._tally

    def wait_connected(self, timeout_s: float | None = None) -> bool:
        """Waits until the daemon is there, for at most `timeout_s` seconds; returns False if it is still not there."""
        return self._link.wait_connected(check_timeout(timeout_s, self._timeout_s))

    def status(self) -> dict[str, Any]:
        """Returns the daemon's status, as `tensorctl status --json` prints it.

        Raises:
            DaemonUnavailable, SocketForbidden, TimedOut: the daemon did not answer, or the interpreter ends.
        """
        if sys.is_finalizing():
            # The decoder of the answer may not be made yet, and cannot be any more.
            raise DaemonUnavailable("the interpreter ends: ask for the status before the program ends")
        if self._link.silence.away:
            raise self._link.unavailable()
        channel = BlockingChannel.connect(self._status_path, self._timeout_s, Connection.status_client())
        try:
            channel.send(messages.StatusQuery(1), timeout_s=self._timeout_s)
            answer, _ = channel.receive(self._timeout_s)
        finally:
            channel.close()
        if isinstance(answer, messages.Error):
            raise answer.to_error()
        body: dict[str, Any] = answer.body
        return body

    def close(self) -> None:
        """Ends the connection, once the daemon has this client's puts, or after 50 ms. Leases and their views stay
        valid for as long as they live.

        A signal handler may call it at any moment; a put that it has interrupted ends as "lost".
        """
        self._link.puts.wait_for_puts()
        self._closed.detach()
        self._link.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a client is a connection of this process, so it cannot be pickled or copied: make one in each process"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for the calls of all topics

    def _attach(self) -> View | None:
        """Starts the link if it does not run: before the first attachment, after a fork, or without a daemon."""
        if self._closed.alive:
            self._link.start()
        return self._link.view

    def _expect_answer(self, timeout_s: float) -> None:
        """Called first by each call that raises an error without an answer of the daemon. Waits for at most `timeout_s`
        seconds while the client attaches anew."""
        self._attach()
        self._link.attachment.wait_renewed(timeout_s)

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + check_timeout(timeout_s, self._timeout_s)

    def _look_up(self, key: bytes) -> Lease | None:
        view = self._link.view or self._attach()
        return view.get(key) if view is not None else None

    def _ask(self, make: Callable[[int], messages.Message]) -> Any:
        deadline = self._deadline(None)
        self._expect_answer(self._timeout_s)
        left_s = max(0.0, deadline - time.monotonic())
        return self._link.answers.wait(self._link.ask(make, left_s), left_s)

    def _counted(self, make: Callable[[int], messages.Message]) -> int:
        count: int = self._ask(make).count
        return count
