"""The lean store against plain dicts: rows, holes, grants, commits, runway and recovery together, over a real index."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensord.daemon.store.commit import CommitLimits, Commits, Submitter
from tensord.daemon.store.grants import Grants, LentGrant
from tensord.daemon.store.holes import Holes
from tensord.daemon.store.recovery import recover
from tensord.daemon.store.runway import Runway
from tensord.daemon.store.slots import Slots
from tensord.daemon.store.table import LENT, LIVE, RowTable
from tensord.daemon.store.tenants import Tenants
from tensord.daemon.store.window import PutWindow
from tensord.shm.index import IndexReader, IndexWriter
from tensord.shm.layout import SPAN_HEADER_BYTES, IndexGeometry, SpanHeader
from tensord.shm.records import NO_KEY, RECORD

RING_BYTES = 64 << 10
ROW_BITS = 9
GEOMETRY = IndexGeometry(8)
TAG = b"namespac"


class Oldest:
    """Evicts what entered first."""

    def __init__(self) -> None:
        self.rows: OrderedDict[int, None] = OrderedDict()

    def entered(self, rows: list[int]) -> None:
        self.rows.update(dict.fromkeys(rows))

    def removed(self, rows: list[int], *, evicted: bool) -> None:
        for row in rows:
            self.rows.pop(row, None)

    def victims(self, most: int) -> list[int]:
        return [self.rows.popitem(last=False)[0] for _ in range(min(most, len(self.rows)))]


class Client:
    """What a client knows: its grants, and the bytes of each that it has not used."""

    def __init__(self, number: int, owner: int, uid: int) -> None:
        self.submitter = Submitter(number, owner, uid)
        self.lent: list[tuple[LentGrant, int, int]] = []


class LeanStore(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.index_memory = bytearray(GEOMETRY.index_bytes)
        IndexWriter.create(GEOMETRY, self.index_memory)
        self.ring = memoryview(bytearray(RING_BYTES))
        self.entries: dict[bytes, bytes] = {}
        self.epoch = 0
        self.keys = self.unknown = 0
        self.clients: list[Client] = []
        self.pinned: set[int] = set()
        self.begin()

    def begin(self) -> None:
        self.epoch += 1
        self.table = RowTable(ROW_BITS, self.epoch)
        self.holes = Holes(self.table, RING_BYTES)
        self.slots = Slots(memoryview(self.index_memory), GEOMETRY)
        self.grants = Grants(self.table, self.holes, self.slots, self.unknown_key)
        self.tenants = Tenants()
        self.window = PutWindow(RING_BYTES // 8)
        found = recover(self.table, self.holes, self.slots, self.grants, self.tenants, GEOMETRY, self.ring)
        assert not found.corrupt
        order = Oldest()
        order.entered(found.rows.tolist())
        limits = CommitLimits(GEOMETRY.entries_max, 1 << 40)
        self.commits = Commits(
            self.table, self.holes, self.slots, self.grants, self.window, self.tenants, self.ring, limits
        )
        self.commits.entries = len(found.rows)
        self.runway = Runway(
            self.table, self.holes, self.slots, self.grants, self.window, self.tenants, self.commits, order
        )
        self.clients = [Client(uid, self.tenants.owner(uid), uid) for uid in (0, 7)]

    def lent(self) -> list[LentGrant]:
        return [grant for client in self.clients for grant in client.submitter.grants.values()]

    @rule(of=st.integers(0, 1), blocks=st.integers(4, 60))
    def asks_for_a_grant(self, of: int, blocks: int) -> None:
        row = self.runway.place(blocks * 64)
        if not row:
            return
        client = self.clients[of]
        grant = self.grants.lend(row, client.submitter.owner)
        if grant is None:
            self.holes.free(row)
            return
        self.tenants.lent(client.submitter.owner, blocks * 64)
        client.submitter.grants[grant.number] = grant
        client.lent.append((grant, self.table.offsets[row], blocks * 64))
        assert self.table.states[row] == LENT

    @precondition(lambda self: any(client.lent for client in self.clients))
    @rule(data=st.data())
    def puts(self, data: st.DataObject) -> None:
        """Several puts, whose records come in any order, one of a known key among them perhaps."""
        client = data.draw(st.sampled_from([client for client in self.clients if client.lent]))
        records = []
        for _ in range(data.draw(st.integers(1, 3))):
            if not client.lent:
                break
            grant, offset, left = client.lent.pop(data.draw(st.integers(0, len(client.lent) - 1)))
            size = data.draw(st.integers(4, left // 64)) * 64
            if left - size >= 256:
                client.lent.append((grant, offset + size, left - size))
            self.keys += 1
            known = sorted(self.entries)
            again = bool(known) and data.draw(st.booleans())
            key = data.draw(st.sampled_from(known)) if again else self.new_key()
            payload = bytes([self.keys & 255]) * (size - SPAN_HEADER_BYTES)
            start = offset + SPAN_HEADER_BYTES
            self.ring[start : start + len(payload)] = payload
            records.append((key, offset, len(payload), grant.number))
            if key not in self.entries:
                self.entries[key] = payload
        records = data.draw(st.permutations(records))
        number = client.submitter.expected
        packed = b"".join(
            RECORD.pack(number + i, key, offset, size, 0, 0, NO_KEY, 1.0, 0.0, grant, 64, 3, 0, 0, 0)
            for i, (key, offset, size, grant) in enumerate(records)
        )
        known_before = set(self.table.by_key)
        self.commits.take(client.submitter, memoryview(packed), 1.0)
        for _, _, reason, key in self.commits.refused:
            assert reason == 6, "only a bucket may be full"
            if key not in known_before:
                self.entries.pop(key, None)
        first: dict[bytes, bytes] = {}
        for key, offset, size, _ in records:
            if key not in known_before and key in self.entries:
                first.setdefault(key, bytes(self.ring[offset + SPAN_HEADER_BYTES :][:size]))
        self.entries.update(first)
        self.commits.refused.clear()
        self.commits.existed.clear()

    def unknown_key(self) -> bytes:
        self.unknown += 1
        return hashlib.sha256(self.unknown.to_bytes(8, "little")).digest()

    def new_key(self) -> bytes:
        words = np.array([self.keys], np.uint64) * np.array(
            [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64
        )
        return TAG + words.tobytes()

    @rule(most=st.integers(1, 20), data=st.data())
    def makes_room(self, most: int, data: st.DataObject) -> None:
        self.runway.begin(most)
        live = [self.table.span_ids[row] for row in self.table.in_order()]
        pinned = set(data.draw(st.lists(st.sampled_from(live)))) if live else set()
        pinned |= {grant.span_id for grant in self.grants.revoked.values() if data.draw(st.booleans())}
        before = dict(self.entries)
        self.runway.end(pinned)
        self.entries = {key: payload for key, payload in before.items() if key in self.table.by_key}
        if data.draw(st.booleans()):
            self.runway.give_up()

    @rule(of=st.integers(0, 1))
    def a_client_leaves(self, of: int) -> None:
        client = self.clients[of]
        for grant in client.submitter.grants.values():
            self.grants.revoke(grant)
        owner = client.submitter.owner
        self.clients[of] = Client(client.submitter.client, owner, client.submitter.uid)

    @rule()
    def restarts(self) -> None:
        """By a kill: nothing is written before."""
        self.begin()
        assert set(self.table.by_key) == set(self.entries)

    @invariant()
    def every_entry_can_be_read(self) -> None:
        if not hasattr(self, "table"):
            return
        assert set(self.table.by_key) == set(self.entries)
        reader = IndexReader(self.index_memory, GEOMETRY)  # type: ignore[arg-type]
        for key, payload in self.entries.items():
            hit = reader.find(key)
            assert hit is not None
            _, _, span_id, place, size = hit
            offset = place & ((1 << 48) - 64)
            assert self.ring[offset + SPAN_HEADER_BYTES :][:size] == payload
            header = SpanHeader.unpack(self.ring[offset : offset + SPAN_HEADER_BYTES])
            assert (header.key, header.span_id, header.payload_bytes) == (key, span_id, size)

    @invariant()
    def the_parts_agree(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check_invariants()
        self.holes.check_invariants()
        self.grants.check_invariants(self.lent())
        rows = [row for row in self.table.in_order() if self.table.states[row] == LIVE]
        assert self.commits.entries == len(rows)
        assert sum(self.tenants.entries) == len(rows)
        assert sum(self.tenants.bytes) == sum(self.table.sizes[row] for row in rows)


TestLeanStore = LeanStore.TestCase
TestLeanStore.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
