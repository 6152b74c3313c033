"""The way of a put: describe the payload, copy it into the inbox, say Commit; the daemon does the rest.

Owns: puts on their way, and the inbox regions they hold until they are acknowledged. Does not own the connection, nor
the inboxes (inboxes.py), nor the decision what is stored.
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

# A payload is sent in parts of this size, so that the daemon copies the first while we copy the next.
PART_BYTES: Final = 4 << 20

_log = logging.getLogger("tensord")

WENT: Final = "the daemon went away while the payload was on its way"
CUT: Final = "an exception of a signal handler cut a put of this client short, which attaches anew: put it again"


class PutSender:
    """All puts of one client, over inboxes of which the first is made at the first of them.

    `send(messages, fds, connected)` hands messages to the connection and raises DaemonUnavailable where there is none,
    or it is no longer `connected`; `connection()` gives the one there is. `refusal(key)`: why the daemon would store
    nothing under a key, as far as shared memory tells. `end()` ends the connection: `disconnected` is called.
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
        """Whether a signal handler's exception ended a put, and may have left it half done, until `disconnected`."""
        self.why_lost = WENT
        """Why there is no connection, for whoever loses a put by that."""
        self.inboxes = Inboxes(send, next_id, connection)

    @property
    def limits(self) -> ClientLimits:
        """What the daemon allows."""
        return self.inboxes.limits

    @limits.setter
    def limits(self, limits: ClientLimits) -> None:
        self.inboxes.limits = limits

    def put(self, key: bytes, payload: Payload, options: PutOptions, *, deadline: float) -> Put:
        """Copies `payload` into the inbox, part by part, each on its way to the daemon as soon as it is whole."""
        put = Put(key)
        try:
            self._check_generation(key)
            self._check_size(payload.payload_bytes)
            self._put(put, payload, options, deadline)
        except TensordError as error:
            self._end(put, _state_for(error), error)
        except BaseException:
            # First, and in one step: whatever becomes of the next line, the link's thread finds it.
            self.cut = True
            self._end_connection()
            raise
        return put

    def reserve(self, payload_bytes: int, deadline: float) -> Region:
        """A region for a payload that is produced in place.

        Raises:
            ObjectTooLarge, LimitReached, DaemonUnavailable, TimedOut: why there is none.
        """
        self._check_size(payload_bytes)
        return self.inboxes.region(payload_bytes, deadline)

    def commit(
        self, key: bytes, region: Region, payload_bytes: int, tree_bytes: int, options: PutOptions, *, deadline: float
    ) -> Put:
        """Sends a region that holds a whole payload; copies it first where its inbox was retired."""
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
        """The daemon needs a part's bytes no more, or a put has ended."""
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
        """A put, or an inbox, was answered with an error. False if the request was neither."""
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
        """The connection is gone: what stands whole in its inbox is sent again, once, when there is a new one.

        The daemon may carry out whatever it knows of, at any time: the inboxes of puts that were sent are retired.

        SYNC POINT: under one lock with the beginning of puts, and with the last look before a Commit is sent. So what
        was not whole when its inbox was retired, and is written on where nobody reads it, is never sent.

        After a put that was cut short nothing is sent again: all puts are lost, and all inboxes given up.
        """
        self.inboxes.disconnected()
        with self._lock:
            cut, self.cut = self.cut, False
            if cut:
                self.inboxes.start_over()
            hopeless = [p for p in self._pending.values() if cut or p.sent_again or not p.complete]
            for inbox in {p.inbox for p in self._pending.values() if p.sent}:
                self.inboxes.retire(inbox)
            # Whoever waits for their ends is told as well.
            self._lock.notify_all()
            for pending in hopeless:
                lost = DaemonUnavailable(CUT if cut else self.why_lost)
                self._settle(pending, "lost", lost)

    def send_again(self, send: Callable[..., None], connected: object) -> None:
        """There is a new connection: sends every put on it that nobody acknowledged, by `send`, and its inbox before.

        Raises:
            DaemonUnavailable: it is gone already.
        """
        with self._lock:
            again = [pending for pending in self._pending.values() if pending.complete]
            for pending in again:
                pending.sent_again = True
        for pending in again:
            self.inboxes.tell(pending.inbox, connected, send)
            # The claim it was made under died with the old connection.
            pending.commit = replace(pending.commit, claim=None, acks=False)
            send(pending.commit, *pending.parts)

    def close(self) -> None:
        """Ends all that is on its way, as lost."""
        self.why_lost = "the client was closed"
        with self._lock:
            # First: what the daemon may still read is written by nobody.
            self.inboxes.close()
            self._lock.notify_all()
            for pending in list(self._pending.values()):
                closed = DaemonUnavailable("the client was closed before the daemon answered")
                self._settle(pending, "lost", closed)

    def close_in_child(self) -> None:
        """After a fork: the inboxes, and what is on its way from them, are the parent's."""
        self.inboxes.close_in_child()
        for pending in self._pending.values():
            pending.put.disown()

    @property
    def in_flight(self) -> int:
        """Puts that are not acknowledged."""
        return len(self._pending)

    def _check_size(self, payload_bytes: int) -> None:
        if payload_bytes > self.limits.object_bytes_max:
            raise ObjectTooLarge(
                f"the payload has {payload_bytes} bytes, object_bytes_max is {self.limits.object_bytes_max}; "
                "raise it (and ring_bytes with it), or store the payload in pieces"
            )

    def _put(self, put: Put, payload: Payload, options: PutOptions, deadline: float) -> None:
        """Has a put begin, and copies its payload.

        Raises:
            TensordError: why it did not begin.
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
        """The put, from now on among those on their way; None where its inbox was retired."""
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

            def hopeless() -> bool:
                return connected is None or self._connection() is not connected

            self._lock.wait_for(lambda: len(self._pending) < most or hopeless(), max(0.0, deadline - time.monotonic()))
            if len(self._pending) >= most:
                if hopeless():
                    raise DaemonUnavailable(f"the daemon is away, and {most} puts wait for its answer")
                raise LimitReached(
                    f"commits_in_flight_max is {most}, and none of as many puts was acknowledged in time; "
                    "put less at once, or allow more time"
                )
            if inbox.retired:
                return None
            if not self.inboxes.knows(inbox):
                raise DaemonUnavailable(
                    "it was reserved by the process that this one was forked from: reserve again in this one"
                )
            self._pending[commit.id] = pending
        return pending

    def _copy(self, pending: Pending, payload: Payload, region: Region) -> None:
        """One region for the whole payload. Only what fits in one part waits with its Commit until it is copied."""
        size_bytes = payload.payload_bytes
        early = size_bytes >= 2 * PART_BYTES
        try:
            with region.held():
                memory = region.memory
                assert memory is not None
                if not self._hold(pending, region):
                    return
                if early:
                    # The daemon finds room while we copy the first part.
                    self._send_commit(pending)
                for start, stop in _parts(size_bytes, PART_BYTES):
                    if pending.put.state != "sent":
                        # It ended: the daemon wants the rest announced, and not to have it.
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
        """A region for each part, which is free again when the daemon has copied it."""
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
        """Gives the put a region, to be released with it; False where the put has ended meanwhile."""
        with self._lock:
            if pending.commit.id in self._pending:
                pending.regions[region.offset] = region
                return True
        region.release()
        return False

    def _send_commit(self, pending: Pending, *parts: messages.Part) -> None:
        """Sends its Commit, with parts, unless a new connection has taken up the whole, or it has ended: the daemon
        would count what nobody here does. Further parts go where the Commit went, or nowhere.

        SYNC POINT: the connection is looked at first. Whatever it was to take up, or the end of the one before was to
        end, is taken up or ended before it is given here; and if it is another by now, nothing is sent.

        Raises:
            DaemonUnavailable, TimedOut: it did not go.
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
        """Sending it failed here. Where a new connection has taken it up meanwhile, it is on its way all the same: the
        daemon counts it, and answers.
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
        """Raises Invalidated for a key of a past generation, before anything is copied for nothing."""
        refusal = self._refusal(key)
        if refusal is not None:
            raise refusal

    def _end(self, put: Put, state: PutState, error: TensordError | None) -> None:
        """Settles a put. That a namespace's results are not stored any more is logged once."""
        if isinstance(error, Invalidated) and put.key[:NAMESPACE_TAG_BYTES] not in self._invalidated:
            self._invalidated.add(put.key[:NAMESPACE_TAG_BYTES])
            _log.warning("tensord: %s", error)
        put.settle(state, error)


def _parts(size_bytes: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Stretches of about `part_bytes`, none much smaller: a last part of a few bytes would cost as much as a large."""
    count = max(1, size_bytes // part_bytes)
    step = aligned(-(-size_bytes // count))
    for start in range(0, size_bytes, step):
        yield start, min(start + step, size_bytes)


def _state_for(error: TensordError) -> PutState:
    return "lost" if isinstance(error, Unavailable) else "refused"
