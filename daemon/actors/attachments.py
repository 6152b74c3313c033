"""Serves the requests for shared memory: a lane, an inbox, and the ring for writing.

Owns: the refusals, and which descriptors an answer brings. Does not own lanes (`Segments`), inboxes (`Copier`), nor the
clients (`StoreActor`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import DaemonUnavailable, LimitReached, NotEnoughMemory, TensordError
from ...ipc.messages import control as messages
from ...ipc.messages.declared import handlers, id_of
from ...ipc.messages.schema import PREFIX_BYTES_MAX
from ...ipc.wire.descriptors import lacks_descriptor, no_descriptor
from ..config.config import Config
from ..core.store import Store
from ..memory.copier import Copier
from ..memory.segments import Segments
from .messages import Deliver, Joined, MemoryRequest
from .queues import Queues


@dataclass(eq=False, repr=False)
class Attachments:
    """Serves one request after another. `send` sends an answer to a client; it closes the descriptors of one that
    cannot be sent. `tell_of` tells watchers of an event of a client."""

    _store: Store
    _memory: Segments
    _copier: Copier
    _queues: Queues
    _send: Callable[[int, Deliver], None]
    _tell_of: Callable[[Joined, str], None]
    _writes_in_place: Callable[[int], None]

    def __post_init__(self) -> None:
        requests: dict[type[Any], Callable[[Joined, Any, Sequence[int], Config], Deliver]] = {
            messages.Attach: self._attach,
            messages.OpenInbox: self._open_inbox,
            messages.OpenRing: self._open_ring,
        }
        self._requests = handlers(messages.AttachmentRequest, requests)

    def serve(self, client: Joined | None, asked: MemoryRequest, config: Config) -> None:
        """Carries a request out, or refuses it. Closes its descriptors."""
        try:
            if client is None:
                raise DaemonUnavailable("the connection is closed")
            self._send(asked.client, self._requests[type(asked.message)](client, asked.message, asked.fds, config))
            if isinstance(asked.message, messages.Attach):
                self._tell_of(client, "attach")
        except TensordError as error:
            told = LimitReached(f"the daemon refuses it: {no_descriptor()}") if lacks_descriptor(error) else error
            self._send(asked.client, Deliver(messages.Error.of(told, id_of(asked.message))))
        finally:
            for fd in asked.fds:
                os.close(fd)

    def _attach(self, client: Joined, request: messages.Attach, brought: Sequence[int], config: Config) -> Deliver:
        lanes_max, uid = config.limits.lanes_max, client.peer.uid
        back = self._memory.lane_brought(brought[0]) if brought else None
        if back is None and len(self._memory.lanes) >= lanes_max:
            raise LimitReached(
                f"lanes_max is {lanes_max}, and that many lanes exist, including those of processes that only hold "
                "views: raise it, or end processes that hold views they no longer need"
            )
        if back is None:
            self._store.quotas.admit("lanes", uid, sum(lane.uid == uid for lane in self._memory.lanes))
        try:
            lane, fds = self._memory.lend_lane(client.client, uid=uid, fenced=client.fenced, former=back)
        except OSError as error:
            raise NotEnoughMemory(f"the lane cannot be allocated: {error}") from error
        superblock = self._memory.superblock
        self._queues.attached(client.client, uid, lane)
        sizes = superblock.ring_bytes, superblock.geometry.index_bytes
        return Deliver(messages.Attached(request.id, lane.reader.lane_id, lane.place, *sizes), fds, close=fds[2:])

    def _open_inbox(self, client: Joined, request: messages.OpenInbox, fds: Sequence[int], config: Config) -> Deliver:
        most = self._memory.superblock.ring_bytes + PREFIX_BYTES_MAX
        if request.inbox_bytes > most:
            raise LimitReached(
                f"the inbox has {request.inbox_bytes} bytes; the ring and the longest prefix query have {most}: "
                "open a smaller inbox"
            )
        try:
            self._copier.open_inbox(client.client, fds[0], request.inbox_bytes)
        except OSError as error:
            raise NotEnoughMemory(f"the inbox cannot be mapped: {error}") from error
        return Deliver(messages.Done(request.id))

    def _open_ring(self, client: Joined, request: messages.OpenRing, fds: Sequence[int], config: Config) -> Deliver:
        if not client.may_write(config.write_in_place):
            raise LimitReached(
                f"write_in_place is {config.write_in_place}, and the client runs as uid {client.peer.uid}: its "
                "payloads go through its inbox"
            )
        self._writes_in_place(client.client)
        return Deliver(messages.WritableRing(request.id), [self._memory.writable_ring_fd])
