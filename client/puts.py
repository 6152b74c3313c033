"""The way of a put: describe the payload, copy it into the inbox, say Commit; the daemon does the rest.

Owns: puts on their way, and the inbox regions they hold until they are acknowledged. Does not own the connection, nor
the decision what is stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from msgspec.structs import replace

from ..errors import DaemonUnavailable, Invalidated, LimitReached, ObjectTooLarge, TensordError, TimedOut, Unavailable
from ..ipc import messages
from ..shm.layout import NAMESPACE_TAG_BYTES, aligned
from ..shm.tree import Image
from .inbox import Inbox, Region
from .terms import Terms

# A payload is sent in parts of this size, so that the daemon copies the first while we copy the next.
PART_BYTES: Final = 4 << 20

_log = logging.getLogger("tensord")

PutState = Literal["sent", "stored", "existed", "refused", "lost"]


class Put:
    """What became of a put. `state` is

    - "sent": on its way; the caller may go on, and change what it put.
    - "stored": every process on the host can read it.
    - "existed": the key was there already; nothing was changed.
    - "refused": the daemon said no, and `error` says why.
    - "lost": no daemon that we may use, or it went away, or nobody took it in time; `error` says which.
    """

    __slots__ = ("_settled", "error", "key", "state")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.state: PutState = "sent"
        self.error: TensordError | None = None
        self._settled = threading.Event()

    def wait(self, timeout_s: float | None = None) -> Self:
        """Waits until it is known what became of it.

        Raises:
            TimedOut: it is not known after `timeout_s`; the put goes on.
        """
        if not self._settled.wait(timeout_s):
            raise TimedOut(f"the put of {self.key.hex()[:16]}… was not acknowledged within {timeout_s} s; it goes on")
        return self

    def settle(self, state: PutState, error: TensordError | None = None) -> None:
        """Says what became of it. For the library."""
        self.state, self.error = state, error
        self._settled.set()

    def disown(self) -> None:
        """In the child of a fork: the put is the parent's. Takes no lock that a thread of the parent may hold."""
        self._settled = threading.Event()
        self.settle("lost", DaemonUnavailable("this process was forked off while the put was on its way"))

    def __repr__(self) -> str:
        return f"Put({self.key.hex()[:16]}…, {self.state}{f', {self.error!r}' if self.error else ''})"


@dataclass(slots=True)
class Pending:
    """A put that is not acknowledged. It can be sent again as long as its whole image stands in the inbox.

    `connected`: where its own thread has sent its Commit.
    """

    put: Put
    commit: messages.Commit
    regions: dict[int, Region]
    parts: list[messages.Part] = field(default_factory=list)
    whole: bool = True
    sent_again: bool = False
    connected: object | None = None

    @property
    def complete(self) -> bool:
        """Whether all of it stands in the inbox, and was sent."""
        return self.whole and bool(self.parts) and self.parts[-1].last


