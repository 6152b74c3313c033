"""The store's core with its ring, its index and its prefix index, in the trace's own time.

Owns: the surroundings of a store: a client that asks and puts, the copier, the lanes. Virtual time is the event's time.
Scans and moves end at once. Does not own: any decision about eviction or admission.

A block of a sequence is a block of BLOCK_TOKENS tokens, the least possible. Its text only distinguishes the block from
others. The put gives the number of tokens that it stands for (`tokens`). Of payloads only the records of blocks are
written.
"""

from __future__ import annotations

from collections import deque
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, Final

import numpy as np

from replaying.counts import Counts
from replaying.keys import TAG, key_of
from replaying.traces import Request, Restart, Step, Trace
from tensord.daemon.core.store import Store
from tensord.daemon.forms.effects import Allocate, Drain, Effect, Move, Punch, Scan, Send
from tensord.daemon.forms.events import (
    Accessed,
    Allocated,
    ClientJoined,
    Drained,
    Event,
    Moved,
    PrefixAsked,
    Punched,
    Received,
    Scanned,
    Tick,
    WritesInPlace,
)
from tensord.daemon.forms.limits import StoreLimits
from tensord.daemon.store.entries import StoreMemory
from tensord.ipc.messages import control as messages
from tensord.shm.index.index import IndexWriter
from tensord.shm.lanes.records import NO_KEY, RECORD, agent_number
from tensord.shm.payloads.prefix import (
    BLOCK_TOKENS_MIN,
    HEADER_BYTES,
    LAYOUT_BYTES,
    SCOPE_BYTES,
    TOKEN_BYTES,
    PrefixRecord,
    block_key,
)
from tensord.shm.ring.layout import ALIGN_BYTES, SPAN_HEADER_BYTES, IndexGeometry, SpanHeader, aligned, span_bytes

BLOCK_TOKENS: Final = BLOCK_TOKENS_MIN
TREE_BYTES: Final = 16
RECORD_AT: Final = aligned(TREE_BYTES)
RECORD_BYTES: Final = HEADER_BYTES + BLOCK_TOKENS * TOKEN_BYTES
TICKS_MAX: Final = 10_000
_CLIENT: Final = 1
_SCOPE, _LAYOUT = bytes(SCOPE_BYTES), bytes(LAYOUT_BYTES)
_END: Final = np.zeros(1, np.uint32)
"""The end of every query: a match leaves out a query's last token, so a fully cached sequence needs one more."""
_NO_RESERVE: Final = 0x4000
"""MAP_NORESERVE: pages that are not written take no memory."""


