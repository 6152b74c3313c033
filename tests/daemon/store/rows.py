"""A store's rows, slots, grants and commits over memory of this process, and clients that put through them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from tensord.daemon.claims.quotas import Quotas
from tensord.daemon.core.parts import Parts
from tensord.daemon.forms.limits import StoreLimits
from tensord.daemon.recovery.recovery import Recovery
from tensord.daemon.store.commit import Submitter
from tensord.daemon.store.entries import StoreMemory
from tensord.daemon.store.grants import LentGrant
from tensord.daemon.store.table import ENDED, WITHDRAWN
from tensord.shm.index.index import REUSE_USED_SHIFT, IndexReader, IndexWriter, reuse_ticks
from tensord.shm.lanes.records import NO_KEY, RECORD
from tensord.shm.ring.layout import SPAN_HEADER_BYTES, IndexGeometry, SpanHeader, span_bytes

TAG = b"namespac"


def reuse_word(uses: int, used_s: float) -> int:
    """The reuse word of a slot that no client holds."""
    return uses | reuse_ticks(used_s) << REUSE_USED_SHIFT


def key_of(number: int, tag: bytes = TAG) -> bytes:
    """A key whose bits are as even as those of a digest."""
    return tag + hashlib.sha256(number.to_bytes(8, "little")).digest()[:24]


class RowStore:
    """All parts of a store, without the order in which its core has them act. `scan` is one round of fence and scan;
    `put` is one put of a client, into a grant out of the holes."""

    def __init__(
        self,
        ring_bytes: int = 64 << 10,
        *,
        buckets: int = 64,
        policy: str = "lru",
        epoch: int = 1,
        index_memory: bytearray | None = None,
        ring: bytearray | None = None,
        **limits: Any,
    ) -> None:
        self.geometry = IndexGeometry(buckets)
        self.index_memory = bytearray(self.geometry.index_bytes) if index_memory is None else index_memory
        if index_memory is None:
            index = IndexWriter.create(self.geometry, self.index_memory)
        else:
            index = IndexWriter(index_memory, self.geometry)
        self.ring_memory = ring if ring is not None else bytearray(ring_bytes)
        self.ring = memoryview(self.ring_memory)
        self.ring_bytes = len(self.ring_memory)
        self.epoch = epoch
        self.max_entries = self.geometry.entries_max
        names = ("ring_bytes", "max_bytes", "object_bytes_max", "pinned_bytes_max")
        sizes: dict[str, Any] = dict.fromkeys(names, self.ring_bytes or 1)
        self.parts = parts = Parts(
            StoreMemory(index, memoryview(self.index_memory), self.geometry, self.ring, self.ring_bytes),
            policy,
            StoreLimits(**{**sizes, "max_entries": self.max_entries, **limits}),
            Quotas({}, own_uid=0),
            epoch,
            seed=epoch,
        )
        self.table, self.holes, self.slots, self.tenants = parts.table, parts.holes, parts.slots, parts.tenants
        self.agents, self.families, self.grants, self.policy = parts.agents, parts.families, parts.grants, parts.policy
        self.spans, self.commits = parts.spans, parts.commits
        self.submitters = parts.lending.submitters
        self.past: set[bytes] = set()
        """Keys that recovery takes for those of a past generation."""
        self.pinned: set[int] = set()

    def client(self, number: int = 1, uid: int = 0) -> Submitter:
        """The client with a number, which is new or known."""
        if number not in self.submitters:
            self.parts.lending.joined(number, uid)
        return self.submitters[number]

    def lend(self, size: int, client: int = 1, uid: int = 0) -> LentGrant | None:
        """Lends a place of `size` bytes out of the holes; None if none is large enough."""
        submitter = self.client(client, uid)
        row = self.holes.take(size, ENDED)
        if not row:
            return None
        [grant] = self.grants.lend_all([row], submitter.owner)
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
            "buckets": self.geometry.bucket_count,
            "policy": self.policy.name,
            "epoch": self.epoch + 1,
            "index_memory": self.index_memory,
            "ring": self.ring_memory,
        }
        return RowStore(**{**kept, **how})  # type: ignore[arg-type]

    def recovery(self, now: float = 10.0, missing: Iterable[tuple[int, int]] = ()) -> Recovery:
        """What takes over the memory of an earlier store, into this one, which is empty."""
        return Recovery(self.parts, now, missing, self.past.__contains__)

    def check_invariants(self) -> None:
        """Of all parts, and between them."""
        self.table.check_invariants()
        self.holes.check_invariants()
        self.grants.check_invariants([g for each in self.submitters.values() for g in each.grants.values()])
        self.families.check_invariants()
        self.spans.check_invariants()
        self.policy.check_invariants()
        table = self.table
        kept = [row for row in table.in_order() if table.states[row] != WITHDRAWN]
        rows = np.array(kept, np.int64)
        owned = np.zeros(max(len(self.tenants.uids), 1), np.int64)
        np.add.at(owned, self.table.column("owners")[rows], self.table.column("sizes")[rows].astype(np.int64))
        assert owned.tolist()[: len(self.tenants.uids)] == self.tenants.owned_bytes
