"""The daemon as seen by the commands: queries on the status socket, orders on the control socket, and the settings of a
daemon that is not started yet.

Owns: the choice of sockets, and one connection to each, opened on first use. Does not own: the display of answers.

Invariants: an order sends Hello and never Attach, so a command needs no lane and no memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import click

from tensord import __version__

from ...errors import BadConfiguration, TensordError, TimedOut
from ...ipc import places
from ...ipc.messages import control as messages
from ...ipc.wire.blocking import BlockingChannel
from ...ipc.wire.connection import Connection

NAME: Final = "tensorctl"
# A client must not import the daemon, so the daemon is run, and reports its settings.
_CHECK: Final = (sys.executable, "-m", "tensord.daemon", "--check-config", "--json")
_SAID_BY: Final = "tensord: "


class Daemon:
    """The daemon behind a pair of sockets: by default the usual control socket, and the status socket beside it.
    Connects on first use. `timeout_s`: seconds for one answer."""

    def __init__(self, control: Path | None = None, status: Path | None = None, timeout_s: float = 5.0) -> None:
        self._control, self._status = control, status
        self.timeout_s = timeout_s
        self.limits = messages.ClientLimits()
        self._ids = count(1)
        self._asking: BlockingChannel | None = None
        self._ordering: BlockingChannel | None = None

    @property
    def control_path(self) -> Path:
        """The control socket. Raises SocketForbidden if the user's folder in /tmp belongs to another user."""
        return self._control or places.control_socket(os.environ)

    @property
    def status_path(self) -> Path:
        """The path of `--status-socket`, else the status socket beside `--socket`, else the one that a client finds."""
        beside = self._control and self._control.with_name(places.STATUS_NAME)
        return self._status or beside or places.status_socket(os.environ)

    # ---- questions

    def status(self) -> dict[str, Any]:
        return self.ask(messages.StatusQuery)

    def entries(self, namespace: bytes | None = None) -> Iterator[dict[str, Any]]:
        """All entries, page by page. Entries that are stored or removed meanwhile may be missing or included."""
        after: bytes | None = None
        while True:
            page = self.ask(messages.EntriesQuery, after, messages.ENTRIES_MAX, namespace)
            yield from page["entries"]
            if page["behind"] is None:
                return
            after = bytes.fromhex(page["behind"])

    def ask(self, query: type[messages.StatusRequest], *fields: Any) -> dict[str, Any]:
        """Sends one query on the status socket. `fields`: those after its id. Raises DaemonUnavailable,
        SocketForbidden, TimedOut: there is no answer. Or the error that the daemon answered."""
        if self._asking is None:
            self._asking = BlockingChannel.connect(self.status_path, self.timeout_s, Connection.status_client())
        body: dict[str, Any] = self._exchange(self._asking, self.timeout_s, query, *fields).body
        return body

    def events(self) -> Iterator[messages.Event]:
        """The daemon's events after this call. Raises DaemonUnavailable once the daemon has ended."""
        self.ask(messages.Watch)
        while self._asking is not None:
            try:
                yield self._asking.receive_one(messages.Event, time.monotonic() + 1.0)[0]
            except TimedOut:
                continue

    # ---- orders

    def order(self, request: type[messages.Question], *fields: Any, timeout_s: float | None = None) -> Any:
        """Sends one request on the control socket, and returns its answer. Raises as `ask`, and VersionMismatch."""
        return self._exchange(self.greeted(), timeout_s or self.timeout_s, request, *fields)

    def greeted(self) -> BlockingChannel:
        """A connection to the control socket, after Hello and Welcome. `limits` are those of Welcome then."""
        if self._ordering is None:
            channel = self._ordering = BlockingChannel.connect(self.control_path, self.timeout_s)
            hello = (messages.PROTOCOL_VERSION, NAME, os.getpid(), False, __version__)
            self.limits = self._exchange(channel, self.timeout_s, messages.Hello, *hello).limits
        return self._ordering

    def close(self) -> None:
        for channel in (self._asking, self._ordering):
            if channel is not None:
                channel.close()
        self._asking = self._ordering = None

    def _exchange(
        self, channel: BlockingChannel, timeout_s: float, request: type[messages.Question], *fields: Any
    ) -> Any:
        deadline, kind = time.monotonic() + timeout_s, request.answered_by
        assert kind is not None
        try:
            channel.send(request(next(self._ids), *fields), timeout_s=timeout_s)
            return channel.receive_one(kind, deadline)[0]
        except TimedOut:
            self.close()
            raise TimedOut(
                f"no answer within {timeout_s:g} s: the daemon is stopped or busy; try again with a larger --timeout"
            ) from None
        except TensordError:
            self.close()
            raise


def checked() -> tuple[list[dict[str, Any]], list[str]]:
    """The configuration of a daemon started here and now: rows with key, value, source and reload, one for each
    setting, and a text for each ignored variable. Raises BadConfiguration with the daemon's message."""
    asked = subprocess.run(_CHECK, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    said = [line.removeprefix(_SAID_BY) for line in asked.stderr.splitlines() if line.startswith(_SAID_BY)]
    if asked.returncode:
        raise BadConfiguration(said[-1] if said else f"the daemon's own check failed: {asked.stderr}")
    return json.loads(asked.stdout), said


pass_daemon = click.make_pass_decorator(Daemon)
