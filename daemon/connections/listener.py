"""A listener actor: accepts connections on one socket and starts a session for each.

Owns: the session tasks of its socket, and the number of connections of each uid. Does not own the limits (`Quotas`),
nor the sessions' work.

Accepted sockets are raw and non-blocking. asyncio transports are not used, because a transport that reads loses
descriptors.

Invariant: at most as many sessions run, in total and for each uid, as the quotas allow.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import count

from ...errors import LimitReached, TensordError
from ...ipc.messages import control as messages
from ...ipc.wire.descriptors import lacks_descriptor, no_descriptor, peer_of
from ...ipc.wire.frames import pack
from ..claims.quotas import Kind, Quotas
from ..process.logs import logger
from .listening import Listening
from .repeats import Repeats

_log = logger("listener")
# The machine is out of descriptors or memory. The connection stays in the kernel's queue until others have ended.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_EXHAUSTED_PAUSE_S = 0.1


class _Spare:
    """A descriptor that is given up for a moment when the process can open no more files, so that a peer can be told.
    Without it, peers would wait in the kernel's queue until their time limits."""

    def __init__(self) -> None:
        self._fd = -1
        self.renew()

    def renew(self) -> None:
        if self._fd < 0:
            with suppress(OSError):
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def give_up(self) -> bool:
        """Closes it. Returns False if there was none."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        return fd >= 0


class Listener:
    """Runs `serve(number, socket)` for each connection on `listening`. `quotas` limit the simultaneous connections. A
    peer for which the process has no descriptor is told so."""

    def __init__(
        self,
        listening: Listening,
        kind: Kind,
        quotas: Quotas,
        serve: Callable[[int, socket.socket], Coroutine[None, None, None]],
    ) -> None:
        self._listening = listening
        self._kind = kind
        self._quotas = quotas
        self._serve = serve
        self._numbers = count(1)
        self._logged = Repeats()
        # Opened before the daemon says that it is ready: from then on it has the descriptors that it needs itself.
        self._spare = _Spare()
        self.sessions: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self.by_uid: Counter[int] = Counter()
        """The number of connections of each uid. A uid without connections has no item."""

    async def run(self) -> None:
        """Accepts connections until `stop_accepting`. Ends every session when it is cancelled."""
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
        """Leaves new connections in the kernel's queue. The sessions go on."""
        if self._accepting is not None:
            self._accepting.cancel()

    async def _accept(self) -> None:
        try:
            await self._accept_all(asyncio.get_running_loop())
        finally:
            self._spare.give_up()

    async def _accept_all(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            self._spare.renew()
            try:
                await self._listening.readable()
                accepted, _ = self._listening.socket.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                if self._logged.is_new(error.errno, loop.time()):
                    _log.error("cannot accept a connection; retrying", why=_why(error))
                if error.errno == errno.EMFILE and self._spare.give_up():
                    self._turn_away_next(_why(error))
                await asyncio.sleep(_EXHAUSTED_PAUSE_S)
                continue
            accepted.setblocking(False)
            peer = peer_of(accepted)
            uid = peer.uid
            try:
                self._admit(uid)
            except LimitReached as refusal:
                if self._logged.is_new((uid, peer.pid), loop.time()):
                    _log.warning("connection refused", pid=peer.pid, why=str(refusal))
                _turn_away(accepted, refusal)
                continue
            task = asyncio.create_task(self._serve(next(self._numbers), accepted))
            self.sessions.add(task)
            self.by_uid[uid] += 1
            task.add_done_callback(partial(self._ended, uid))

    def _turn_away_next(self, why: str) -> None:
        """Refuses the peer that has waited longest. Another thread may have taken the descriptor: then none."""
        with suppress(OSError):
            accepted, _ = self._listening.socket.accept()
            accepted.setblocking(False)
            _turn_away(accepted, LimitReached(f"the daemon accepts no more connections: {why}"))

    def _admit(self, uid: int) -> None:
        rule = self._quotas.rules[self._kind]
        if len(self.sessions) >= rule.total:
            self._quotas.refusals[self._kind] += 1
            raise LimitReached(
                f"{rule.limit} is {rule.total}, and that many connections are open: raise it, or close connections"
            )
        self._quotas.admit(self._kind, uid, self.by_uid[uid])

    def _ended(self, uid: int, task: asyncio.Task[None]) -> None:
        self.sessions.discard(task)
        self.by_uid[uid] -= 1
        if not self.by_uid[uid]:
            del self.by_uid[uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a session failed; its connection is closed", exc_info=error)


def _why(error: OSError) -> str:
    return str(no_descriptor()) if lacks_descriptor(error) else str(error)


def _turn_away(accepted: socket.socket, refusal: LimitReached) -> None:
    try:
        accepted.send(pack(messages.Error.of(refusal)))
    except (OSError, TensordError):
        pass
    accepted.close()
