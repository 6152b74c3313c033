"""Log lines about the daemon in vLLM's log: one when an engine starts, one at each change, none repeated.

Owns: those lines, and the names of engines among the daemon's clients. Does not own: the connection, which the client
keeps up by itself.

Invariants
- A change is logged once a process and socket, however many parts of the process have clients of that daemon.
- While there is no connection, each kind of error is logged once.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

from ....errors import ProtocolError, SocketForbidden, TensordError, TimedOut, VersionMismatch
from ...core.client import Client
from ...link.absence import told_elsewhere
from ...link.listeners import Connected, ListenerMessage

ATTACH_S: Final = 0.4
"""Seconds that making a client may delay an engine's start, at most twice. After that it attaches in the background."""

_NOT_YET: Final = TimedOut("the first attempt to attach has not ended")
_log = logging.getLogger("tensord")
_said: dict[str, str] = {}
"""By socket: the last change that this process has logged."""
_said_lock = threading.Lock()


def client_name(vllm_config: Any, part: str) -> str:
    """The name of a part of an engine in `tensorctl clients`, for example "vllm-1a2b3 scheduler".

    `part` includes the rank if there are several. The name is cut to 128 characters.
    """
    return f"vllm-{vllm_config.instance_id} {part}"[:128]


def engine_client_name(vllm_config: Any, part: str) -> str:
    """`client_name` of the scheduler's or a worker's client. Both share one client if they run in one process."""
    one_process = vllm_config.parallel_config.distributed_executor_backend == "uni"
    return client_name(vllm_config, "engine" if one_process else part)


class Presence:
    """Logs whether the daemon is available.

    Args:
        shares: text for the first line: what this part of the engine shares through the daemon, or why it shares
            nothing.
    """

    def __init__(self, client: Client, shares: str) -> None:
        self._link = client.link
        self._lock = threading.Lock()
        self._state = ""
        self._reasons: set[type] = set()
        self._silent = False
        self._shares = shares
        told_elsewhere(self._link.path)
        self.look()
        self._link.listeners.add(self)

    @property
    def connected(self) -> bool:
        """Whether the daemon is connected and, as far as known, answers."""
        return self._link.connected and not self._silent

    def look(self, *, silent: bool = False) -> None:
        """Logs a change of the daemon's state. `silent`: an answer of the daemon is overdue, whether or not the link
        has noticed that."""
        with self._lock:
            self._silent = silent or self._link.silence.away
            if self._link.closed:
                return
            if self._link.attached is not None:
                self._reasons.clear()
                self._log_answers()
            elif (kind := type(self._link.error or _NOT_YET)) not in self._reasons:
                self._reasons.add(kind)
                self._log_unavailable()

    # ---- calls by the link, in its thread

    def attached(self, connected: Connected) -> None:
        self.look()

    def detached(self) -> None:
        self.look()

    def received(self, message: ListenerMessage, connected: Connected) -> None:
        pass

    def forked(self) -> None:
        self._lock = threading.Lock()

    # ---- private

    def _log_answers(self) -> None:
        link, before = self._link, self._state
        self._state = "silent" if self._silent else "there"
        if self._state == before:
            return
        if not before:
            _log.info(
                "tensord: connected to the daemon at %s (instance %s, version %s) as %r; %s",
                *(link.path, link.instance, link.version, link.name, self._shares),
            )
            _note(str(link.path), "there")
        elif self._silent:
            self._change(
                logging.WARNING,
                "does not answer: stored entries are found, missing ones are computed here; see `tensorctl health`",
            )
        elif before == "silent":
            self._change(logging.INFO, "answers again")
        else:
            self._change(
                logging.INFO, f"is connected (instance {link.instance}, version {link.version}); {self._shares}"
            )

    def _log_unavailable(self) -> None:
        link, before = self._link, self._state
        self._state = "away"
        error = link.error or _NOT_YET
        why = f"the daemon at {link.path} has not answered yet" if error is _NOT_YET else str(error)
        then = f"{why}{_remedy(error)}. Until it is connected, this process computes by itself and shares nothing"
        if not before:
            _log.warning("tensord: not connected: %s; then %s", then, self._shares)
            _note(str(link.path), then)
        else:
            self._change(logging.WARNING, f"is away: {then}")

    def _change(self, level: int, text: str) -> None:
        if _note(str(self._link.path), text):
            _log.log(level, "tensord: the daemon at %s %s", self._link.path, text)


def _note(path: str, text: str) -> bool:
    """Records the text. False if it equals the last one for the path."""
    with _said_lock:
        known, _said[path] = _said.get(path), text
        return known != text


def _remedy(error: TensordError) -> str:
    """A remedy for the error if its message has none, else an empty string."""
    match error:
        case VersionMismatch() | SocketForbidden():
            return ""
        case TimedOut():
            return ": it is stopped or busy; see `tensorctl health`"
        case ProtocolError():
            return ": if that is not a tensord daemon, name another socket with tensord.socket or TENSORD_SOCKET"
    return ""
