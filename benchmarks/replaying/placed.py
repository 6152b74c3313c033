"""The lean store's room under replay: rows with places in a ring, grants, scans, moves and the runway, without bytes.

Owns: the surroundings of the room: one client that asks for a place for each put, and effects that end at once. Does
not own: any decision about eviction or admission. A put writes what `Commits` writes, but for the header in the ring.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from replaying.counts import Counts
from replaying.ideal import key_of
from replaying.traces import Request, Restart, Step, Trace
from tensord.daemon.core.budget import RingBudget
from tensord.daemon.reports.counters import StoreCounters
from tensord.daemon.core.effects import Drain, Scan
from tensord.daemon.core.limits import StoreLimits
from tensord.daemon.replacement import POLICIES, Facts
from tensord.daemon.room.lending import Lending
from tensord.daemon.room.runway import Runway
from tensord.daemon.room.shares import Shares
from tensord.daemon.store.agents import Agents
from tensord.daemon.store.commit import CommitLimits, Commits, Submitter
from tensord.daemon.store.families import Families
from tensord.daemon.store.grants import Grants
from tensord.daemon.store.holes import Holes
from tensord.daemon.store.slots import Slots
from tensord.daemon.store.spans import Spans
from tensord.daemon.store.table import LIVE, RowTable
from tensord.daemon.store.tenants import Tenants
from tensord.ipc.messages import GrantsLent
from tensord.shm.index import IndexWriter
from tensord.shm.layout import ALIGN_BYTES, IndexGeometry, aligned

TICKS_MAX: Final = 10_000
_CLIENT: Final = 1


class _NoBlocks:
    def remove(self, row: int) -> None: ...


class Placed:
    """A store's rows under replay, with a place in the ring for each."""

    def __init__(self, trace: Trace, policy: str, capacity_bytes: int, *, steps: bool = False) -> None:
        """`steps`: the policy receives the ends of agents' calls."""
        self._trace = trace
        self._steps = steps
        self._is_prefix = trace.kind == "prefix"
        ring_bytes = capacity_bytes // ALIGN_BYTES * ALIGN_BYTES
        smallest = min(map(_span_bytes, trace.sizes), default=ALIGN_BYTES)
        entries = min(ring_bytes // smallest + 1, len(trace.sizes)) + 1
        geometry = IndexGeometry.for_entries(entries)
        memory = bytearray(geometry.index_bytes)
        IndexWriter.create(geometry, memory)
        self._keys = 0
        self._table = table = RowTable(max((4 * entries).bit_length(), 8), 1)
        holes, self._slots, self._tenants = Holes(table, ring_bytes), Slots(memoryview(memory), geometry), Tenants()
        self._grants = Grants(table, holes, self._slots, self._tenants, self._new_key)
        self._families = Families(table)
        self._policy = POLICIES[policy](Facts.of(table.column))
        self._spans = Spans(
            table, self._slots, self._grants, self._tenants, self._families, self._policy, _NoBlocks()
        )  # fmt: skip
        budget, limits = RingBudget(entries, ring_bytes, None), CommitLimits(entries, 1 << 60)
        ring, shares = memoryview(bytearray(0)), Shares(self._tenants, budget)
        self._commits = Commits(
            table, holes, self._slots, self._grants, self._policy, self._tenants, self._families, Agents(), ring, limits
        )
        self._effects: deque[Any] = deque()
        self.counters = StoreCounters()
        self.runway = Runway(
            table, holes, self._slots, self._grants, self._tenants, self._families, self._spans, self._commits,
            self._policy, shares, budget, memoryview(bytearray(ring_bytes)), self.counters, self._effects.append,
        )  # fmt: skip
        store_limits = StoreLimits(
            ring_bytes=ring_bytes, max_bytes=ring_bytes, max_entries=entries, object_bytes_max=ring_bytes
        )
        own = Submitter(0, self._tenants.owner(0), 0)
        self.lending = Lending(
            self.runway, table, holes, self._grants, self._tenants, shares, store_limits, budget, own, self._answered,
            lambda client, error: None,
        )  # fmt: skip
        self._client = self.lending.joined(_CLIENT, 1000, in_place=True)
        self._name = self._tenants.add(b"a replay")
        self._answer: GrantsLent | None = None
        self._now = 0.0
        self._agents: dict[str, int] = {"": 0}
        self.counts = Counts()

    def run(self) -> Counts:
        """Replays the whole trace."""
        for event in self._trace.events:
            if isinstance(event, Request):
                self.ask(event)
            elif isinstance(event, Step) and self._steps:
                self._policy.turn(self._agent(event.agent), event.state, event.at)
            elif isinstance(event, Restart):
                raise NotImplementedError("the rooms are not restarted in a replay")
        return self.counts

    def ask(self, request: Request) -> None:
        """Counts the cached blocks of a request, uses them, and stores the rest in order until one is refused."""
        self._now = max(self._now, request.at)
        self.runway.tick(self._now)
        self._work()
        keys = [key_of(block) for block in request.blocks.tolist()]
        found = [self._table.by_key.get(key, 0) for key in keys]
        there = next((at for at, row in enumerate(found) if not row), len(found)) if self._is_prefix else 0
        rows = found[:there] if self._is_prefix else [row for row in found if row]
        blocks: list[int] = request.blocks.tolist()
        self.counts.count(self._trace, request, blocks, len(rows), [])
        agent = self._agent(request.agent)
        self._policy.used(rows, self._now, agent)
        for at in range(there, len(keys)):
            if not self._put(keys[at], blocks[at], keys[at - 1] if at and self._is_prefix else b"", agent):
                break

    def _put(self, key: bytes, block: int, parent: bytes, agent: int) -> bool:
        table, slots = self._table, self._slots
        if key in table.by_key:
            return True
        self._answer = None
        size, tokens = _span_bytes(self._trace.sizes[block]), self._trace.tokens[block]
        self.lending.ask(_CLIENT, 1, [size])
        self._work()
        if self._answer is None or not self._answer.grants:
            return False
        grant = self._client.grants.pop(self._answer.grants[0][0])
        above = table.by_key.get(parent) or self._spans.recall(parent) if parent else 0
        digest = int.from_bytes(key[16:24], "little")
        if parent and self._commits.evicts and above:
            self._policy.window.batch_ended(self._now)
            table.children[above] += 1
            admitted = self._policy.admits(digest, size, above, 0.0, tokens, agent)
            table.children[above] -= 1
            above = above if admitted else 0
        if parent and not above:
            self.runway.places.free(self._grants.give_back(grant))
            return False
        row = self._grants.carve(grant, table.offsets[grant.pieces[0]], size)
        if key in self._spans.hidden:
            self._spans.replaced(key)
        slot = slots.take(key, table.span_ids[row], 64 << 48 | table.offsets[row], size)
        assert row and slot >= 0
        slots.publish(slot)
        table.states[row], table.by_key[key], table.slots[row] = LIVE, row, slot
        table.payloads[row], table.tokens[row], table.digests[row], table.agents[row] = size, tokens, digest, agent
        table.namespaces[row], table.owners[row] = self._name, self._client.owner
        self._tenants.entries[self._name] += 1
        self._tenants.bytes[self._name] += size
        self._tenants.stored(self._client.owner, 1, tokens)
        if self._is_prefix:
            # The records of blocks do not move.
            table.records[row] = 1
        if above:
            self._families.link(row, above)
        self._policy.window.append(row)
        self._policy.window.batch_ended(self._now)
        self._work()
        return True

    def _work(self) -> None:
        """What follows from an event, with all that the effects bring about."""
        for _ in range(TICKS_MAX):
            self.lending.serve(self._now)
            self.runway.advance(self._now)
            if not self._effects:
                return
            effect = self._effects.popleft()
            if isinstance(effect, Drain):
                self.runway.drained()
            elif isinstance(effect, Scan):
                self.runway.scanned(frozenset(), self._now)
            else:
                self.runway.moved(effect.number, copied=True)
        raise AssertionError("the room is made without end")

    def _answered(self, client: int, answer: Any) -> None:
        self._answer = answer

    def _new_key(self) -> bytes:
        self._keys += 1
        return b"a grant " + key_of(self._keys)[8:]

    def _agent(self, name: str) -> int:
        return self._agents.setdefault(name, len(self._agents) + 1)


def _span_bytes(size_bytes: int) -> int:
    return max(aligned(size_bytes), ALIGN_BYTES)
