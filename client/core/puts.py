"""The path of a put: describe the payload, copy it into the inbox, send a Commit. The daemon copies it into the ring.

Owns: the copy of a payload, and the order of the messages that announce it. Does not own: puts in flight and their
outcomes (in_flight.py), the connection (link.py), the inboxes (inboxes.py), nor the decision whether a payload is
stored (the daemon's).
Invariants: no byte of a put is announced before it is copied. While the interpreter ends, no lock is waited for: the
threads that held one do not run any more, and the daemon's answers reach nobody.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from threading import get_ident
from typing import Any, Final

from msgspec.structs import replace

from ...errors import DaemonUnavailable, ObjectTooLarge, TensordError
from ...ipc import messages
from ...shm.layout import aligned
from ...shm.payload import Leaf, Payload
from . import nested
from .in_flight import PutsInFlight, state_for
from .in_place import InPlacePuts
from .inbox import Bytes, Inbox, Region
from .inboxes import Inboxes, no_room
from .put import Pending
from .put import Put as Put
from .put import PutState as PutState
from .put_options import PutOptions
from .ring_writer import IN_PLACE_BYTES as IN_PLACE_BYTES
from .view import View

# A payload is sent in parts of this size, so that the daemon copies one part while this process copies the next.
PART_BYTES: Final = 4 << 20
TOGETHER_MAX: Final = 32
"""The Commits that `put_many` sends together."""
ENDING: Final = "the interpreter ends, and no thread takes the daemon's answer: put before the program ends"


class PutSender:
    """Makes all puts of one client. The first put creates the first inbox.

    Args:
        send: `send(*messages, fds, connected)` hands messages to the connection. Raises DaemonUnavailable if there is
            none, or it is not `connected`.
        next_id: returns the next request id.
        connection: returns the current connection, or None.
        refusal: returns why the daemon would refuse a key, as far as shared memory shows; None if it would not.
        end: ends the connection, after which `in_flight.disconnected` is called.
        ask, view: as for `InPlacePuts`. Without `ask`, all puts go through the inbox.
    """

    def __init__(
        self,
        send: Callable[..., None],
        next_id: Callable[[], int],
        connection: Callable[[], object | None],
        refusal: Callable[[bytes], TensordError | None],
        end: Callable[[], None] = lambda: None,
        *,
        ask: Callable[..., Future[Any]] | None = None,
        view: Callable[[], View | None] = lambda: None,
    ) -> None:
        self._send = send
        self._refusal = refusal
        self._connection = connection
        self._next_id = next_id
        self._end_connection = end
        self.inboxes = Inboxes(send, next_id, connection)
        self.in_flight = PutsInFlight(self.inboxes, connection)
        self._in_place: InPlacePuts | None = None
        if ask is not None:
            self._in_place = InPlacePuts(send, next_id, ask, connection, view, self.in_flight)

    def put(self, key: bytes, payload: Payload, options: PutOptions, *, deadline: float) -> Put:
        """Copies `payload`, and sends its Commit. A large payload is copied into the inbox part by part, and each part
        is sent as soon as it is copied."""
        put = Put(key)
        self.put_many([(put, payload, options)], deadline=deadline)
        return put

    def put_many(self, puts: Iterable[tuple[Put, Payload, PutOptions]], *, deadline: float) -> None:
        """As `put`, for many payloads. The Commits of small ones are sent together. All are refused within another put
        of this thread, which a signal handler has interrupted, and lost while the interpreter ends."""
        if sys.is_finalizing():
            for put, _, _ in puts:
                self.in_flight.end(put, "lost", DaemonUnavailable(ENDING))
            return
        if nested.within(self):
            for put, _, _ in puts:
                self.in_flight.end(put, "refused", nested.refusal())
            return
        here = (get_ident(), self)
        unsent: list[Pending] = []
        try:
            nested.under_way.add(here)
            for put, payload, options in puts:
                try:
                    self._check_generation(put.key)
                    self._check_size(payload.payload_bytes)
                    # Before the daemon hears of the put. An error afterwards may end the connection.
                    payload.check()
                    self._put(put, payload, options, deadline, unsent)
                except TensordError as error:
                    self.in_flight.end(put, state_for(error), error)
                if len(unsent) >= TOGETHER_MAX:
                    self._send_copied(unsent)
            self._send_copied(unsent)
        except BaseException:
            # This assignment comes first, as one atomic step: even if the next line is interrupted, the link's thread
            # sees the flag.
            self.in_flight.cut = True
            self._end_connection()
            raise
        finally:
            nested.under_way.discard(here)

    def reserve(self, payload_bytes: int, deadline: float) -> Region:
        """Returns a region for a payload that is produced in place.

        Raises:
            ObjectTooLarge, LimitReached, DaemonUnavailable, TimedOut: no region; the message says why.
        """
        if sys.is_finalizing():
            raise DaemonUnavailable(ENDING)
        self._check_size(payload_bytes)
        return self.inboxes.region(payload_bytes, deadline)

    def commit(
        self, key: bytes, region: Region, payload_bytes: int, tree_bytes: int, options: PutOptions, *, deadline: float
    ) -> Put:
        """Sends a region that holds a whole payload. Copies the payload first if the region's inbox was retired."""
        put = Put(key)
        if sys.is_finalizing():
            # The region ends with the process.
            self.in_flight.end(put, "lost", DaemonUnavailable(ENDING))
            return put
        try:
            self._check_generation(key)
            pending = self._begin(put, region.inbox, payload_bytes, tree_bytes, options, deadline)
            if pending is None:
                payload = region.bytes(payload_bytes)
                rest = Leaf(tree_bytes, payload_bytes - tree_bytes, payload[tree_bytes:])
                whole = Payload(payload[:tree_bytes].tobytes(), [rest], payload_bytes)
                unsent: list[Pending] = []
                self._put(put, whole, options, deadline, unsent)
                self._send_copied(unsent)
        except TensordError as error:
            pending = None
            self.in_flight.end(put, state_for(error), error)
        if pending is None:
            region.release()
            return put
        if not self.in_flight.hold(pending, region):
            return put
        self._send_copied([self._copied(pending, region)])
        return put

    # ---- the connection's thread

    def received(self, message: messages.SpanTaken | messages.PartCopied | messages.Committed) -> None:
        """Handles the daemon's answers to puts."""
        if isinstance(message, messages.SpanTaken):
            if self._in_place is not None:
                self._in_place.spans.given(message)
            return
        self.in_flight.acknowledged(message)
        if self._in_place is not None:
            self._in_place.ask_ahead()

    def refused(self, request: int, error: TensordError) -> bool:
        """Handles an error that answers a put, a TakeSpan or an OpenInbox. Returns False if `request` is none of
        these."""
        if self._in_place is not None and self._in_place.spans.refused(request):
            return True
        return self.in_flight.refused(request, error)

    def disconnected(self) -> None:
        """The connection ended: see `PutsInFlight.disconnected`. The spans that it gave are forgotten."""
        if self._in_place is not None:
            self._in_place.spans.disconnected()
        self.in_flight.disconnected()

    def tidy(self) -> None:
        """Gives up memory that is not needed any more: spans, and former inboxes."""
        self.inboxes.tidy()
        if self._in_place is not None:
            self._in_place.tidy()

    # ---- the thread that puts

    def _check_size(self, payload_bytes: int) -> None:
        if payload_bytes > self.inboxes.limits.object_bytes_max:
            raise ObjectTooLarge(
                f"the payload has {payload_bytes} bytes, object_bytes_max is {self.inboxes.limits.object_bytes_max}; "
                "raise it (and ring_bytes with it), or split the payload over several keys"
            )

    def _put(self, put: Put, payload: Payload, options: PutOptions, deadline: float, unsent: list[Pending]) -> None:
        """Begins a put and copies its payload. Sends its messages, or adds it to `unsent`, the copied puts whose
        Commits are still to be sent. They are sent before anything is waited for, and before the messages of this put.

        Raises:
            TensordError: the put did not begin.
        """
        size_bytes, tree_bytes = payload.payload_bytes, len(payload.header)
        if size_bytes >= IN_PLACE_BYTES:
            self._send_copied(unsent)
            commit = partial(self._commit, put, size_bytes, tree_bytes, options)
            in_place = self._in_place
            if in_place is not None and in_place.put(
                lambda span: Pending(put, commit(span=span), None, whole=False), payload, deadline, options.parent
            ):
                return
        while True:
            inbox = self.inboxes.fit(size_bytes)
            if len(self.in_flight) >= self.inboxes.limits.commits_in_flight_max:
                self._send_copied(unsent)
            if aligned(size_bytes) > inbox.size_bytes // 2:
                # A payload that takes more than half of the inbox is streamed through it.
                self._send_copied(unsent)
                with inbox.streaming():
                    pending = self._begin(put, inbox, size_bytes, tree_bytes, options, deadline, whole=False)
                    if pending is not None:
                        self._stream(pending, payload, deadline)
                        return
                continue
            region = inbox.take(size_bytes, 0.0) if unsent else None
            if region is None:
                self._send_copied(unsent)
                region = self.inboxes.region(size_bytes, deadline, inbox)
            try:
                pending = self._begin(put, region.inbox, size_bytes, tree_bytes, options, deadline)
            except BaseException:
                region.release()
                raise
            if pending is not None:
                self._copy(pending, payload, region, unsent)
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
        commit = self._commit(put, payload_bytes, tree_bytes, options, acks=not whole, inbox=inbox.number)
        pending = Pending(put, commit, inbox, whole=whole)
        return pending if self.in_flight.begin(pending, deadline) else None

    def _commit(
        self, put: Put, payload_bytes: int, tree_bytes: int, options: PutOptions, **more: Any
    ) -> messages.Commit:
        return messages.Commit(
            self._next_id(),
            put.key,
            payload_bytes,
            tree_bytes,
            options.tokens,
            options.ttl_s,
            options.claim,
            cost_ms=options.cost_ms,
            agent=options.agent,
            prefix_bytes=options.prefix_bytes,
            parent=options.parent,
            **{"acks": False, **more},
        )

    def _copy(self, pending: Pending, payload: Payload, region: Region, unsent: list[Pending]) -> None:
        """Copies the payload into one region. A payload of two parts or more sends its Commit before the first copy; a
        smaller one is added to `unsent`."""
        try:
            with region.held():
                memory = region.memory
                assert memory is not None
                if not self.in_flight.hold(pending, region):
                    return
                if payload.payload_bytes >= 2 * PART_BYTES:
                    self._copy_in_parts(pending, payload, region, memory)
                elif pending.put.state == "sent":
                    payload.write_range(memory[: payload.payload_bytes], 0, payload.payload_bytes)
                    unsent.append(self._copied(pending, region))
        except TensordError as error:
            self.in_flight.not_sent(pending, error)

    def _copy_in_parts(self, pending: Pending, payload: Payload, region: Region, memory: Bytes) -> None:
        """Copies the payload into `memory`, the bytes of `region`. The daemon allocates a span while this process
        copies the first part."""
        number, size_bytes = pending.commit.id, payload.payload_bytes
        self._send_commits(pending)
        for start, stop in _parts(size_bytes, PART_BYTES):
            if pending.put.state != "sent":
                # The put has ended. The daemon expects every part to be announced, but needs no more bytes.
                self._send_part(pending, messages.Part(number, region.offset + start, size_bytes - start, True))
                return
            self._write_part(pending, payload, memory[start:stop], start, stop)
            part = messages.Part(number, region.offset + start, stop - start, stop == size_bytes)
            pending.parts.append(part)
            self._send_part(pending, part)

    def _copied(self, pending: Pending, region: Region) -> Pending:
        """Names the region where the whole payload stands in the put's Commit. The put can be sent from now on."""
        pending.commit = replace(pending.commit, at=region.offset)
        return pending

    def _stream(self, pending: Pending, payload: Payload, deadline: float) -> None:
        """Copies the payload through the inbox, with one region for each part. The daemon's PartCopied frees the
        region.
        """
        inbox, size_bytes = pending.inbox, payload.payload_bytes
        assert inbox is not None, "a streamed put has an inbox"
        part_bytes = min(PART_BYTES, inbox.size_bytes // 8)
        try:
            self._send_commits(pending)
            for start, stop in _parts(size_bytes, part_bytes):
                region = inbox.take(stop - start, deadline)
                if region is None:
                    if inbox.retired:
                        raise DaemonUnavailable(self.in_flight.why_lost)
                    raise no_room(inbox, stop - start)
                with region.held():
                    memory = region.memory
                    assert memory is not None
                    if not self.in_flight.hold(pending, region):
                        self._send_part(pending, messages.Part(pending.commit.id, 0, size_bytes - start, True))
                        return
                    self._write_part(pending, payload, memory, start, stop)
                    part = messages.Part(pending.commit.id, region.offset, stop - start, stop == size_bytes)
                    self._send_part(pending, part)
        except TensordError as error:
            self.in_flight.not_sent(pending, error)

    def _write_part(self, pending: Pending, payload: Payload, to: Bytes, start: int, stop: int) -> None:
        """Copies a part of a put whose Commit is sent. If that fails, the daemon would wait for the rest, so the
        connection ends, and with it what the daemon has of the put.

        Raises:
            TensordError: the payload is read from a device, and that failed; or the process has freed its memory.
        """
        try:
            payload.write_range(to, start, stop)
        except TensordError as error:
            self.in_flight.not_sent(pending, error)
            self._end_connection()
            raise

    def _send_copied(self, unsent: list[Pending]) -> None:
        """Sends the Commits of these puts together, and clears the list."""
        if not unsent:
            return
        try:
            self._send_commits(*unsent)
        except TensordError as error:
            for pending in unsent:
                self.in_flight.not_sent(pending, error)
        unsent.clear()

    def _send_commits(self, *puts: Pending) -> None:
        """Sends the puts' Commits. Leaves out a put that a new connection took over, and one that has ended: the daemon
        would count a put that this client does not wait for. Parts go on the same connection only.

        SYNC POINT: the connection is read first. If that connection's start was to send the put again, or its
        predecessor's end was to settle the put, it has happened before `send_on` asks. If the connection has
        changed by the time of the send, nothing is sent.

        Raises:
            DaemonUnavailable, TimedOut: the messages were not sent.
        """
        connected = self._connection()
        if connected is None:
            raise DaemonUnavailable(self.in_flight.why_lost)
        for pending in puts:
            assert pending.inbox is not None, "a put that is written in place has a path of its own"
            self.inboxes.tell(pending.inbox, connected, self._send)
        commits = [each.commit for each in puts if self.in_flight.send_on(each, connected)]
        if commits:
            self._send(*commits, connected=connected)

    def _send_part(self, pending: Pending, part: messages.Part) -> None:
        if pending.connected is not None:
            self._send(part, connected=pending.connected)

    def _check_generation(self, key: bytes) -> None:
        """Raises Invalidated for a key of a past generation, before any payload is copied."""
        refusal = self._refusal(key)
        if refusal is not None:
            raise refusal


def _parts(size_bytes: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of about `part_bytes`, of nearly equal size: a last part of a few bytes would cost as much
    as a full one.
    """
    count = max(1, size_bytes // part_bytes)
    step = aligned(-(-size_bytes // count))
    for start in range(0, size_bytes, step):
        yield start, min(start + step, size_bytes)
