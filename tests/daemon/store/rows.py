"""A store's rows, slots, grants and commits over memory of this process, and clients that put through them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from itertools import count

import numpy as np

from tensord.daemon.recovery.recovery import Recovery
from tensord.daemon.replacement import POLICIES, Facts
from tensord.daemon.store.agents import AgentNumbers
from tensord.daemon.store.commit import CommitLimits, Commits, Submitter
from tensord.daemon.store.families import Families
from tensord.daemon.store.grants import Grants, LentGrant
from tensord.daemon.store.holes import Holes
from tensord.daemon.store.slots import Slots
from tensord.daemon.store.spans import Blocks, Spans
from tensord.daemon.store.table import ENDED, WITHDRAWN, RowTable
from tensord.daemon.store.tenants import Tenants
from tensord.shm.index.index import REUSE_USED_SHIFT, IndexReader, IndexWriter, reuse_ticks
from tensord.shm.lanes.records import NO_KEY, RECORD
from tensord.shm.ring.layout import SPAN_HEADER_BYTES, IndexGeometry, SpanHeader, span_bytes

TAG = b"namespac"


def reuse_word(uses: int, used_s: float) -> int:
    """The reuse word of a slot that no client holds."""
    return uses | reuse_ticks(used_s) << REUSE_USED_SHIFT


class NoBlocks:
    """The index of cached sequences of a store that has none."""

    def remove(self, row: int) -> None: ...


def key_of(number: int, tag: bytes = TAG) -> bytes:
    """A key whose bits are as even as those of a digest."""
    return tag + hashlib.sha256(number.to_bytes(8, "little")).digest()[:24]


class RowStore:
    """All parts of daemon/store, connected. `scan` is one round of fence and scan; `put` is one put of a client."""

    def __init__(
        self,
        ring_bytes: int = 64 << 10,
        *,
        row_bits: int = 10,
        buckets: int = 64,
        policy: str = "lru",
        epoch: int = 1,
        index_memory: bytearray | None = None,
        ring: bytearray | None = None,
        max_entries: int | None = None,
        max_tokens: int = 1 << 40,
        blocks: Blocks | None = None,
        block: Callable[[int, bytes, int, int, int, int], bool] | None = None,
    ) -> None:
        self.geometry = IndexGeometry(buckets)
        if index_memory is None:
            index_memory = bytearray(self.geometry.index_bytes)
            IndexWriter.create(self.geometry, index_memory)
        self.index_memory = index_memory
        self.ring_memory = ring if ring is not None else bytearray(ring_bytes)
        self.ring = memoryview(self.ring_memory)
        self.ring_bytes = len(self.ring_memory)
        unknown = count()
        self.epoch = epoch
        self.table = RowTable(row_bits, epoch)
        self.holes = Holes(self.table, self.ring_bytes)
        self.slots = Slots(memoryview(index_memory), self.geometry)
        self.tenants = Tenants()
        self.agents = AgentNumbers()
        self.families = Families(self.table)
        tag = epoch.to_bytes(8, "big")
        self.grants = Grants(
            self.table, self.holes, self.slots, self.tenants,
            lambda size: b"".join(key_of(next(unknown), tag) for _ in range(size // 32)),
        )  # fmt: skip
        self.policy = POLICIES[policy](Facts.of(self.table.column))
        self.spans = Spans(
            self.table, self.slots, self.grants, self.tenants, self.families, self.policy, blocks or NoBlocks()
        )
        self.claims: set[bytes] = set()
        self.past: set[bytes] = set()
        self.limits = CommitLimits(max_tokens)
        self.max_entries = max_entries or self.geometry.entries_max
        self.commits = Commits(
            self.table,
            self.holes,
            self.slots,
            self.grants,
            self.policy,
            self.tenants,
            self.families,
            self.agents,
            self.ring,
            self.limits,
            self.claims,
            self.past.__contains__,
            self.spans.recall,
            block,
            self.spans.hidden,
            self.spans.replaced,
        )
        self.submitters: dict[int, Submitter] = {}
        self.pinned: set[int] = set()

    def client(self, number: int = 1, uid: int = 0) -> Submitter:
        """The client with a number, which is new or known."""
        if number not in self.submitters:
            self.submitters[number] = Submitter(number, self.tenants.owner(uid), uid)
        return self.submitters[number]

    def lend(self, size: int, client: int = 1, uid: int = 0) -> LentGrant | None:
        """Lends a place of `size` bytes out of the holes; None if none is large enough."""
        submitter = self.client(client, uid)
        row = self.holes.take(size, ENDED)
        if not row:
            return None
        grant = self.grants.lend(row, submitter.owner)
        assert grant is not None, "both buckets of a random key are full"
        submitter.grants[grant.number] = grant
        return grant

    def put(
        self,
        key: bytes,
        payload: int | bytes = 100,
        *,
        client: int = 1,
        uid: int = 0,
        now: float = 1.0,
        cost: float = 1.0,
        ttl: float = 0.0,
        tokens: int = 0,
        parent: bytes = NO_KEY,
        agent: int = 0,
        prefix: int = 0,
        tree: int = 64,
        claim: int = 0,
    ) -> int:
        """Puts an entry through a grant of its own.

        Returns:
            Its row; 0 if there was no room, or the record was refused (`commits.refused`) or known (`existed`).
        """
        body = bytes([key[8]]) * payload if isinstance(payload, int) else payload
        grant = self.lend(span_bytes(len(body)), client, uid)
        if grant is None:
            return 0
        submitter = self.submitters[client]
        offset = self.table.offsets[grant.pieces[0]]
        self.ring[offset + SPAN_HEADER_BYTES : offset + SPAN_HEADER_BYTES + len(body)] = body
        record = RECORD.pack(
            submitter.expected, key, offset, len(body), 0, claim, parent, cost, ttl, grant.number, min(tree, len(body)),
            tokens, prefix, agent, 0,
        )  # fmt: skip
        before = len(self.commits.fresh)
        self.commits.take(submitter, memoryview(record), now)
        return self.commits.fresh[-1] if len(self.commits.fresh) > before else 0

    def fill(self, first: int = 0, payload: int = 100, **put: object) -> list[int]:
        """Puts entries until there is no room. Returns their rows."""
        rows: list[int] = []
        for number in count(first):
            row = self.put(key_of(number), payload, **put)  # type: ignore[arg-type]
            if not row:
                return rows
            rows.append(row)
        return rows

    def scan(self, pinned: Iterable[int] | None = None) -> list[int]:
        """One fence and scan, which finds these span ids (default: `self.pinned`); freed rows become holes. Returns the
        freed rows."""
        self.spans.begin_scan()
        outcome = self.spans.scanned(set(self.pinned if pinned is None else pinned))
        for row in outcome.freed:
            self.holes.free(row)
        return outcome.freed

    def evict(self, most: int) -> int:
        """Hides what the policy gives, and scans. Returns how many entries were given."""
        rows = self.policy.victims(most)
        self.spans.hide(rows, "capacity")
        self.scan()
        return len(rows)

    def header(self, row: int) -> SpanHeader:
        """The header of an entry."""
        offset = self.table.offsets[row]
        return SpanHeader.unpack(self.ring[offset : offset + SPAN_HEADER_BYTES])

    def read(self, key: bytes) -> bytes | None:
        """What a reader gets: the payload; None for a miss."""
        hit = IndexReader(self.index_memory, self.geometry).find(key)  # type: ignore[arg-type]
        if hit is None:
            return None
        _, _, span_id, place, size = hit
        offset = place & ((1 << 48) - 64)
        header = SpanHeader.unpack(self.ring[offset : offset + SPAN_HEADER_BYTES])
        assert (header.key, header.span_id, header.payload_bytes) == (key, span_id, size)
        return bytes(self.ring[offset + SPAN_HEADER_BYTES :][:size])

    def restarted(self, **how: object) -> RowStore:
        """A new, empty store over the same memory: `recovery` fills it."""
        kept: dict[str, object] = {
            "row_bits": self.table.row_bits,
            "buckets": self.geometry.bucket_count,
            "policy": self.policy.name,
            "epoch": self.epoch + 1,
            "index_memory": self.index_memory,
            "ring": self.ring_memory,
        }
        return RowStore(**{**kept, **how})  # type: ignore[arg-type]

    def recovery(self, now: float = 10.0, missing: Iterable[tuple[int, int]] = ()) -> Recovery:
        """What takes over the memory of an earlier store, into this one, which is empty."""
        return Recovery(
            self.table,
            self.holes,
            self.slots,
            self.grants,
            self.tenants,
            self.families,
            self.policy,
            self.geometry,
            self.ring,
            now,
            missing,
            self.past.__contains__,
        )

    def ready(self) -> set[int]:
        """Rows that nobody has, kept to be lent."""
        return set()

    def check_invariants(self) -> None:
        """Of all parts, and between them."""
        self.table.check_invariants()
        self.holes.check_invariants()
        self.grants.check_invariants([g for each in self.submitters.values() for g in each.grants.values()])
        self.families.check_invariants()
        self.spans.check_invariants()
        self.policy.check_invariants()
        table, ready = self.table, self.ready()
        kept = [row for row in table.in_order() if table.states[row] != WITHDRAWN and row not in ready]
        rows = np.array(kept, np.int64)
        owned = np.zeros(max(len(self.tenants.uids), 1), np.int64)
        np.add.at(owned, self.table.column("owners")[rows], self.table.column("sizes")[rows].astype(np.int64))
        assert owned.tolist()[: len(self.tenants.uids)] == self.tenants.owned_bytes
