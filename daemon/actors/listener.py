"""A listener actor: accepts connections on one socket and starts a session for each.

Raw non-blocking sockets, and no transports: descriptors that arrive while a transport reads are lost.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from itertools import count

from ...errors import LimitReached, TensordError
from ...ipc import messages
from ...ipc.frames import pack
from ..logs import logger

_log = logger("listener")
# Out of descriptors or memory: the connection stays in the kernel's queue until somebody leaves.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_EXHAUSTED_PAUSE_S = 0.1


class Listener:
    """Runs `serve(number, socket)` for each connection on `listening`, at most `most()` of them at once."""

    def __init__(
        self,
        listening: socket.socket,
        limit_name: str,
        most: Callable[[], int],
        serve: Callable[[int, socket.socket], Coroutine[None, None, None]],
    ) -> None:
        self._listening = listening
        self._limit_name = limit_name
        self._most = most
        self._serve = serve
        self._numbers = count(1)
        self.sessions: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Accepts until it is cancelled; then ends every session."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(self._listening)
                except OSError as error:
                    if error.errno not in _EXHAUSTED:
                        raise
                    _log.error("cannot accept", why=str(error))
                    await asyncio.sleep(_EXHAUSTED_PAUSE_S)
                    continue
                accepted.setblocking(False)
                if len(self.sessions) >= self._most():
                    self._turn_away(accepted)
                    continue
                task = asyncio.create_task(self._serve(next(self._numbers), accepted))
                self.sessions.add(task)
                task.add_done_callback(self._ended)
        finally:
            for task in self.sessions:
                task.cancel()
            await asyncio.gather(*self.sessions, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.sessions.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a session failed", exc_info=error)

    def _turn_away(self, accepted: socket.socket) -> None:
        refusal = LimitReached(
            f"{self._limit_name} is {self._most()}, and as many are connected; raise it, or close some"
        )
        _log.warning("turned away", why=str(refusal))
        try:
            accepted.send(pack(messages.Error.of(refusal)))
        except (OSError, TensordError):
            pass
        accepted.close()
