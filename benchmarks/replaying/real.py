"""The store's core with its ring, its index and its prefix index, in the trace's own time.

Owns: the surroundings of a store: a client that asks and puts, the copier, the lanes. Virtual time is the event's time.
Scans and copies end at once. Does not own: any decision about eviction or admission.

A block of a sequence is a block of BLOCK_TOKENS tokens, the least possible. Its text only distinguishes the block from
others. The put gives the number of tokens that it stands for (`tokens`).
"""

from __future__ import annotations

import random
from collections import deque
from heapq import heappop, heappush
from typing import Any, Final

import numpy as np

from replaying.counts import Counts
from replaying.ideal import TAG, key_of
from replaying.traces import Request, Restart, Step, Trace
from tensord.daemon.core.effects import Allocate, Copy, Drain, Effect, Move, Punch, Scan, Send
from tensord.daemon.core.entries import SpanEntry
from tensord.daemon.core.events import (
    Accessed,
    Allocated,
    ClientJoined,
    Copied,
    Drained,
    Event,
    Moved,
    PrefixAsked,
    Punched,
    Received,
    Scanned,
    Tick,
)
from tensord.daemon.core.limits import StoreLimits
from tensord.daemon.core.recovery import Recovered
from tensord.daemon.core.store import Store
from tensord.daemon.policy.registry import by_name
from tensord.daemon.policy.replacement import Replacement
from tensord.ipc import messages
from tensord.shm.allocator import SpanAllocator
from tensord.shm.index import IndexWriter
from tensord.shm.layout import ALIGN_BYTES, SPAN_HEADER_BYTES, IndexGeometry, SpanHeader, aligned
from tensord.shm.prefix import BLOCK_TOKENS_MIN, HEADER_BYTES, LAYOUT_BYTES, SCOPE_BYTES, TOKEN_BYTES, PrefixRecord

BLOCK_TOKENS: Final = BLOCK_TOKENS_MIN
TREE_BYTES: Final = 16
RECORD_BYTES: Final = HEADER_BYTES + BLOCK_TOKENS * TOKEN_BYTES
PINNED_REQUESTS: Final = 64
"""The mean number of requests during which a view is held."""
VIEWS_MAX: Final = 8
"""The most views that begin with one request."""
TICKS_MAX: Final = 10_000
_CLIENT: Final = 1
_SCOPE, _LAYOUT = bytes(SCOPE_BYTES), bytes(LAYOUT_BYTES)
_END: Final = np.zeros(1, np.uint32)
"""The end of every query: a match leaves out a query's last token, so a fully cached sequence needs one more."""