class Real:
    """A store under replay."""

    def __init__(self, trace: Trace, policy: str, capacity_bytes: int) -> None:
        self._trace = trace
        self._policy = policy
        self._is_prefix = trace.kind == "prefix"
        ring_bytes = capacity_bytes // ALIGN_BYTES * ALIGN_BYTES
        entries = min(ring_bytes // min(map(self._span_bytes, trace.sizes), default=ALIGN_BYTES) + 1, len(trace.sizes))
        self._limits = StoreLimits(
            ring_bytes=ring_bytes,
            max_bytes=ring_bytes,
            max_entries=entries + 1,
            object_bytes_max=ring_bytes,
            prefix_tokens_max=1 << 40,
        )
        self._geometry = IndexGeometry.for_entries(entries + 1)
        self._index_bytes = bytearray(self._geometry.index_bytes)
        self._bytes = mmap(-1, ring_bytes, MAP_PRIVATE | MAP_ANONYMOUS | _NO_RESERVE)
        self._epoch = 0
        self._now = 0.0
        self._answer: Any = None
        self._keys: dict[int, bytes] = {}
        self._agents: set[str] = set()
        self._numbers = 0
        self.counts = Counts()
        self._begin(IndexWriter.create(self._geometry, self._index_bytes))
        self._join()

    def restart(self, event: Restart) -> None:
        """The next daemon takes the memory over, and what the policy has learned."""
        self._pass_time(event.at)
        learned = list(self.store.policy.learned())
        self._begin(IndexWriter(self._index_bytes, self._geometry))
        for _ in self.store.recover(self._now):
            pass
        self.store.policy.learn(learned)
        self._join()
        self._go_on()

    def step(self, step: Step) -> None:
        self._pass_time(step.at)
        self._do(Received(_CLIENT, messages.AgentTurn(self._next(), step.agent, step.state)))

    def ask(self, request: Request) -> None:
        """Counts the cached blocks, uses them, and stores the rest in order until a put is refused."""
        self._pass_time(request.at)
        blocks: list[int] = request.blocks.tolist()
        there = self._match(request) if self._is_prefix else sum(map(self._get, blocks))
        self.counts.count(self._trace, request, blocks, there, [])
        if request.agent not in self._agents and request.agent:
            self._agents.add(request.agent)
            self._do(Received(_CLIENT, messages.NameAgent(request.agent)))
        parent = self._key(blocks, there - 1) if there and self._is_prefix else NO_KEY
        for place in range(there, len(blocks)):
            key = self._put(blocks, place, parent, request.agent)
            if key is None:
                break
            parent = key if self._is_prefix else NO_KEY

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
        span_id = self.store.span_id(key_of(block))
        self._do(Accessed([] if span_id is None else [span_id], misses=span_id is None))
        return span_id is not None

    def _put(self, blocks: list[int], place: int, parent: bytes, agent: str) -> bytes | None:
        """The key of a block that is stored; None if it was refused."""
        block = blocks[place]
        size = self._span_bytes(self._trace.sizes[block])
        self._answer = None
        self._do(Received(_CLIENT, messages.AskForGrants(self._next(), [size])))
        self._go_on()
        assert isinstance(self._answer, messages.GrantsLent), self._answer
        if not self._answer.grants:
            return None
        grant, offset, *_ = next(self._answer.places())
        packed = self._packed(block, place, parent) if self._is_prefix else b""
        key = block_key(TAG, packed) if packed else key_of(block)
        record_at = offset + SPAN_HEADER_BYTES + RECORD_AT
        self._bytes[record_at : record_at + len(packed)] = packed
        self._keys[block] = key
        self._records += 1
        record = RECORD.pack(
            self._records, key, offset, size - SPAN_HEADER_BYTES, 1, 0, parent, 0.0, 0.0, grant, TREE_BYTES,
            self._trace.tokens[block], len(packed), agent_number(agent), 0,
        )  # fmt: skip
        self._answer = None
        self._follow(self.store.submitted(_CLIENT, memoryview(record), self._now, {})[1])
        refused = self._answer
        self._go_on()
        if isinstance(refused, messages.PutRefused) and refused.error is not None:
            return None
        return key

    def _packed(self, block: int, place: int, parent: bytes) -> bytes:
        """The record of a block."""
        above = parent if place else None
        record = PrefixRecord(
            _SCOPE, _LAYOUT, False, False, place * BLOCK_TOKENS, BLOCK_TOKENS, above, (), BLOCK_TOKENS
        )
        return record.pack(np.full(BLOCK_TOKENS, block + 1, np.uint32)).tobytes()

    def _key(self, blocks: list[int], place: int) -> bytes:
        """The key of a block that was put before."""
        return self._keys[blocks[place]]

    # ---- the surroundings of the store

    def _begin(self, index: IndexWriter) -> None:
        self._epoch += 1
        ring = memoryview(self._bytes)
        memory = StoreMemory(index, memoryview(self._index_bytes), self._geometry, ring, len(ring))
        self.store = Store(memory, self._policy, self._limits, self._epoch, seed=self._epoch)
        self._records = 0

    def _join(self) -> None:
        self._do(ClientJoined(_CLIENT, 1000))
        self._do(WritesInPlace(_CLIENT))
        self._agents.clear()

    def _do(self, event: Event) -> None:
        """Handles one event, and everything that follows from it at once."""
        self._follow(self.store.handle(event, self._now))

    def _follow(self, made: list[Effect]) -> None:
        effects = deque(made)
        while effects:
            answer = self._carry_out(effects.popleft())
            if answer is not None:
                effects += self.store.handle(answer, self._now)

    def _carry_out(self, effect: Effect) -> Event | None:
        match effect:
            case Send(_, message):
                self._answer = message
            case Move(number):
                start, to = effect.from_offset, effect.to_offset
                header = SpanHeader.unpack(memoryview(self._bytes)[start : start + SPAN_HEADER_BYTES])
                self._bytes[to : to + SPAN_HEADER_BYTES] = header.moved_to(number).pack()
                return Moved(number)
            case Drain():
                return Drained()
            case Scan():
                return Scanned(frozenset())
            case Punch():
                return Punched(effect.offset)
            case Allocate():
                return Allocated(effect.offset)
        return None

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

    def _span_bytes(self, size_bytes: int) -> int:
        """The bytes in the ring of a block or an object, of which the header is a part."""
        least = SPAN_HEADER_BYTES + RECORD_AT + aligned(RECORD_BYTES) if self._is_prefix else span_bytes(1)
        return max(aligned(size_bytes), least)

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers
