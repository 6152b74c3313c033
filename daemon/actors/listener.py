"""A listener actor: accepts connections on one socket and starts a session for each.

Raw non-blocking sockets, and no transports: descriptors that arrive while a transport reads are lost.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import count

from ...errors import LimitReached, TensordError
from ...ipc import messages
from ...ipc.frames import pack
from ...ipc.peer import peer_of
from ..core.quotas import Kind, Quotas
from ..logs import logger
from .repeats import Repeats

_log = logger("listener")
# Out of descriptors or memory: the connection stays in the kernel's queue until somebody leaves.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_EXHAUSTED_PAUSE_S = 0.1


class Listener:
    """Runs `serve(number, socket)` for each connection on `listening`, for as many at once as `quotas` allow."""

    def __init__(
        self,
        listening: socket.socket,
        kind: Kind,
        quotas: Quotas,
        serve: Callable[[int, socket.socket], Coroutine[None, None, None]],
    ) -> None:
        self._listening = listening
        self._kind = kind
        self._quotas = quotas
        self._serve = serve
        self._numbers = count(1)
        self._said = Repeats()
        self.sessions: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self.by_uid: Counter[int] = Counter()
        """Connections of each uid that has any."""

    async def run(self) -> None:
        """Accepts until `stop_accepting`; ends every session when it is cancelled."""
        self._accepting = accepting = asyncio.create_task(self._accept())
        try:
            await asyncio.wait([accepting])
            if not accepting.cancelled():
                accepting.result()
            await asyncio.get_running_loop().create_future()
        finally:
            accepting.cancel()
            for task in self.sessions:
                task.cancel()
            await asyncio.gather(*self.sessions, return_exceptions=True)

    def stop_accepting(self) -> None:
        """Leaves new connections to the kernel's queue; the sessions go on."""
        if self._accepting is not None:
            self._accepting.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
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
            peer = peer_of(accepted)
            uid = peer.uid
            try:
                self._admit(uid)
            except LimitReached as refusal:
                if self._said.is_new((uid, peer.pid), loop.time()):
                    _log.warning("turned away", pid=peer.pid, why=str(refusal))
                _turn_away(accepted, refusal)
                continue
            task = asyncio.create_task(self._serve(next(self._numbers), accepted))
            self.sessions.add(task)
            self.by_uid[uid] += 1
            task.add_done_callback(partial(self._ended, uid))

    def _admit(self, uid: int) -> None:
        rule = self._quotas.rules[self._kind]
        if len(self.sessions) >= rule.total:
            self._quotas.refusals[self._kind] += 1
            raise LimitReached(f"{rule.limit} is {rule.total}, and as many are connected; raise it, or close some")
        self._quotas.admit(self._kind, uid, self.by_uid[uid])

    def _ended(self, uid: int, task: asyncio.Task[None]) -> None:
        self.sessions.discard(task)
        self.by_uid[uid] -= 1
        if not self.by_uid[uid]:
            del self.by_uid[uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a session failed", exc_info=error)


def _turn_away(accepted: socket.socket, refusal: LimitReached) -> None:
    try:
        accepted.send(pack(messages.Error.of(refusal)))
    except (OSError, TensordError):
        pass
    accepted.close()
