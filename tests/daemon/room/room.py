"""A store with room made for it: what the store's actor does with the effects is done at once, or held back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from tensord.daemon.claims.claims import NOBODY
from tensord.daemon.core.budget import RingBudget
from tensord.daemon.core.effects import Drain, Move, Scan
from tensord.daemon.core.limits import StoreLimits
from tensord.daemon.reports.counters import StoreCounters
from tensord.daemon.room.lending import Lending
from tensord.daemon.room.runway import Runway
from tensord.daemon.room.shares import OwnerShares
from tensord.daemon.store.commit import Submitter
from tensord.daemon.store.grants import LentGrant
from tensord.errors import TensordError
from tensord.ipc.messages.control import Answer, GrantsLent
from tensord.shm.lanes.records import NO_KEY, RECORD
from tensord.shm.ring.layout import SPAN_HEADER_BYTES, SpanHeader, span_bytes

from ..store.rows import RowStore, key_of


class RoomStore(RowStore):
    """A store with clients that ask for places. `now` is the time of all that happens."""

    def __init__(self, ring_bytes: int = 64 << 10, *, max_bytes: int | None = None, **how: Any) -> None:
        super().__init__(ring_bytes, **how)
        ring_bytes = self.ring_bytes
        tokens = self.limits.max_tokens if self.limits.max_tokens < 1 << 40 else None
        self.budget = RingBudget(self.max_entries, max_bytes or ring_bytes, tokens)
        self.store_limits = StoreLimits(
            ring_bytes=ring_bytes,
            max_bytes=self.budget.max_bytes,
            max_entries=self.max_entries,
            object_bytes_max=ring_bytes,
        )
        self.shares = OwnerShares(self.tenants, self.budget)
        self.effects: deque[Any] = deque()
        self.counters = StoreCounters()
        self.runway = Runway(
            self.table, self.holes, self.slots, self.grants, self.tenants, self.families, self.spans, self.commits,
            self.policy, self.shares, self.budget, self.ring, self.counters, self.effects.append,
        )  # fmt: skip
        self.answers: dict[tuple[int, int], GrantsLent] = {}
        self.refusals: list[TensordError] = []
        self.lending = Lending(
            self.runway, self.table, self.holes, self.grants, self.tenants, self.shares, self.store_limits, self.budget,
            Submitter(NOBODY, self.tenants.owner(0), 0),
            self.answered,
            lambda client, error: self.refusals.append(error),
        )  # fmt: skip
        self.submitters = self.lending.submitters
        self.now = 1.0
        self.requests = 0
        self.copies = True
        """Whether moves succeed."""
        self.during: list[Any] = []
        """Called once each, between an effect and its outcome."""

    # ---- clients

    def client(self, number: int = 1, uid: int = 0) -> Submitter:
        if number not in self.submitters:
            self.lending.joined(number, uid, in_place=True)
        return self.submitters[number]

    def ask(
        self, sizes: Sequence[int], client: int = 1, uid: int = 0, *, settle: bool = True, ahead: bool = False
    ) -> int:
        """Asks for places; `answers` has the answer, once there is one."""
        self.client(client, uid)
        self.requests += 1
        self.lending.ask(client, self.requests, sizes, ahead=ahead)
        self.work(settle=settle)
        return self.requests

    def places(self, sizes: Sequence[int], client: int = 1, uid: int = 0) -> list[LentGrant]:
        """Grants of these sizes, as many as were lent."""
        answer = self.answers[client, self.ask(sizes, client, uid)]
        return [self.submitters[client].grants[number] for number, *_ in answer.grants]

    def write(self, grant: LentGrant, key: bytes, payload_bytes: int, client: int = 1, **fields: Any) -> int:
        """Puts an entry at the beginning of a grant. Returns its row."""
        submitter, row = self.submitters[client], grant.pieces[0]
        offset = self.table.offsets[row]
        body = key[8:9] * payload_bytes
        self.ring[offset + SPAN_HEADER_BYTES : offset + SPAN_HEADER_BYTES + payload_bytes] = body
        record = RECORD.pack(
            submitter.expected, key, offset, payload_bytes, 0, 0, fields.get("parent", NO_KEY), 1.0,
            fields.get("ttl", 0.0), grant.number, min(64, payload_bytes), fields.get("tokens", 0), 0, 0, 0,
        )  # fmt: skip
        before = len(self.commits.fresh)
        self.commits.take(submitter, memoryview(record), self.now)
        self.work()
        return self.commits.fresh[-1] if len(self.commits.fresh) > before else 0

    def store(self, number: int, payload_bytes: int = 100, client: int = 1, uid: int = 0, **fields: Any) -> int:
        """Asks for a place and puts an entry into it. Returns its row; 0 if there was no room."""
        grants = self.places([span_bytes(payload_bytes)], client, uid)
        return self.write(grants[0], key_of(number), payload_bytes, client, **fields) if grants else 0

    # ---- what the actor does

    def work(self, *, settle: bool = True) -> None:
        """What follows from an event. `settle`: until nothing follows any more."""
        self.lending.serve(self.now)
        self.runway.advance(self.now)
        while settle and self.effects:
            if self.during:
                self.during.pop(0)()
            self.carry_out(self.effects.popleft())
            self.lending.serve(self.now)
            self.runway.advance(self.now)

    def carry_out(self, effect: Drain | Scan | Move) -> None:
        if isinstance(effect, Drain):
            self.runway.drained()
        elif isinstance(effect, Scan):
            self.runway.scanned(set(self.pinned), self.now)
        else:
            low, to, size = effect.from_offset, effect.to_offset, effect.size_bytes
            header = SpanHeader.unpack(self.ring[low : low + SPAN_HEADER_BYTES])
            self.ring[to : to + size] = self.ring[low : low + size]
            self.ring[to : to + SPAN_HEADER_BYTES] = header.moved_to(effect.number).pack()
            self.runway.moved(effect.number, copied=self.copies)

    def answered(self, client: int, answer: Answer) -> None:
        assert isinstance(answer, GrantsLent)
        self.answers[client, answer.id] = answer

    def ready(self) -> set[int]:
        return {row for rows in self.runway.places._ready.values() for row in rows}

    def check_invariants(self) -> None:
        super().check_invariants()
        self.lending.check_invariants()
        self.runway.places.check_invariants()
