"""All puts of one client: over the writer of the current connection, which the first put makes.

    attached ─ first put: may this user write into the ring? ─ yes: RingMemory ─┬→ Writer ─ the connection ends → none
                                                              └ no: an Inbox ───┘

Owns: which writer there is, the inbox of queries, and what the daemon says about puts.

Invariants: without a connection, or beside a daemon that does not answer, a put ends at once. While the interpreter
ends, no lock is waited for: the threads that held one do not run any more. A writer is used on its connection only.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from ...errors import DaemonUnavailable, Invalidated, Refusal, TensordError, TimedOut
from ...ipc.messages import control as messages
from ...ipc.wire.blocking import BlockingChannel
from ...ipc.wire.descriptors import no_descriptor
from ...shm.lanes.records import SUBMITTED_AT, Submissions
from ...shm.ring.layout import ASLEEP_AT, EPOCH_AT, LANE_PLACES
from ...shm.ring.segments import ring_not_mapped
from ..arguments.checks import check_key
from ..arguments.put_options import PutOptions
from ..threads.aside import aside
from .arena import Arena
from .memory import Inbox, RingMemory, WritableMemory
from .outcomes import Outcomes, Put
from .put import PutPayload, Writer, state_for
from .wire import Granted, Wire

if TYPE_CHECKING:
    from ..link.link import Link
    from ..reading.view import View

ENDING: Final = "the interpreter ends, and no thread takes the daemon's answer: put before the program ends"
WENT: Final = "the daemon went away before it acknowledged the payload"
OPEN_S: Final = 5.0
"""The most seconds that the daemon has to open the ring for writing, or an inbox."""
SHARE: Final = 64
"""One request asks for at most this part of the ring."""
_TOLD_MAX: Final = 1024
_log = logging.getLogger("tensord")


class PutAttachment(NamedTuple):
    """One attachment. `place`: of the lane, in the index's tables."""

    channel: BlockingChannel
    view: View
    place: int


