"""The store actor: the only one that touches ring, index and lanes.

Turns what arrives in its inbox into the core's events, and carries the core's effects out. Knows no cache semantics:
what is stored, refused or evicted is the core's to say. What it tells about itself is in `store_report`.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_never

import numpy as np

from ...errors import DaemonUnavailable, LimitReached, NotEnoughMemory, TensordError
from ...ipc import messages
from ...ipc.declared import handlers, id_of
from ...ipc.schema import INBOXES_PER_CLIENT_MAX
from ...shm.clock import unix_at_boot_s
from ...shm.prefix import HEADER_BYTES, MEDIA_BYTES, MEDIA_MAX, TOKEN_BYTES, PrefixRecord
from ..config.config import Config
from ..copier import Copier
from ..core import effects, events
from ..core.host_memory import HostHolds, Pressed
from ..core.store import Store
from ..logs import logger
from ..segments import Segments
from .lane_room import LaneRoom
from .lanes import LaneJobs
from .mailbox import Mailbox
from .messages import (
    Deliver,
    Fenced,
    Grown,
    Happened,
    Joined,
    Left,
    MemoryRequest,
    Question,
    Reconfigured,
    Requested,
    Scrubbed,
    StoreMessage,
)
from .pump import Pump
from .store_report import StoreReport

_log = logger("store")


class StoreActor:
    """Owns `inbox`. `clock` gives the seconds of `shm.clock`, `unix_at_zero` the Unix time at their zero;
    `tell_watchers` and `tell_governor` must not block.
    """

    def __init__(
        self,
        store: Store,
        memory: Segments,
        config: Config,
        *,
        clock: Callable[[], float],
        tell_watchers: Callable[[Happened], object],
        tell_governor: Callable[[HostHolds], object] = lambda _: None,
        unix_at_zero: Callable[[], float] = unix_at_boot_s,
    ) -> None:
        self.inbox: Mailbox[StoreMessage] = Mailbox(config.queues.store_inbox_max)
        self._store = store
        self._memory = memory
        self._config = config
        self._clock = clock
        self._tell_watchers = tell_watchers
        self._tell_governor = tell_governor
        self._clients: dict[int, Joined] = {}
        # How many copies of each client the copier's thread has.
        self._copying: Counter[int] = Counter()
        self._pump = Pump(self.inbox, self._receive, clock)
        self._lane_room = LaneRoom()
        self._loop = loop = asyncio.get_running_loop()
        # One at a time: the kernel has one lock for all changes to a file's pages.
        self._pages = ThreadPoolExecutor(1, "tensord-pages")
        self._copier = Copier(
            memory.ring,
            config.limits.tree_depth_max,
            lambda copied: loop.call_soon_threadsafe(self.inbox.tell_now, copied),
        )
        self._report = StoreReport(
            store,
            memory,
            config,
            self._copier,
            self._clients,
            self._lane_room,
            clock=clock,
            unix_at_zero=unix_at_zero,
            waiting=lambda: len(self.inbox),
        )
        self._lanes = LaneJobs(
            memory,
            clock=clock,
            handle=self._handle,
            begin=self._pump.begin,
            report=lambda fenced: loop.call_soon_threadsafe(self.inbox.tell_now, fenced),
        )

        memory_requests: dict[type[Any], Callable[[Joined, Any, Sequence[int]], None]] = {
            messages.Attach: self._attach,
            messages.OpenInbox: self._open_inbox,
            messages.CloseInbox: self._close_inbox,
        }
        self._memory_requests = handlers(messages.AttachmentRequest, memory_requests)
        prefix_requests: dict[type[Any], Callable[[int, Any], None]] = {messages.MatchPrefix: self._match}
        self._prefix_requests = handlers(messages.PrefixRequest, prefix_requests)

    @property
    def ring_bytes(self) -> int:
        """What the ring may take once it is grown."""
        return self._memory.superblock.limit_bytes

    @property
    def max_entries(self) -> int:
        """How many entries there may be."""
        return self._memory.superblock.max_entries

    @property
    def settled(self) -> bool:
        """Whether all messages are taken up, and no put whose last part has come is unanswered."""
        return not (len(self.inbox) or any(put.whole for put in self._store.intake.puts))

    async def run(self) -> None:
        """Serves until it is cancelled; then waits for the copies under way, so that whole commits are kept."""
        self._copier.start()
        try:
            while True:
                idle_s = self._keep_time()
                if idle_s > 0 and not self._pump.busy:
                    await self.inbox.wait(idle_s)
                self._pump.turn()
                # Answers go out before what may wait is done, such as counting the uses of what was matched; and
                # everybody else on the loop gets a turn.
                await asyncio.sleep(0)
        finally:
            await self._finish()

    def _keep_time(self) -> float:
        """Does what is due; seconds until something is due again, which may be none, or less."""
        now = self._clock()
        timer = self._store.next_timer()
        if timer is not None and timer <= now:
            self._handle(events.Tick())
            timer = self._store.next_timer()
        self._lanes.keep_time(now)
        due = self._lanes.timer
        return (due if timer is None else min(due, timer)) - now

    def _receive(self, message: StoreMessage) -> None:
        match message:
            case Requested(client, request, counted):
                if client not in self._clients:
                    return
                if isinstance(request, messages.PrefixRequest):
                    self._prefix_requests[type(request)](client, request)
                else:
                    self._handle(events.Received(client, request, counted))
            case events.Copied(client):
                self._copying[client] -= 1
                if not self._copying[client]:
                    del self._copying[client]
                self._handle(message)
            case Pressed() | events.Punched() | events.Allocated() | events.Moved():
                self._handle(message)
            case effects.Copy():
                self._handle(self._copier.copy_now(message))
            case Joined():
                self._clients[message.client] = message
                self._handle(events.ClientJoined(message.client, message.peer.uid, message.name))
            case MemoryRequest():
                self._serve_memory(message)
            case Left(client):
                if self._clients.pop(client, None) is not None:
                    self._memory.orphan(client)
                    self._handle(events.ClientLeft(client))
            case Grown():
                self._grow(message)
            case Scrubbed():
                self._scrubbed(message)
            case Fenced():
                self._lanes.fenced(message)
            case Question():
                self._answer(message)
            case Reconfigured(limits, config):
                self._config = self._report.config = config
                self._handle(events.LimitsChanged(limits))
            case _:
                assert_never(message)

    def _handle(self, event: events.Event) -> None:
        """One event through the core, and its effects out. What they bring about comes later, as a message or job."""
        for effect in self._store.handle(event, self._clock()):
            match effect:
                case effects.Send(client, message):
                    self._send(client, Deliver(message))
                case effects.Copy():
                    # A client's copies are done in their order. And where others wait, the worker is quicker: it copies
                    # many in a row.
                    busy = len(self.inbox) or self._copying[effect.client]
                    if not busy and self._copier.is_small(effect):
                        self.inbox.tell_now(effect)
                    else:
                        self._copying[effect.client] += 1
                        self._copier.copy(effect)
                case effects.Move():
                    self._copier.copy(effect)
                case effects.WriteExpiry(offset, expires_s):
                    self._memory.write_expiry(offset, expires_s)
                case effects.Drain():
                    self._lanes.drain()
                case effects.Scan():
                    self._lanes.scan()
                case effects.Punch() | effects.Allocate():
                    self._pages.submit(self._carry_out, effect)
                case HostHolds():
                    self._tell_governor(effect)
                case effects.Discard(client, put_id):
                    self._copier.discard(client, put_id)
                case effects.Forget(client):
                    self._copier.close_inbox(client)
                case effects.Announce(body):
                    self._tell_watchers(Happened(body))
                case effects.Again(client, request, counted):
                    self.inbox.tell_first(Requested(client, request, counted), (self._clients[client].peer.uid, client))
                case _:
                    assert_never(effect)

    def _match(self, client: int, query: messages.MatchPrefix) -> None:
        """Takes a query out of the client's inbox, who may write there meanwhile: what was copied is what is asked."""
        try:
            tokens_max = self._config.limits.prefix_tokens_max
            if query.query_bytes > HEADER_BYTES + MEDIA_MAX * MEDIA_BYTES + tokens_max * TOKEN_BYTES:
                raise LimitReached(
                    f"a query of {query.query_bytes} bytes, and prefix_tokens_max is {tokens_max}: ask for fewer, or "
                    "raise it"
                )
            packed = self._copier.read_inbox(client, query.inbox_offset, query.query_bytes, query.inbox)
            record = PrefixRecord.unpack(packed)
        except TensordError as error:
            self._send(client, Deliver(messages.Error.of(error, query.id)))
            return
        folded = np.frombuffer(packed, np.uint32, record.count, record.text_at)
        self._handle(events.PrefixAsked(client, query, record, folded))

    def _carry_out(self, effect: effects.Punch | effects.Allocate) -> None:
        """In the pages' thread: gives pages of the ring back, or takes them back."""
        outcome = self._pages_outcome(effect)
        self._loop.call_soon_threadsafe(self.inbox.tell_now, outcome)

    def _pages_outcome(self, effect: effects.Punch | effects.Allocate) -> events.Punched | events.Allocated:
        if isinstance(effect, effects.Punch):
            try:
                self._memory.punch(effect.offset, effect.size_bytes)
            except OSError as error:
                # Nothing is placed there all the same; what is resident is then shown too low.
                _log.error("pages could not be given back", size_bytes=effect.size_bytes, why=str(error))
            return events.Punched(effect.offset)
        memory = self._config.memory
        try:
            self._memory.allocate(
                effect.offset, effect.size_bytes, prefault=memory.prefault, huge_pages=memory.huge_pages
            )
        except TensordError as error:
            return events.Allocated(effect.offset, error)
        except Exception as error:
            return events.Allocated(effect.offset, TensordError(f"the pages could not be had: {error!r}"))
        return events.Allocated(effect.offset)

    def _grow(self, grown: Grown) -> None:
        ring_bytes = self._memory.superblock.ring_bytes
        self._report.grown(grown)
        if grown.error is not None:
            _log.error("the ring stays smaller than configured", have_bytes=grown.ring_bytes, why=str(grown.error))
        more = grown.error is None and grown.ring_bytes < ring_bytes
        self._handle(events.RingGrown(grown.ring_bytes, more))

    def _scrubbed(self, scrubbed: Scrubbed) -> None:
        """Believes the check only if the slot still stands for the span that was checked."""
        slot = self._memory.index.read(scrubbed.slot)
        if not slot.published or slot.span_id != scrubbed.span_id:
            return
        if scrubbed.sound:
            self._memory.index.mark(scrubbed.slot, unverified=False)
        else:
            _log.error("a recovered entry is not what was stored; evicted", key=slot.key.hex())
            self._handle(events.FoundCorrupt(scrubbed.span_id))

    def _serve_memory(self, asked: MemoryRequest) -> None:
        client = self._clients.get(asked.client)
        try:
            if client is None:
                raise DaemonUnavailable("the connection is closed")
            self._memory_requests[type(asked.message)](client, asked.message, asked.fds)
        except TensordError as error:
            self._send(asked.client, Deliver(messages.Error.of(error, id_of(asked.message))))
        finally:
            for fd in asked.fds:
                os.close(fd)

    def _attach(self, client: Joined, request: messages.Attach, brought: Sequence[int]) -> None:
        lanes_max, uid = self._config.limits.lanes_max, client.peer.uid
        back = brought[0] if brought and self._memory.has_lane_for(brought[0]) else None
        if back is None and len(self._memory.lanes) >= lanes_max:
            raise LimitReached(
                f"lanes_max is {lanes_max}, and as many are in being, those of processes that only keep views "
                "included; raise it, or end processes that hold views they no longer need"
            )
        if back is None:
            self._store.quotas.admit("lanes", uid, sum(lane.uid == uid for lane in self._memory.lanes))
        try:
            lane_id, fds = self._memory.lend_lane(client.client, uid=uid, fenced=client.fenced, brought=back)
        except NotEnoughMemory as error:
            self._lane_room.refused(error)
            raise
        except OSError as error:
            raise NotEnoughMemory(f"no lane could be made: {error}") from error
        if back is None:
            self._lane_room.made()
        superblock = self._memory.superblock
        attached = messages.Attached(request.id, lane_id, superblock.ring_bytes, superblock.geometry.index_bytes)
        self._send(client.client, Deliver(attached, fds, close=fds[2:]))

    def _open_inbox(self, client: Joined, request: messages.OpenInbox, fds: Sequence[int]) -> None:
        limits = self._config.limits
        if request.inbox_bytes > limits.inbox_bytes_max:
            raise LimitReached(
                f"inbox_bytes_max is {limits.inbox_bytes_max}, and an inbox of {request.inbox_bytes} was brought"
            )
        uid = client.peer.uid
        self._store.quotas.admit("inboxes", uid, self._copier.inboxes_bytes_of(uid), request.inbox_bytes)
        try:
            self._copier.open_inbox(
                client.client,
                fds[0],
                request.inbox_bytes,
                limits.inboxes_bytes_max,
                uid,
                request.inbox,
                INBOXES_PER_CLIENT_MAX,
            )
        except OSError as error:
            raise NotEnoughMemory(f"the inbox could not be mapped: {error}") from error
        self._send(client.client, Deliver(messages.Done(request.id)))

    def _close_inbox(self, client: Joined, request: messages.CloseInbox, fds: Sequence[int]) -> None:
        self._copier.close_inbox(client.client, request.inbox)

    def _send(self, client: int, delivery: Deliver) -> None:
        joined = self._clients.get(client)
        if joined is None or not joined.deliver(delivery):
            for fd in delivery.close:
                os.close(fd)

    async def _finish(self) -> None:
        """Takes up what has wholly arrived: the messages left in the inbox, and the copies under way."""
        self._store.rest()
        idle_s = 0.0
        while self._pump.busy or self._lanes.fencing or (not self.settled and idle_s <= 0):
            if self._lanes.fencing and not self._pump.busy:
                await self.inbox.wait()
            self._pump.turn()
            await asyncio.sleep(0)
            if not self.settled:
                idle_s = self._keep_time()
        self._copier.stop()
        # The copies' outcomes come through the loop: one turn of it, and they are in the inbox.
        await asyncio.sleep(0)
        for message in self.inbox.drain():
            if isinstance(message, events.Copied | events.Moved):
                self._handle(message)
        # What is left undone the next daemon finds as it is.
        self._pages.shutdown(cancel_futures=True)

    def _answer(self, question: Question) -> None:
        if question.answer.cancelled():
            return
        try:
            question.answer.set_result(self._report.answer(question.message))
        except TensordError as error:
            question.answer.set_exception(error)
