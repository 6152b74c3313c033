"""What a simulated daemon has under way: copies, moves, page changes, requests of the remote store, and jobs.

Each waits until the schedule runs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tensord.daemon.forms import effects, events
from tensord.daemon.memory.copier import Copier, CopyJob, InboxCopied, InboxCopy
from tensord.daemon.remote_stores.threads import RemoteThreads
from tensord.errors import NotEnoughMemory
from tensord.shm.ring.layout import SPAN_HEADER_BYTES

if TYPE_CHECKING:
    from .daemon import Daemon
    from .world import World


class ScheduledCopier(Copier):
    """A copier without a thread: the schedule runs the turns of its copies."""

    def __init__(self, ring: Any) -> None:
        super().__init__(ring, 32, lambda _: None)
        self.copies: deque[CopyJob] = deque()
        self.moves: deque[CopyJob] = deque()

    def copy(self, part: InboxCopy | effects.Move) -> None:
        queue = self.moves if isinstance(part, effects.Move) else self.copies
        queue.append(CopyJob(part))

    def turn(self, job: CopyJob) -> InboxCopied | events.Moved | None:
        """One turn of a copy; None if it goes on."""
        return self._outcome(job)


class Work:
    """The deferred work of one daemon."""

    def __init__(self, world: World, daemon: Daemon) -> None:
        self.world = world
        self.daemon = daemon
        self.copier = ScheduledCopier(daemon.memory.ring)
        # Its threads are never started: the schedule carries its requests out.
        self.remote = RemoteThreads(
            world.remote,
            daemon.memory.ring,
            self.copier.check,
            daemon.remote_answered,
            lambda: world.now,
        )
        self.requests: deque[effects.RemoteRequest] = deque()
        """Requests of the remote store that are under way."""
        self.jobs: deque[Iterator[None]] = deque()
        self.pages: deque[effects.Punch | effects.Allocate] = deque()

    def copy(self) -> None:
        """Runs one turn of a random client's copy out of its inbox. The turn may complete the copy or fail."""
        copies = self.copier.copies
        if not copies:
            return
        job = self.world.chance.choice(copies)
        copied = self.copier.turn(job)
        self.world.say("copied", client=job.client, copied_bytes=job.copied_bytes, done=copied is not None)
        if copied is not None:
            assert isinstance(copied, InboxCopied)
            copies.remove(job)
            self.daemon.queues.copied(copied)

    def ask_remote(self) -> None:
        """The remote store answers one of its requests."""
        if self.requests:
            request = self.world.chance.choice(self.requests)
            self.requests.remove(request)
            self.world.say("remote", request=request)
            self.remote.carry_out(request)

    def move(self) -> None:
        """Runs one turn of moving a span to another place."""
        moves = self.copier.moves
        if not moves:
            return
        job = self.world.chance.choice(moves)
        moved = self.copier.turn(job)
        if moved is not None:
            assert isinstance(moved, events.Moved) and moved.error is None, moved
            self.world.say("moved", span=moved.number)
            moves.remove(job)
            self.daemon.do(moved)

    def move_pages(self, *, short: bool | None = None) -> None:
        """Carries out the oldest page change. An allocation fails now and then for lack of memory."""
        if not self.pages:
            return
        effect = self.pages.popleft()
        self.world.say("pages", effect=effect)
        if isinstance(effect, effects.Punch):
            self.daemon.memory.punch(effect.offset, effect.size_bytes)
            self.daemon.do(events.Punched(effect.offset))
        elif self.world.chance.random() < 0.2 if short is None else short:
            self.daemon.do(events.Allocated(effect.offset, NotEnoughMemory("no memory is available")))
        else:
            self.daemon.memory.allocate(effect.offset, effect.size_bytes, prefault=False)
            self.daemon.do(events.Allocated(effect.offset))

    def work(self) -> None:
        """Runs one slice of a job: a scan, a count of holders, or a read of the lanes' logs."""
        if not self.jobs:
            return
        job = self.jobs.popleft()
        for _ in job:
            self.jobs.append(job)
            return

    def finish_copies(self) -> None:
        """Completes all requested copies and moves, and carries out all records."""
        while self.copier.copies or self.copier.moves or self.daemon.queues.turn():
            self.copy()
            self.move()
        for request in [each for each in self.requests if isinstance(each, effects.ReadRemote)]:
            self.requests.remove(request)
            self.remote.carry_out(request)

    def finish(self) -> None:
        """Completes everything that is under way now."""
        self.finish_copies()
        while self.requests:
            self.ask_remote()
        while self.pages:
            self.move_pages(short=False)
        while self.jobs:
            self.work()

    def tear(self) -> None:
        """Leaves copies and moves as SIGKILL does: perhaps in the middle."""
        ring = self.daemon.memory.ring
        for job in [*self.copier.copies, *self.copier.moves]:
            if self.world.chance.random() < 0.5:
                continue
            match job.part:
                case InboxCopy() as copy:
                    ring[copy.offset : copy.offset + copy.payload_bytes // 2] = 0xEE
                case effects.Move() as move:
                    ring[move.to_offset : move.to_offset + move.size_bytes // 2] = 0xEE
        for request in self.requests:
            if isinstance(request, effects.ReadRemote):
                # A read of the remote store has come so far. It begins with the object's header.
                ring[request.ring_offset :][: SPAN_HEADER_BYTES + request.payload_bytes // 2] = 0xEE

    @property
    def busy(self) -> bool:
        """Whether work is in progress that ends without new input."""
        status = self.daemon.store.status()
        under_way = any(status[name] for name in ("claims_held", "sweeps", "retired_bytes"))
        # The store is asked for generations for ever.
        for_ever = (effects.AskGenerations, effects.RaiseGeneration)
        asked = [each for each in self.requests if not isinstance(each, for_ever)]
        queued = self.copier.copies or self.copier.moves or self.pages or asked
        return under_way or bool(queued or self.daemon.parts.spans.scanning or self.daemon.queues.waiting)