class Puts:
    """The puts of one client. `writer`: what new puts go through; None before the first one, and without a daemon that
    answers. `why_lost`: why the connection ends."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.writer: Writer | None = None
        self.why_lost = WENT
        self._attached: PutAttachment | None = None
        self._opened: Writer | None = None
        """As `writer`, also while the daemon does not answer."""
        self._making = threading.Lock()
        """Held in threads that no signal handler interrupts."""
        self._inbox: tuple[PutAttachment, Inbox] | None = None
        self.query_lock = threading.RLock()
        """Held from the writing of a query to the daemon's answer."""
        self._told: set[str] = set()

    # ---- threads that put

    def put(self, put: Put, payload: PutPayload, options: PutOptions, deadline: float) -> None:
        """As `Writer.put`."""
        writer = self.writer
        # A channel that an exception of a signal handler has ended is renewed at once.
        if writer is None or writer.wire.channel.closed or sys.is_finalizing():
            try:
                writer = self._ready(deadline)
            except TensordError as error:
                put.settle(state_for(error), error)
                return
        writer.put(put, payload, options, deadline)

    def wait_for_own(self, key: bytes) -> bool:
        """Waits for this client's last put of a key (`Outcomes.wait_for_own`)."""
        writer = self.writer
        return writer is not None and writer.outcomes.wait_for_own(key if type(key) is bytes else check_key(key))

    @property
    def awaited(self) -> dict[bytes, Put]:
        """This client's puts by key for which a lookup waits."""
        writer = self.writer
        return writer.outcomes.awaited() if writer is not None and writer.outcomes.unsettled else {}

    def wait_for_puts(self, keys: Iterable[bytes] | None = None) -> None:
        """Waits for this client's puts, of these keys or of all, so that what it asks next is about them, too."""
        if (writer := self.writer) is not None and writer.outcomes.unsettled:
            writer.outcomes.wait_for_puts(keys)

    def query_inbox(self, deadline: float) -> tuple[BlockingChannel, Inbox]:
        """The connection, and an inbox that the daemon knows on it. The caller has `query_lock`. Raises TensordError if
        there is none."""

        def opened() -> tuple[BlockingChannel, Inbox]:
            with self._making:
                attached = self._current()
                if self._inbox is None or self._inbox[0] is not attached:
                    self._new_inbox(attached, 0, max(0.0, deadline - time.monotonic()))
                assert self._inbox is not None
                return attached.channel, self._inbox[1]

        return aside(opened)

    # ---- the connection's thread

    def attached(self, channel: BlockingChannel, view: View, place: int) -> None:
        """A new connection."""
        self._attached = PutAttachment(channel, view, place)
        self.why_lost = WENT

    def received(
        self, message: messages.GrantsLent | messages.PutRefused | messages.Settled | messages.PlacesWanted
    ) -> None:
        """Handles what the daemon says about puts."""
        writer = self._opened
        if writer is None:
            return
        match message:
            case messages.GrantsLent():
                grants = [Granted(*each) for each in message.places()]
                writer.arena.granted(message.id, grants, message.error.to_error() if message.error else None)
            case messages.PutRefused():
                error = message.error.to_error() if message.error is not None else None
                self._log(error)
                writer.outcomes.refused(message.number, error)
            case messages.PlacesWanted():
                writer.arena.give_back()
        writer.wire.rang()

    def refused(self, request: int, error: TensordError) -> None:
        """An error that answers a request of no caller: it may be one for grants."""
        if (writer := self._opened) is not None:
            writer.arena.granted(request, (), error)
            writer.wire.rang()

    def silent(self, error: TensordError | None) -> None:
        """The daemon has ceased to answer, for this reason; or, with None, it answers again."""
        if (writer := self._opened) is not None:
            writer.arena.away = error
            self.writer = writer if error is None else None
            writer.wire.rang()

    @property
    def waiting(self) -> bool:
        """Whether the daemon owes an answer to a put."""
        writer = self._opened
        return writer is not None and (writer.arena.waiting or writer.submissions.written > writer.outcomes.settled)

    def owed(self, put: Put, since_s: float) -> bool:
        """Whether the daemon has not answered a put that was begun then, by time.monotonic; or it had no place, and
        nothing has come from the daemon since."""
        late = isinstance(put.error, TimedOut) and not self._link.silence.has_heard_since(since_s)
        return put.state == "sent" or late

    def rest(self) -> None:
        """Called about once a second: gives back what is not needed."""
        if (writer := self._opened) is not None:
            writer.arena.rest()

    def ended(self, error: TensordError | None = None) -> None:
        """The connection has ended."""
        self._attached = None
        self.writer = self._inbox = None
        writer, self._opened = self._opened, None
        if writer is not None:
            writer.end(error or DaemonUnavailable(self.why_lost))
            writer.wire.rang()

    def disown(self) -> None:
        """In the child of a fork: the puts belong to the parent, and its memory is not the child's."""
        if (writer := self._opened) is not None:
            writer.disown()

    # ---- opening

    def _ready(self, deadline: float) -> Writer:
        """The writer, made if there is none. Raises TensordError if it cannot be made."""
        if sys.is_finalizing():
            raise DaemonUnavailable(ENDING)
        link = self._link
        link.start()
        link.attachment.wait_renewed(max(0.0, deadline - time.monotonic()))
        if not link.connected:
            raise link.unavailable()
        # Also for a put that waits for nothing: without a writer none would ever be stored.
        limit_s = max(deadline - time.monotonic(), link.silence.patience_s)
        return aside(partial(self._open, min(limit_s, OPEN_S)))

    def _open(self, limit_s: float) -> Writer:
        until = time.monotonic() + limit_s
        if not self._making.acquire(timeout=limit_s):
            raise TimedOut(f"the daemon at {self._link.path} did not let this process write in time")
        try:
            return self._made(self._current(), max(0.0, until - time.monotonic()))
        finally:
            self._making.release()

    def _made(self, attached: PutAttachment, limit_s: float) -> Writer:
        channel, view, place = attached
        if (writer := self._opened) is not None and writer.wire.channel is channel:
            self.writer = writer
            return writer
        words, geometry = view.index.words, view.geometry
        settled, refusals = (
            words[at >> 3 : (at >> 3) + LANE_PLACES] for at in (geometry.settled_at, geometry.refusals_at)
        )
        asleep = words[ASLEEP_AT >> 3 : (ASLEEP_AT >> 3) + 1]
        lane_words, queue = view.lane.words, view.lane.queue
        if view.lane.frozen:
            raise DaemonUnavailable("this process forked while it attached")
        submissions = Submissions(lane_words, SUBMITTED_AT, queue, settled, place, asleep)
        memory = self._memory(attached, submissions, limit_s)
        wire = Wire(channel, asleep, self._link.next_id)
        outcomes = Outcomes(lane_words, settled, refusals, place, wire, words[EPOCH_AT >> 3 : (EPOCH_AT >> 3) + 1])
        arena = Arena(memory, wire, view.ring_bytes // SHARE)
        writer = Writer(memory, arena, submissions, outcomes, wire, self._link.limits.object_bytes_max)
        self._opened = self.writer = writer
        # SYNC POINT: `ended` forgets the attachment first, and then ends the writer.
        if self._attached is not attached:
            self.ended(self._link.unavailable())
            raise self._link.unavailable()
        return writer

    def _memory(self, attached: PutAttachment, submissions: Submissions, limit_s: float) -> WritableMemory:
        """The ring, if the daemon allows to write into it; else an inbox."""
        view = attached.view
        try:
            # Not kept: a refusal has this frame in its traceback, and would find itself from there.
            fds = self._link.answers.wait(
                self._link.ask(messages.OpenRing, limit_s, connected=attached.channel), limit_s
            )
        except Refusal:
            return self._new_inbox(
                attached, view.mapped_bytes, limit_s, lambda: (submissions.written, submissions.settled)
            )
        try:
            return RingMemory(fds[0], view.lane, view.index)
        except OSError as error:
            raise (no_descriptor() if error.errno == errno.EMFILE else ring_not_mapped(view.mapped_bytes)) from None
        finally:
            for fd in fds:
                os.close(fd)

    def _new_inbox(
        self,
        attached: PutAttachment,
        ring_bytes: int,
        timeout_s: float,
        progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> Inbox:
        # A new one for each connection: a former daemon may read the former inbox still.
        inbox = Inbox(ring_bytes, progress)
        request = partial(messages.OpenInbox, inbox_bytes=inbox.size_bytes)
        self._link.answers.wait(
            self._link.ask(request, timeout_s, connected=attached.channel, fds=(inbox.fd,)), timeout_s
        )
        self._inbox = attached, inbox
        return inbox

    def _current(self) -> PutAttachment:
        attached = self._attached
        if attached is None or self._link.connection is not attached.channel:
            raise self._link.unavailable()
        return attached

    def _log(self, error: TensordError | None) -> None:
        """Once for each namespace and generation whose puts are refused."""
        if isinstance(error, Invalidated) and str(error) not in self._told and len(self._told) < _TOLD_MAX:
            self._told.add(str(error))
            _log.warning("tensord: %s", error)
