"""The store actor: runs the store's core. It is the only actor that accesses the ring, the index and the lanes.

Owns: the store's inbox, the copier, and the thread that changes pages of the ring. Turns messages into events of the
core, and carries the core's effects out. Does not own any decision about entries (the core), nor the answers to queries
(`store_report`).

Invariants: the core is called from one task only. The result of an effect comes back later, as a message or a job,
never within the handling of an event. Every effect on pages has an outcome, even if the kernel refuses it, until the
end; there is one thread for them, since the kernel has one lock for all changes to the pages of a file.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from ...errors import TensordError
from ...ipc.messages import control as messages
from ..claims.claims import NOBODY
from ..config.config import Config
from ..config.limits import TREE_DEPTH_MAX
from ..config.sections import MemorySection
from ..core.store import Store
from ..forms import effects, events
from ..forms.effects import HostHolds
from ..memory.copier import Copier, InboxCopied
from ..memory.scrub import Scrubbed, applied
from ..memory.segments import Segments
from ..process.logs import logger
from ..remote_stores.store import RemoteStore
from ..remote_stores.threads import RemoteThreads, remote_turned
from ..reports.counters import RequestTimes
from .attachments import Attachments
from .lanes import LaneJobs
from .mailbox import INBOX_MAX, Mailbox, Pump
from .messages import Deliver, Fenced, HangUp, Joined, MemoryRequest, Queried, Reloaded, StoreMessage
from .queues import Lookout, Queues
from .store_report import StoreReport

TIMERS_S: Final = 0.002
"""A busy actor looks at its timers this often. The shortest of them last for tens of milliseconds."""

_log = logger("store")


class StoreActor:
    """Runs `core` on the messages of `inbox`, over the shared memory of `memory`. `clock` gives the seconds of
    `shm.clock`. `tell_watchers`: sends an event to all watchers of the status socket. `tell_governor`: sends the
    governor the sizes of the host tier. Neither may block. `remote`: the store behind the ring."""

    def __init__(
        self,
        core: Store,
        memory: Segments,
        config: Config,
        *,
        clock: Callable[[], float],
        tell_watchers: Callable[[dict[str, Any]], object],
        tell_governor: Callable[[HostHolds], object],
        times: RequestTimes,
        remote: RemoteStore | None,
    ) -> None:
        self.core = core
        self.clock = clock
        self._memory = memory
        self._config = config
        self._tell_watchers = tell_watchers
        self._tell_governor = tell_governor
        self.inbox: Mailbox[StoreMessage] = Mailbox(INBOX_MAX)
        self._clients: dict[int, Joined] = {}
        self._look_at = 0.0
        self._pump = Pump(self.inbox, self._receive, clock)
        self._loop = asyncio.get_running_loop()
        self._pages = ThreadPoolExecutor(1, "tensord-pages")
        self._copier = Copier(memory.ring, TREE_DEPTH_MAX, self._tell)
        self._remote: RemoteThreads | None = None
        if remote is not None:
            self._remote = RemoteThreads(remote, memory.ring, self._copier.check, self._tell, clock)
        self._lanes = LaneJobs(memory, clock=clock, handle=self._handle, begin=self._pump.begin, report=self._tell)
        self._queues = Queues(
            memory,
            self._copier,
            submitted=self._submitted,
            is_lent=core.is_lent,
            ring=lambda client: self._send(client, Deliver(messages.Settled())),
            hang_up=self._hang_up,
        )
        self._lookout = Lookout(memory, self._queues, clock)
        self.scrub: Callable[[list[int]], object] = lambda slots: None
        """Takes the slots of entries without a checksum. Called while there is nothing else to do."""
        self.worked_at = 0.0
        """When a client's put was carried out last, by time.monotonic."""
        self._recovering = False
        self._held: list[StoreMessage] = []
        """Messages that came before the store has taken over the memory of an earlier daemon."""
        self._attachments = Attachments(
            core, memory, self._copier, self._queues, self._send, self._tell_of, self._writes_in_place
        )
        self._report = StoreReport(
            core,
            memory,
            config,
            self._copier,
            self._clients,
            clock=clock,
            waiting=lambda: len(self.inbox),
            times=times,
            remote=self._remote,
        )

    @property
    def settled(self) -> bool:
        return not len(self.inbox) and self._queues.settled

    def recover(self, then: Callable[[], object]) -> None:
        """Has the store take over the memory of an earlier daemon, in slices, before it serves. Clients attach
        meanwhile. `then` is called at the end."""
        self._recovering = True
        self._pump.begin(self._recover(then))

    def _recover(self, then: Callable[[], object]) -> Iterator[None]:
        yield from self.core.recover(self.clock(), self._memory.missing)
        self._recovering = False
        then()
        for message in self._held:
            self._receive(message)
        self._held.clear()

    async def run(self) -> None:
        """Serves until it is cancelled. Then it waits for the copies under way, so that complete commits are kept."""
        self._copier.start()
        try:
            while self._recovering:
                self._pump.turn()
                await asyncio.sleep(0)
            while True:
                worked = self._queues.turn()
                self._pump.turn()
                # Last, so that the sessions ring the bells at once.
                worked |= self._queues.turn()
                if self.core.is_due:
                    self._handle(events.Tick())
                if worked:
                    self.worked_at = time.monotonic()
                    self._lookout.begin()
                looks = self._lookout.looks
                idle_s = self._keep_time(busy=looks or self._pump.busy)
                if idle_s > 0 and not looks and not self._pump.busy:
                    if not self._lookout.awake and (slots := self.core.take_unsummed()):
                        self.scrub(slots)
                    await self._lookout.rest(self.inbox, idle_s)
                else:
                    # The sessions send answers now, before work that may wait, such as counting the uses of matched
                    # blocks. All other tasks of the loop run too.
                    await asyncio.sleep(0)
        finally:
            await self._finish()

    def _keep_time(self, *, busy: bool) -> float:
        """Runs due timers. Returns the seconds until the next one; 0 or less if it is due. While the actor is busy,
        timers are looked at every TIMERS_S: it takes as long as a tenth of a put."""
        now = self.clock()
        if busy and now < self._look_at and not self.core.postponed:
            return 0.0
        self._look_at = now + TIMERS_S
        timer = self.core.next_timer()
        if timer is not None and timer <= now:
            self._handle(events.Tick())
            timer = self.core.next_timer()
        self._lanes.keep_time(now)
        due = self._lanes.timer
        return (due if timer is None else min(due, timer)) - now

    def _receive(self, message: StoreMessage) -> None:
        if self._recovering and not isinstance(message, MemoryRequest):
            self._held.append(message)
            if isinstance(message, Joined):
                self._clients[message.client] = message
            return
        match message:
            case events.Received(client, request):
                if client not in self._clients:
                    return
                # What the client has put before comes first.
                if isinstance(request, messages.MatchPrefix):
                    self._queues.after_added(client, partial(self._match, client, request))
                elif isinstance(request, messages.Doorbell):
                    self._lookout.begin()
                else:
                    self._queues.after_added(client, partial(self._handle, message))
            case effects.Move():
                moved = self._copier.copy_now(message)
                assert isinstance(moved, events.Moved)
                self._handle(moved)
            case InboxCopied():
                self._queues.copied(message)
            case Joined(client, peer):
                self._clients[client] = message
                self._handle(events.ClientJoined(client, peer.uid))
            case MemoryRequest(client):
                self._attachments.serve(self._clients.get(client), message, self._config)
            case events.ClientLeft(client):
                if client in self._clients:
                    self._queues.after_added(client, partial(self._left, message))
            case events.RingGrown():
                self._report.grow_error = message.why
                self._handle(message)
            case Scrubbed():
                if (corrupt := applied(self._memory, message)) is not None:
                    self._handle(corrupt)
            case Fenced():
                self._lanes.fenced(message)
            case Queried():
                if self.core.unsettled:
                    self._handle(events.Tick())
                message.settle(self._report.answer)
            case Reloaded(verdict, accepted):
                self._report.reload = verdict
                if accepted is not None:
                    self._config = self._report.config = accepted[0]
                    self._handle(events.LimitsChanged(accepted[1]))
            case _:
                # An event of the core.
                self._handle(message)

    def _tell(self, message: StoreMessage) -> None:
        """Adds a message to the inbox, from any thread."""
        self._loop.call_soon_threadsafe(self.inbox.tell_now, message)

    def _writes_in_place(self, client: int) -> None:
        self._queues.writes_in_place(client)
        self._receive(events.WritesInPlace(client))

    def _left(self, message: events.ClientLeft) -> None:
        """A client has left, and what it has added is carried out. Until then no place of it may be used again."""
        client = message.client
        self._queues.detached(client)
        self._copier.close_inbox(client)
        self._tell_of(self._clients.pop(client), "leave")
        self._memory.orphan(client)
        self._handle(message)

    def _submitted(self, client: int, records: memoryview, errors: dict[int, TensordError]) -> int:
        last, made = self.core.submitted(client, records, self.clock(), errors)
        self._carry_out(made)
        return last

    def _handle(self, event: events.Event) -> None:
        """Gives the core one event and carries its effects out. Their results come later, as a message or a job."""
        self._carry_out(self.core.handle(event, self.clock()))

    def _carry_out(self, made: list[effects.Effect]) -> None:
        for effect in made:
            match effect:
                case effects.Send(client, message):
                    self._send(client, Deliver(message))
                case effects.Announce(body):
                    self._tell_watchers(body)
                case effects.RemoteTurned():
                    self._tell_watchers(remote_turned(effect))
                case effects.Move() if self._copier.is_small(effect):
                    self.inbox.tell_now(effect, (effect.uid, NOBODY))
                case effects.Move():
                    self._copier.copy(effect)
                case effects.Drain():
                    self._lanes.drain()
                case effects.Scan():
                    self._lanes.scan()
                case effects.Punch() | effects.Allocate():
                    self._pages.submit(self._change_pages, effect, self._config.memory)
                case HostHolds():
                    self._tell_governor(effect)
                case events.Received(client):
                    self.inbox.tell_first(effect, (self._clients[client].peer.uid, client))
                case _:
                    assert self._remote is not None, "without a remote store the limits allow no such effect"
                    self._remote.submit(effect)

    def _change_pages(self, effect: effects.Punch | effects.Allocate, config: MemorySection) -> None:
        """Returns pages of the ring to the kernel, or allocates them again. Runs in a thread."""
        if isinstance(effect, effects.Punch):
            try:
                self._memory.punch(effect.offset, effect.size_bytes)
            except OSError as error:
                # The core gets Punched all the same, so that no span is placed in these pages. The reported resident
                # bytes are too low then.
                text = "cannot return pages of the ring to the kernel; they stay allocated and unused"
                _log.error(text, size_bytes=effect.size_bytes, why=str(error))
            self._tell(events.Punched(effect.offset))
            return
        failure: TensordError | None = None
        try:
            prefault, huge_pages = config.prefault, config.huge_pages
            self._memory.allocate(effect.offset, effect.size_bytes, prefault=prefault, huge_pages=huge_pages)
        except TensordError as error:
            failure = error
        except Exception as error:
            failure = TensordError(f"the pages cannot be allocated: {error!r}")
        self._tell(events.Allocated(effect.offset, failure))

    def _match(self, client: int, query: messages.MatchPrefix) -> None:
        """Gives the core a query that lies in the client's inbox."""
        try:
            record, folded = self._copier.read_query(
                client, query.inbox_offset, query.query_bytes, self._config.limits.prefix_tokens_max
            )
        except TensordError as error:
            self._send(client, Deliver(messages.Error.of(error, query.id)))
            return
        self._handle(events.PrefixAsked(client, query, record, folded))

    def _tell_of(self, client: Joined, event: str) -> None:
        who = {"client": client.client, "name": client.name, "pid": client.pid, "uid": client.peer.uid}
        self._tell_watchers({"event": event, **who})

    def _hang_up(self, client: int, reason: str) -> None:
        self._clients[client].inbox.tell_now(HangUp(reason))

    def _send(self, client: int, delivery: Deliver) -> None:
        if type(delivery.message) is messages.PutRefused:
            self._queues.refused(client)
        joined = self._clients.get(client)
        if joined is None or not joined.deliver(delivery):
            for fd in delivery.close:
                os.close(fd)

    async def _finish(self) -> None:
        """Handles the messages left in the inbox, and the records left in the queues, and waits for the copies under
        way."""
        self.core.evict_only_for_puts()
        idle_s = 0.0
        while self._queues.turn() or self._pump.busy or self._lanes.fencing or (not self.settled and idle_s <= 0):
            if self._lanes.fencing and not self._pump.busy:
                await self.inbox.wait()
            self._pump.turn()
            await asyncio.sleep(0)
            if not self.settled:
                idle_s = self._keep_time(busy=False)
        self._copier.stop()
        if self._remote is not None and not await asyncio.to_thread(self._remote.close):
            _log.error("a read of the remote store hangs, and would write into the next daemon's ring; ending at once")
            os._exit(1)
        # The results of copies come through the loop. After one turn of the loop they are in the inbox.
        await asyncio.sleep(0)
        for message in self.inbox.take():
            if isinstance(message, events.Moved | InboxCopied):
                self._receive(message)
        # What is queued is dropped: the next daemon finds the pages as they are.
        self._pages.shutdown(cancel_futures=True)
