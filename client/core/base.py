"""The part of the synchronous client that its calls share: how it is made and ended, and requests with an answer.

Owns: the state of a client. Does not own: the connection (link.py).
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn, Self

from ...errors import DaemonUnavailable
from ...ipc.messages import control as messages
from ...ipc.messages.schema import NAME_CHARS_MAX
from ...ipc.places import STATUS_NAME, control_socket, status_socket
from ...ipc.wire.blocking import BlockingChannel
from ...ipc.wire.connection import Connection
from ..arguments.checks import check_name, check_socket, check_timeout, printable
from ..computing.once import ComputeTally
from ..link.link import Link
from ..pressure.modes import GovernorListener
from ..reading.view import View
from ..threads import forks

TIMEOUT_S: Final = 5.0


class ClientBase:
    """The state of a client, and the calls that are about the daemon itself. For the library: `link`, the connection to
    the daemon, and `governor`, which receives mode changes."""

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        timeout_s: float = TIMEOUT_S,
        attach_s: float | None = None,
        required: bool = False,
    ) -> None:
        path = check_socket(socket) if socket is not None else control_socket(os.environ)
        status_path = path.with_name(STATUS_NAME) if socket is not None else status_socket(os.environ)
        timeout_s = check_timeout(timeout_s, TIMEOUT_S)
        attach_s = None if attach_s is None else check_timeout(attach_s, timeout_s, "attach_s")
        if name is None:
            name = printable(Path(sys.argv[0]).name or "python")[:NAME_CHARS_MAX]
        check_name("name", name, NAME_CHARS_MAX)
        self.link = link = Link(path, name, timeout_s, required=required)
        self._status_path = status_path
        self.timeout_s = timeout_s
        self.tally = ComputeTally()
        self.governor = GovernorListener(link)
        self._closed = weakref.finalize(self, link.end)
        link.owner = weakref.ref(self)
        forks.watch(link)
        link.start(attach_s)
        if required and not self.link.connected:
            self.close()
            raise self.link.unavailable()

    @property
    def connected(self) -> bool:
        """Whether the daemon is there now. Lookups do not depend on it."""
        return self.link.connected

    def wait_connected(self, timeout_s: float | None = None) -> bool:
        """Waits until the daemon is there, for at most `timeout_s` seconds; returns False if it is still not there."""
        return self.link.wait_connected(check_timeout(timeout_s, self.timeout_s))

    def status(self) -> dict[str, Any]:
        """Returns the daemon's status, as `tensorctl status --json` prints it.

        Raises:
            DaemonUnavailable, SocketForbidden, TimedOut: the daemon did not answer, or the interpreter ends.
        """
        if sys.is_finalizing():
            # The decoder of the answer may not be made yet, and cannot be any more.
            raise DaemonUnavailable("the interpreter ends: ask for the status before the program ends")
        if self.link.silence.away:
            raise self.link.unavailable()
        channel = BlockingChannel.connect(self._status_path, self.timeout_s, Connection.status_client())
        try:
            channel.send(messages.StatusQuery(1), timeout_s=self.timeout_s)
            answer, _ = channel.receive(self.timeout_s)
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
        self.link.puts.wait_for_puts()
        self._closed.detach()
        self.link.close()

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
            self.link.start()
        return self.link.view

    def _expect_answer(self, timeout_s: float) -> None:
        """Called first by each call that raises an error without an answer of the daemon. Waits for at most `timeout_s`
        seconds while the client attaches anew."""
        self._attach()
        self.link.attachment.wait_renewed(timeout_s)

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + check_timeout(timeout_s, self.timeout_s)

    def _ask(self, make: Callable[[int], messages.Message]) -> Any:
        deadline = self._deadline(None)
        self._expect_answer(self.timeout_s)
        left_s = max(0.0, deadline - time.monotonic())
        return self.link.answers.wait(self.link.ask(make, left_s), left_s)