class Real:
    """A store under replay."""

    def __init__(
        self,
        trace: Trace,
        policy: Replacement,
        capacity_bytes: int,
        *,
        steps: bool = False,
        pinned_share: float = 0.0,
    ) -> None:
        """`steps`: the store receives the ends of agents' calls. `pinned_share`: share of the ring that views hold."""
        self._trace = trace
        self._steps = steps
        ring_bytes = capacity_bytes // ALIGN_BYTES * ALIGN_BYTES
        smallest_bytes = min(map(_span_bytes, trace.sizes), default=ALIGN_BYTES)
        entries = min(ring_bytes // smallest_bytes + 1, len(trace.sizes)) + 1
        self._limits = StoreLimits(
            ring_bytes=ring_bytes,
            max_bytes=ring_bytes,
            max_entries=entries,
            object_bytes_max=ring_bytes,
            prefix_tokens_max=1 << 40,
        )
        self._bytes = bytearray(ring_bytes if trace.kind == "prefix" else 0)
        self._index = IndexWriter.create(IndexGeometry.for_entries(entries))
        self._epoch = 0
        self.store = self._new_store(policy)
        self._now = 0.0
        self._requests = 0
        self._answer: Any = None
        self._piece: PrefixRecord | None = None
        self._folded = _END
        self._chance = random.Random(2)
        self._pinned_bytes_most = int(pinned_share * ring_bytes)
        self._pinned_bytes = 0
        self._pinned: set[int] = set()
        self._views: list[tuple[int, int, int]] = []
        self._recent: deque[bytes] = deque(maxlen=4096)
        self._numbers = 0
        self.counts = Counts()
        self._do(ClientJoined(_CLIENT, 1000, "replay"))

    def run(self) -> Counts:
        """Replays the whole trace."""
        for event in self._trace.events:
            if isinstance(event, Request):
                self.ask(event)
            elif isinstance(event, Restart):
                self.restart(event)
            elif self._steps:
                self.step(event)
        return self.counts

    def restart(self, event: Restart) -> None:
        """Another store takes over the objects and the policy's history."""
        assert self._trace.kind == "object", "the replay keeps no headers of blocks"
        self._pass_time(event.at)
        found = [Recovered(entry.slot, _header(entry), True) for entry in self.store.memory.entries]
        before = self.store.memory.policy
        self.store = self._new_store(by_name(before.name))
        self.store.recover(found, self._now)
        self.store.memory.policy.learn(list(before.learned()))
        self._do(ClientJoined(_CLIENT, 1000, "replay"))

    def step(self, step: Step) -> None:
        self._pass_time(step.at)
        self._do(Received(_CLIENT, messages.AgentTurn(self._next(), step.agent, step.state)))

    def ask(self, request: Request) -> None:
        """Counts the cached blocks, uses them, and stores the rest in order until a put is refused."""
        self._pass_time(request.at)
        self._change_views()
        blocks: list[int] = request.blocks.tolist()
        is_prefix = self._trace.kind == "prefix"
        there = self._match(request) if is_prefix else sum(map(self._get, blocks))
        self.counts.count(self._trace, request, blocks, there, [])
        for place in range(there, len(blocks)):
            parent_key = key_of(blocks[place - 1]) if place and is_prefix else None
            if not self._put(blocks[place], place, parent_key, request.agent):
                break

    def check_invariants(self) -> None:
        """Asserts the store's invariants."""
        self.store.check_invariants()

    # ---- the client

    def _match(self, request: Request) -> int:
        """The number of leading blocks that are cached."""
        tokens = np.append(np.repeat(request.blocks + 1, BLOCK_TOKENS).astype(np.uint32), _END)
        query = PrefixRecord(_SCOPE, _LAYOUT, False, False, 0, len(tokens), None, (), BLOCK_TOKENS)
        message = messages.MatchPrefix(self._next(), TAG, 0, query.record_bytes, request.agent)
        self._do(PrefixAsked(_CLIENT, message, query, tokens))
        assert isinstance(self._answer, messages.Matched), self._answer
        offset = self._answer.offset
        self._go_on()
        assert offset % BLOCK_TOKENS == 0, "a match ends within a block"
        return int(offset) // BLOCK_TOKENS

    def _get(self, block: int) -> bool:
        """True if an object is cached."""
        entry = self.store.memory.entries.find(key_of(block))
        self._do(Accessed([] if entry is None else [entry.span_id], misses=entry is None))
        return entry is not None

    def _put(self, block: int, place: int, parent_key: bytes | None, agent: str) -> bool:
        """True if a block was stored."""
        key, number = key_of(block), self._next()
        payload_bytes, prefix_bytes = max(self._trace.sizes[block], ALIGN_BYTES), 0
        if self._trace.kind == "prefix":
            payload_bytes, prefix_bytes = payload_bytes - SPAN_HEADER_BYTES, RECORD_BYTES
            start = place * BLOCK_TOKENS
            self._piece = PrefixRecord(_SCOPE, _LAYOUT, False, False, start, BLOCK_TOKENS, parent_key, (), BLOCK_TOKENS)
            self._folded = np.full(BLOCK_TOKENS, block + 1, np.uint32)
        commit = messages.Commit(
            number,
            key,
            payload_bytes,
            TREE_BYTES,
            self._trace.tokens[block],
            acks=False,
            agent=agent,
            prefix_bytes=prefix_bytes,
            parent=parent_key,
        )
        self._answer = None
        self._do(Received(_CLIENT, commit))
        if self._answer is None:
            self._do(Received(_CLIENT, messages.Part(number, 0, payload_bytes, True)))
        self._go_on()
        assert isinstance(self._answer, messages.Committed), self._answer
        if self._answer.outcome == "refused":
            return False
        if self._pinned_bytes_most:
            self._recent.append(key)
        return True

    # ---- the surroundings of the store

    def _new_store(self, policy: Replacement) -> Store:
        self._epoch += 1
        ring = SpanAllocator(self._limits.ring_bytes)
        return Store(self._index, ring, policy, self._limits, self._epoch, read=self._read, seed=1)

    def _do(self, event: Event) -> None:
        """Handles one event, and everything that follows from it at once."""
        effects: deque[Effect] = deque(self.store.handle(event, self._now))
        while effects:
            answer = self._carry_out(effects.popleft())
            if answer is not None:
                effects += self.store.handle(answer, self._now)

    def _carry_out(self, effect: Effect) -> Event | None:
        match effect:
            case Send(_, message):
                self._answer = message
            case Copy(_, put_id, last=True):
                if self._piece is None:
                    return Copied(_CLIENT, put_id, 1)
                record_at = effect.ring_offset + aligned(TREE_BYTES)
                text_at = record_at + self._piece.text_at
                self._bytes[text_at : text_at + self._folded.nbytes] = self._folded.data.cast("B")
                return Copied(_CLIENT, put_id, 1, record=self._piece)
            case Move(number):
                return Moved(number)
            case Drain():
                return Drained()
            case Scan():
                return Scanned(frozenset(self._pinned))
            case Punch():
                return Punched(effect.offset)
            case Allocate():
                return Allocated(effect.offset)
        return None

    def _read(self, offset: int, size_bytes: int) -> memoryview:
        return memoryview(self._bytes)[offset : offset + size_bytes]

    def _go_on(self) -> None:
        """Ticks while the store asks for a tick at once."""
        for _ in range(TICKS_MAX):
            timer = self.store.next_timer()
            if timer is None or timer > self._now:
                return
            self._do(Tick())
        raise AssertionError("the store asks for ticks without end")

    def _pass_time(self, until: float) -> None:
        """Ticks when they are due, up to a limit; the late rest follows at once."""
        for _ in range(TICKS_MAX):
            timer = self.store.next_timer()
            if timer is None or timer > until:
                break
            self._now = max(self._now, timer)
            self._do(Tick())
        self._now = max(self._now, until)

    def _change_views(self) -> None:
        """Ends the views that were held for long enough, and begins others, up to the share to pin.

        As with a match, a view of a block holds all its ancestors.
        """
        self._requests += 1
        while self._views and self._views[0][0] <= self._requests:
            _, number, size_bytes = heappop(self._views)
            self._pinned_bytes -= size_bytes
            self._pinned.discard(number)
        for _ in range(VIEWS_MAX if self._recent else 0):
            entry = self.store.memory.entries.find(self._chance.choice(self._recent))
            path = []
            while entry is not None:
                path.append(entry)
                entry = entry.parent
            until = self._requests + self._chance.randrange(1, 2 * PINNED_REQUESTS)
            for each in reversed(path):
                if each.span_id in self._pinned:
                    continue
                if self._pinned_bytes + each.span_bytes > self._pinned_bytes_most:
                    return
                heappush(self._views, (until, each.span_id, each.span_bytes))
                self._pinned.add(each.span_id)
                self._pinned_bytes += each.span_bytes

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers


def _header(entry: SpanEntry) -> SpanHeader:
    return SpanHeader(
        entry.key,
        entry.span_id,
        entry.payload_bytes,
        entry.tree_bytes,
        1,
        entry.tokens,
        entry.created_at,
        0.0,
        entry.owner_uid,
        cost_ms=entry.cost_ms,
    )


def _span_bytes(size_bytes: int) -> int:
    return max(aligned(size_bytes), ALIGN_BYTES)