class Puts:
    """All puts of one client, over one inbox that is made at the first of them.

    `send(messages, fds, connected)` hands messages to the connection and raises DaemonUnavailable where there is none,
    or it is no longer `connected`; `connection()` gives the one there is. `refusal(key)`: why the daemon would store
    nothing under a key, as far as shared memory tells.
    """

    def __init__(
        self,
        send: Callable[..., None],
        next_id: Callable[[], int],
        connection: Callable[[], object | None],
        refusal: Callable[[bytes], TensordError | None],
    ) -> None:
        self._send = send
        self._refusal = refusal
        self._invalidated: set[bytes] = set()
        self._connection = connection
        self._next_id = next_id
        self._lock = threading.Condition()
        self._pending: dict[int, Pending] = {}
        self._inbox: Inbox | None = None
        self._prefaulted: Inbox | None = None
        self._inbox_request = 0
        self._inbox_refused: TensordError | None = None
        self.limits = messages.Limits()

    def put(self, key: bytes, image: Image, terms: Terms, *, deadline: float) -> Put:
        """Copies `image` into the inbox, part by part, each on its way to the daemon as soon as it is whole."""
        put = Put(key)
        try:
            self._check_generation(key)
            inbox = self._open_inbox(image.image_bytes)
            # A payload that takes more than half of the inbox is streamed through it.
            streamed = aligned(image.image_bytes) > inbox.size_bytes // 2
            pending = self._begin(put, inbox, image.image_bytes, len(image.header), terms, deadline, streamed=streamed)
        except TensordError as error:
            self._end(put, _state_for(error), error)
            return put
        try:
            if streamed:
                self._stream(pending, image, inbox, deadline)
            else:
                self._copy(pending, image, inbox, deadline)
        except TensordError as error:
            self._not_sent(pending, error)
        return put

    def reserve(self, image_bytes: int, deadline: float) -> Region:
        """A region for a payload that is produced in place.

        Raises:
            ObjectTooLarge, LimitReached, DaemonUnavailable, TimedOut: why there is none.
        """
        inbox = self._open_inbox(image_bytes)
        if aligned(image_bytes) > inbox.size_bytes:
            raise ObjectTooLarge(
                f"a reservation of {image_bytes} bytes does not fit in the inbox of {inbox.size_bytes}; "
                "put it instead, which streams, or raise inbox_bytes_max"
            )
        return self._region(inbox, image_bytes, deadline)

    def has(self, region: Region) -> bool:
        """Whether a region is of the inbox that the daemon reads from now."""
        return region.inbox is self._inbox

    def commit(
        self, key: bytes, region: Region, image_bytes: int, tree_bytes: int, terms: Terms, *, deadline: float
    ) -> Put:
        """Sends a region that holds a whole image."""
        put = Put(key)
        try:
            self._check_generation(key)
            pending = self._begin(put, region.inbox, image_bytes, tree_bytes, terms, deadline)
        except TensordError as error:
            region.release()
            self._end(put, _state_for(error), error)
            return put
        if not self._hold(pending, region):
            return put
        pending.parts.append(messages.Part(pending.commit.id, region.offset, image_bytes, True))
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
        """A put, or the inbox, was answered with an error. False if the request was neither."""
        if request == self._inbox_request:
            self._give_inbox_up(error)
            return True
        with self._lock:
            pending = self._pending.get(request)
        if pending is None:
            return False
        self._settle(pending, "refused", error)
        return True

    def opened(self, request: int) -> None:
        """A request was answered with Done: if it told the daemon of the inbox, that is worth mapping in now."""
        inbox = self._inbox
        if inbox is not None and inbox is not self._prefaulted and request == self._inbox_request:
            self._prefaulted = inbox
            threading.Thread(target=inbox.prefault, name="tensord-prefault", daemon=True).start()

    def disconnected(self) -> None:
        """The connection is gone: what stands whole in the inbox is sent again, once, when there is a new one."""
        with self._lock:
            hopeless = [p for p in self._pending.values() if p.sent_again or not p.complete]
        for pending in hopeless:
            self._settle(pending, "lost", DaemonUnavailable("the daemon went away while the payload was on its way"))

    def send_again(self, send: Callable[..., None]) -> None:
        """There is a new connection: tells it of the inbox, and of every put that nobody acknowledged, by `send`.

        Raises:
            DaemonUnavailable: it is gone already.
        """
        if self._inbox is None:
            return
        self._tell_inbox(self._inbox, send)
        with self._lock:
            again = [pending for pending in self._pending.values() if pending.complete]
            for pending in again:
                pending.sent_again = True
        for pending in again:
            # The claim it was made under died with the old connection.
            pending.commit = replace(pending.commit, claim=None, acks=False)
            send(pending.commit, *pending.parts)

    def close(self) -> None:
        """Ends all that is on its way, as lost."""
        with self._lock:
            left = list(self._pending.values())
        for pending in left:
            self._settle(pending, "lost", DaemonUnavailable("the client was closed before the daemon answered"))
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None

    def close_in_child(self) -> None:
        """After a fork: the inbox, and what is on its way from it, are the parent's."""
        if self._inbox is not None:
            self._inbox.close()
        for pending in self._pending.values():
            pending.put.disown()

    @property
    def in_flight(self) -> int:
        """Puts that are not acknowledged."""
        return len(self._pending)

    def _open_inbox(self, image_bytes: int) -> Inbox:
        if image_bytes > self.limits.object_bytes_max:
            raise ObjectTooLarge(
                f"the payload has {image_bytes} bytes, object_bytes_max is {self.limits.object_bytes_max}; "
                "raise it (and ring_bytes with it), or store the payload in pieces"
            )
        with self._lock:
            if self._inbox is None:
                inbox = Inbox(self.limits.inbox_bytes_max)
                try:
                    self._inbox = inbox
                    self._tell_inbox(inbox, self._send)
                except TensordError:
                    self._inbox = None
                    inbox.close()
                    raise
            return self._inbox

    def _tell_inbox(self, inbox: Inbox, send: Callable[..., None]) -> None:
        self._inbox_request = self._next_id()
        send(messages.OpenInbox(self._inbox_request, inbox.size_bytes), fds=(inbox.fd,))

    def _give_inbox_up(self, error: TensordError) -> None:
        """The daemon did not take it: what stands there is refused for that reason, and the next put brings another."""
        with self._lock:
            inbox, self._inbox, self._inbox_refused = self._inbox, None, error
            left = list(self._pending.values())
        for pending in left:
            self._settle(pending, "refused", error)
        if inbox is not None:
            inbox.close()

    def _begin(
        self,
        put: Put,
        inbox: Inbox,
        image_bytes: int,
        tree_bytes: int,
        terms: Terms,
        deadline: float,
        *,
        streamed: bool = False,
    ) -> Pending:
        commit = messages.Commit(
            self._next_id(),
            put.key,
            image_bytes,
            tree_bytes,
            terms.tokens,
            terms.ttl_s,
            terms.claim,
            streamed,
            terms.cost_ms,
            terms.agent,
            terms.prefix_bytes,
            terms.follows,
        )
        pending = Pending(put, commit, {}, whole=not streamed)
        most = self.limits.commits_in_flight_max
        with self._lock:
            if not self._lock.wait_for(lambda: len(self._pending) < most, max(0.0, deadline - time.monotonic())):
                raise LimitReached(
                    f"commits_in_flight_max is {most}, and none of as many puts was acknowledged in time; "
                    "put less at once, or allow more time"
                )
            if inbox is not self._inbox:
                # Its bytes would be looked for in another inbox, or in none.
                raise self._inbox_refused or DaemonUnavailable("the inbox it stands in was given up")
            self._pending[commit.id] = pending
        return pending

    def _region(self, inbox: Inbox, size_bytes: int, deadline: float) -> Region:
        region = inbox.take(size_bytes, deadline)
        if region is None:
            raise TimedOut(
                f"no {size_bytes} bytes came free in the inbox of {inbox.size_bytes} in time: arrays from reserve() "
                "that still live hold their part of it"
            )
        return region

    def _copy(self, pending: Pending, image: Image, inbox: Inbox, deadline: float) -> None:
        """One region for the whole image. Only what fits in one part waits with its Commit until it is copied."""
        size_bytes = image.image_bytes
        if size_bytes >= 2 * PART_BYTES:
            # The daemon finds room while we copy the first part.
            self._send_commit(pending)
        region = self._region(inbox, size_bytes, deadline)
        with region.held():
            memory = region.memory
            assert memory is not None
            if not self._hold(pending, region):
                self._send_part(pending, messages.Part(pending.commit.id, 0, size_bytes, True))
                return
            for start, stop in _parts(size_bytes, PART_BYTES):
                if pending.put.state != "sent":
                    # It ended: the daemon wants the rest announced, and not to have it.
                    rest = messages.Part(pending.commit.id, region.offset + start, size_bytes - start, True)
                    self._send_part(pending, rest)
                    return
                image.write_range(memory[start:stop], start, stop)
                part = messages.Part(pending.commit.id, region.offset + start, stop - start, stop == size_bytes)
                pending.parts.append(part)
                if size_bytes >= 2 * PART_BYTES:
                    self._send_part(pending, part)
                else:
                    self._send_commit(pending, part)

    def _stream(self, pending: Pending, image: Image, inbox: Inbox, deadline: float) -> None:
        """A region for each part, which is free again when the daemon has copied it."""
        self._send_commit(pending)
        size_bytes = image.image_bytes
        part_bytes = min(PART_BYTES, inbox.size_bytes // 8)
        for start, stop in _parts(size_bytes, part_bytes):
            region = self._region(inbox, stop - start, deadline)
            with region.held():
                memory = region.memory
                assert memory is not None
                if not self._hold(pending, region):
                    self._send_part(pending, messages.Part(pending.commit.id, 0, size_bytes - start, True))
                    return
                image.write_range(memory, start, stop)
                part = messages.Part(pending.commit.id, region.offset, stop - start, stop == size_bytes)
                self._send_part(pending, part)

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
            raise DaemonUnavailable("the daemon went away while the payload was on its way")
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
