"""The path of a put: describe the payload, copy it into the inbox, send a Commit. The daemon copies it into the ring.

Owns: puts in flight, and the inbox regions that they hold until the daemon acknowledges them. Does not own: the
connection (link.py), the inboxes (inboxes.py), nor the decision whether a payload is stored (the daemon's).
Invariants: an inbox that a daemon may still read is not written; an incomplete payload is never sent again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Final

from msgspec.structs import replace

from ...errors import DaemonUnavailable, Invalidated, LimitReached, ObjectTooLarge, TensordError, Unavailable
from ...ipc import messages
from ...ipc.schema import ClientLimits
from ...shm.layout import NAMESPACE_TAG_BYTES, aligned
from ...shm.payload import Leaf, Payload
from .inbox import Inbox, Region
from .inboxes import Inboxes, no_room
from .put import Pending
from .put import Put as Put
from .put import PutState as PutState
from .put_options import PutOptions
from .waiting import Condition

# A payload is sent in parts of this size, so that the daemon copies one part while this process copies the next.
PART_BYTES: Final = 4 << 20

_log = logging.getLogger("tensord")

WENT: Final = "the daemon went away before it acknowledged the payload"
CUT: Final = "a signal handler's exception interrupted a put of this client, which attaches anew; put it again"


class PutSender:
    """All puts of one client. The first put creates the first inbox.

    Args:
        send: `send(*messages, fds, connected)` hands messages to the connection. Raises DaemonUnavailable if there is
            none, or it is not `connected`.
        next_id: returns the next request id.
        connection: returns the current connection, or None.
        refusal: returns why the daemon would refuse a key, as far as shared memory shows; None if it would not.
        end: ends the connection, after which `disconnected` is called.
    """

    def __init__(
        self,
        send: Callable[..., None],
        next_id: Callable[[], int],
        connection: Callable[[], object | None],
        refusal: Callable[[bytes], TensordError | None],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._send = send
        self._refusal = refusal
        self._invalidated: set[bytes] = set()
        self._connection = connection
        self._next_id = next_id
        self._lock = Condition()
        self._pending: dict[int, Pending] = {}
        self._end_connection = end
        self.cut = False
        """Whether a signal handler's exception ended a put and may have left it half done. `disconnected` resets it."""
        self.why_lost = WENT
        """Why there is no connection. The error of puts that end as "lost" says it."""
        self.inboxes = Inboxes(send, next_id, connection)

    @property
    def limits(self) -> ClientLimits:
        """The limits that the daemon sent."""
        return self.inboxes.limits

    @limits.setter
    def limits(self, limits: ClientLimits) -> None:
        self.inboxes.limits = limits

    def put(self, key: bytes, payload: Payload, options: PutOptions, *, deadline: float) -> Put:
        """Copies `payload` into the inbox part by part, and sends each part as soon as it is copied."""
        put = Put(key)
        try:
            self._check_generation(key)
            self._check_size(payload.payload_bytes)
            self._put(put, payload, options, deadline)
        except TensordError as error:
            self._end(put, _state_for(error), error)
        except BaseException:
            # This assignment comes first, as one atomic step: even if the next line is interrupted, the link's thread
            # sees the flag.
            self.cut = True
            self._end_connection()
            raise
        return put

    def reserve(self, payload_bytes: int, deadline: float) -> Region:
        """Returns a region for a payload that is produced in place.

        Raises:
            ObjectTooLarge, LimitReached, DaemonUnavailable, TimedOut: no region; the message says why.
        """
        self._check_size(payload_bytes)
        return self.inboxes.region(payload_bytes, deadline)

    def commit(
        self, key: bytes, region: Region, payload_bytes: int, tree_bytes: int, options: PutOptions, *, deadline: float
    ) -> Put:
        """Sends a region that holds a whole payload. Copies the payload first if the region's inbox was retired."""
        put = Put(key)
        try:
            self._check_generation(key)
            pending = self._begin(put, region.inbox, payload_bytes, tree_bytes, options, deadline)
            if pending is None:
                payload = region.bytes(payload_bytes)
                rest = Leaf(tree_bytes, payload_bytes - tree_bytes, payload[tree_bytes:])
                self._put(put, Payload(payload[:tree_bytes].tobytes(), [rest], payload_bytes), options, deadline)
        except TensordError as error:
            pending = None
            self._end(put, _state_for(error), error)
        if pending is None:
            region.release()
            return put
        if not self._hold(pending, region):
            return put
        pending.parts.append(messages.Part(pending.commit.id, region.offset, payload_bytes, True))
        try:
            self._send_commit(pending, *pending.parts)
        except TensordError as error:
            self._not_sent(pending, error)
        return put

    def acknowledged(self, message: messages.PartCopied | messages.Committed) -> None:
        """Handles a PartCopied, after which the part's region is free, or a Committed, which settles the put."""
        region = None
        with self._lock:
            pending = self._pending.get(message.id)
            if pending is not None and not pending.whole and isinstance(message, messages.PartCopied):
                region = pending.regions.pop(message.inbox_offset, None)
        if region is not None:
            region.release()
        if pending is None or isinstance(message, messages.PartCopied):
            return
        error = message.error.to_error() if message.error is not None else None
        self._settle(pending, message.outcome, error)

    def refused(self, request: int, error: TensordError) -> bool:
        """Handles an error that answers a put or an OpenInbox. Returns False if `request` is neither."""
        with self._lock:
            inbox = self.inboxes.refused(request, error)
            if inbox is not None:
                for each in [p for p in self._pending.values() if p.inbox is inbox]:
                    self._settle(each, "refused", error)
                return True
            pending = self._pending.get(request)
        if pending is None:
            return False
        self._settle(pending, "refused", error)
        return True

    def disconnected(self) -> None:
        """The connection ended: retires the inboxes of all puts that were sent, and settles puts that cannot be sent
        again.

        A put is sent again once, on the next connection, if its whole payload stands in its inbox. The daemon may carry
        out a put that was sent at any time later; hence the retired inboxes. After an interrupted put (`cut`) nothing
        is sent again: all puts are lost and all inboxes are given up.

        SYNC POINT: the same lock covers this function, the beginning of a put, and the last check before a Commit is
        sent. So a payload that was incomplete when its inbox was retired is never sent: it goes on being written in
        private pages.
        """
        self.inboxes.disconnected()
        with self._lock:
            cut, self.cut = self.cut, False
            if cut:
                self.inboxes.start_over()
            unsendable = [p for p in self._pending.values() if cut or p.sent_again or not p.complete]
            for inbox in {p.inbox for p in self._pending.values() if p.sent}:
                self.inboxes.retire(inbox)
            # Wakes puts that wait for room in `_begin`.
            self._lock.notify_all()
            for pending in unsendable:
                lost = DaemonUnavailable(CUT if cut else self.why_lost)
                self._settle(pending, "lost", lost)

    def send_again(self, send: Callable[..., None], connected: object) -> None:
        """Sends every complete put that is not acknowledged on a new connection, each after its inbox.

        Raises:
            DaemonUnavailable: the new connection has ended already.
        """
        with self._lock:
            again = [pending for pending in self._pending.values() if pending.complete]
            for pending in again:
                pending.sent_again = True
        for pending in again:
            self.inboxes.tell(pending.inbox, connected, send)
            # The claim that the put was made under ended with the old connection.
            pending.commit = replace(pending.commit, claim=None, acks=False)
            send(pending.commit, *pending.parts)

    def close(self) -> None:
        """Settles all puts in flight as lost."""
        self.why_lost = "the client was closed"
        with self._lock:
            # First: from here on no thread writes memory that the daemon may still read.
            self.inboxes.close()
            self._lock.notify_all()
            for pending in list(self._pending.values()):
                closed = DaemonUnavailable("the client was closed before the daemon answered")
                self._settle(pending, "lost", closed)

    def close_in_child(self) -> None:
        """After a fork: the inboxes and the puts in flight belong to the parent."""
        self.inboxes.close_in_child()
        for pending in self._pending.values():
            pending.put.disown()

    @property
    def in_flight(self) -> int:
        """How many puts are not acknowledged."""
        return len(self._pending)

    def _check_size(self, payload_bytes: int) -> None:
        if payload_bytes > self.limits.object_bytes_max:
            raise ObjectTooLarge(
                f"the payload has {payload_bytes} bytes, object_bytes_max is {self.limits.object_bytes_max}; "
                "raise it (and ring_bytes with it), or split the payload over several keys"
            )

    def _put(self, put: Put, payload: Payload, options: PutOptions, deadline: float) -> None:
        """Begins a put and copies its payload.

        Raises:
            TensordError: the put did not begin.
        """
        size_bytes, tree_bytes = payload.payload_bytes, len(payload.header)
        while True:
            inbox = self.inboxes.fit(size_bytes)
            if aligned(size_bytes) > inbox.size_bytes // 2:
                # A payload that takes more than half of the inbox is streamed through it.
                with inbox.streaming():
                    pending = self._begin(put, inbox, size_bytes, tree_bytes, options, deadline, whole=False)
                    if pending is not None:
                        self._stream(pending, payload, deadline)
                        return
                continue
            region = self.inboxes.region(size_bytes, deadline, inbox)
            try:
                pending = self._begin(put, region.inbox, size_bytes, tree_bytes, options, deadline)
            except BaseException:
                region.release()
                raise
            if pending is not None:
                self._copy(pending, payload, region)
                return
            region.release()

    def _begin(
        self,
        put: Put,
        inbox: Inbox,
        payload_bytes: int,
        tree_bytes: int,
        options: PutOptions,
        deadline: float,
        *,
        whole: bool = True,
    ) -> Pending | None:
        """Adds the put to those in flight. None if its inbox was retired."""
        commit = messages.Commit(
            self._next_id(),
            put.key,
            payload_bytes,
            tree_bytes,
            options.tokens,
            options.ttl_s,
            options.claim,
            not whole,
            options.cost_ms,
            options.agent,
            options.prefix_bytes,
            options.parent,
            inbox.number,
        )
        pending = Pending(put, commit, inbox, whole=whole)
        most = self.limits.commits_in_flight_max
        with self._lock:
            connected = self._connection()

            def connection_ended() -> bool:
                return connected is None or self._connection() is not connected

            self._lock.wait_for(
                lambda: len(self._pending) < most or connection_ended(), max(0.0, deadline - time.monotonic())
            )
            if len(self._pending) >= most:
                if connection_ended():
                    raise DaemonUnavailable(f"the daemon is away, and commits_in_flight_max ({most}) puts wait for it")
                raise LimitReached(
                    f"commits_in_flight_max is {most}, and none of {most} puts in flight was acknowledged in time; "
                    "put fewer payloads at once, or raise timeout_s"
                )
            if inbox.retired:
                return None
            if not self.inboxes.knows(inbox):
                raise DaemonUnavailable(
                    "the reservation belongs to the process that this one was forked from; reserve again here"
                )
            self._pending[commit.id] = pending
        return pending

    def _copy(self, pending: Pending, payload: Payload, region: Region) -> None:
        """Copies the payload into one region. A payload of two parts or more sends its Commit before the first copy."""
        size_bytes = payload.payload_bytes
        early = size_bytes >= 2 * PART_BYTES
        try:
            with region.held():
                memory = region.memory
                assert memory is not None
                if not self._hold(pending, region):
                    return
                if early:
                    # The daemon allocates a span while this process copies the first part.
                    self._send_commit(pending)
                for start, stop in _parts(size_bytes, PART_BYTES):
                    if pending.put.state != "sent":
                        # The put has ended. The daemon expects every part to be announced, but needs no more bytes.
                        rest = messages.Part(pending.commit.id, region.offset + start, size_bytes - start, True)
                        self._send_part(pending, rest)
                        return
                    payload.write_range(memory[start:stop], start, stop)
                    part = messages.Part(pending.commit.id, region.offset + start, stop - start, stop == size_bytes)
                    pending.parts.append(part)
                    if early:
                        self._send_part(pending, part)
                    else:
                        self._send_commit(pending, part)
        except TensordError as error:
            self._not_sent(pending, error)

    def _stream(self, pending: Pending, payload: Payload, deadline: float) -> None:
        """Copies the payload through the inbox, with one region for each part. The daemon's PartCopied frees the
        region.
        """
        inbox, size_bytes = pending.inbox, payload.payload_bytes
        part_bytes = min(PART_BYTES, inbox.size_bytes // 8)
        try:
            self._send_commit(pending)
            for start, stop in _parts(size_bytes, part_bytes):
                region = inbox.take(stop - start, deadline)
                if region is None:
                    if inbox.retired:
                        raise DaemonUnavailable(self.why_lost)
                    raise no_room(inbox, stop - start)
                with region.held():
                    memory = region.memory
                    assert memory is not None
                    if not self._hold(pending, region):
                        self._send_part(pending, messages.Part(pending.commit.id, 0, size_bytes - start, True))
                        return
                    payload.write_range(memory, start, stop)
                    part = messages.Part(pending.commit.id, region.offset, stop - start, stop == size_bytes)
                    self._send_part(pending, part)
        except TensordError as error:
            self._not_sent(pending, error)

    def _hold(self, pending: Pending, region: Region) -> bool:
        """Gives the put a region, which is released with it. Returns False if the put has ended meanwhile."""
        with self._lock:
            if pending.commit.id in self._pending:
                pending.regions[region.offset] = region
                return True
        region.release()
        return False

    def _send_commit(self, pending: Pending, *parts: messages.Part) -> None:
        """Sends the put's Commit, with parts. Sends nothing if a new connection took the put over, or if the put has
        ended: the daemon would count a put that this client does not wait for. Further parts go on the same connection
        only.

        SYNC POINT: the connection is read first. If that connection's start was to send the put again, or its
        predecessor's end was to settle the put, it has happened before `connected` is set here. If the connection has
        changed by the time of the send, nothing is sent.

        Raises:
            DaemonUnavailable, TimedOut: the messages were not sent.
        """
        connected = self._connection()
        if connected is None:
            raise DaemonUnavailable(self.why_lost)
        self.inboxes.tell(pending.inbox, connected, self._send)
        with self._lock:
            if pending.sent_again or pending.commit.id not in self._pending:
                return
            pending.connected = connected
        self._send(pending.commit, *parts, connected=connected)

    def _send_part(self, pending: Pending, part: messages.Part) -> None:
        if pending.connected is not None:
            self._send(part, connected=pending.connected)

    def _not_sent(self, pending: Pending, error: TensordError) -> None:
        """Settles a put whose messages were not sent; unless a new connection took the put over, which the daemon
        answers.
        """
        if isinstance(error, DaemonUnavailable) and self.why_lost is not WENT:
            error = DaemonUnavailable(self.why_lost)
        with self._lock:
            if not pending.sent_again:
                self._settle(pending, _state_for(error), error)

    def _settle(self, pending: Pending, state: PutState, error: TensordError | None) -> None:
        with self._lock:
            if self._pending.pop(pending.commit.id, None) is None:
                return
            regions, pending.regions = pending.regions, {}
            self._lock.notify_all()
        for region in regions.values():
            region.release()
        self._end(pending.put, state, error)

    def _check_generation(self, key: bytes) -> None:
        """Raises Invalidated for a key of a past generation, before any payload is copied."""
        refusal = self._refusal(key)
        if refusal is not None:
            raise refusal

    def _end(self, put: Put, state: PutState, error: TensordError | None) -> None:
        """Settles a put. Logs once for each namespace that its puts are refused."""
        if isinstance(error, Invalidated) and put.key[:NAMESPACE_TAG_BYTES] not in self._invalidated:
            self._invalidated.add(put.key[:NAMESPACE_TAG_BYTES])
            _log.warning("tensord: %s", error)
        put.settle(state, error)


def _parts(size_bytes: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of about `part_bytes`, of nearly equal size: a last part of a few bytes would cost as much
    as a full one.
    """
    count = max(1, size_bytes // part_bytes)
    step = aligned(-(-size_bytes // count))
    for start in range(0, size_bytes, step):
        yield start, min(start + step, size_bytes)


def _state_for(error: TensordError) -> PutState:
    return "lost" if isinstance(error, Unavailable) else "refused"
