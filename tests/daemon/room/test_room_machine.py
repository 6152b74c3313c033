"""Clients that put, leave and give back, readers that pin, ends, lowered limits and restarts of scans, in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensord.shm.layout import span_bytes
from tensord.shm.records import NO_KEY

from ..store.rows import key_of
from .room import RoomStore

SIZES = st.sampled_from([100, 400, 1000, 3000, 9000])
CLIENTS = st.integers(1, 4)


class RoomMachine(RuleBasedStateMachine):
    """Every answer is the right one, what is published is read as it was put, and nothing is lost of the ring."""

    @initialize(policy=st.sampled_from(["lru", "hazard"]))
    def start(self, policy: str) -> None:
        self.store = RoomStore(32 << 10, row_bits=10, buckets=32, policy=policy, max_entries=60, max_tokens=200)
        self.payloads: dict[bytes, bytes] = {}
        self.pinned_bytes: dict[int, tuple[int, bytes]] = {}
        self.numbers = 0
        self.asked: dict[tuple[int, int], int] = {}

    def uid(self, client: int) -> int:
        return client % 3

    @rule(client=CLIENTS, sizes=st.lists(SIZES, min_size=1, max_size=4))
    def asks(self, client: int, sizes: list[int]) -> None:
        request = self.store.ask([span_bytes(size) for size in sizes], client, self.uid(client), settle=False)
        self.asked[client, request] = span_bytes(sizes[0])

    @rule(client=CLIENTS, data=st.data())
    def writes(self, client: int, data: st.DataObject) -> None:
        grants = [*self.store.client(client, self.uid(client)).grants.values()]
        if not grants:
            return
        grant = data.draw(st.sampled_from(grants))
        room = self.store.table.sizes[grant.pieces[0]]
        fits = [size for size in (100, 400, 1000, 3000, 9000) if span_bytes(size) <= room]
        if not fits:
            return
        size = data.draw(st.sampled_from(fits))
        self.numbers += 1
        parent = NO_KEY
        if data.draw(st.booleans()) and self.store.table.by_key:
            parent = data.draw(st.sampled_from(sorted(self.store.table.by_key)))
        key = key_of(self.numbers)
        if self.store.write(grant, key, size, client, tokens=data.draw(st.integers(0, 20)), parent=parent):
            self.payloads[key] = key[8:9] * size

    @rule(client=CLIENTS, data=st.data())
    def gives_back(self, client: int, data: st.DataObject) -> None:
        numbers = [*self.store.client(client, self.uid(client)).grants]
        self.store.lending.returned(client, [each for each in numbers if data.draw(st.booleans())])
        self.store.work(settle=False)

    @rule(client=CLIENTS)
    def leaves(self, client: int) -> None:
        self.store.lending.left(client)
        self.asked = {each: size for each, size in self.asked.items() if each[0] != client}
        self.store.work(settle=False)

    @precondition(lambda self: self.store.table.by_key)
    @rule(data=st.data())
    def pins(self, data: st.DataObject) -> None:
        table = self.store.table
        row = table.by_key[data.draw(st.sampled_from(sorted(table.by_key)))]
        offset = table.offsets[row]
        self.store.pinned.add(table.span_ids[row])
        self.pinned_bytes[table.span_ids[row]] = offset, bytes(self.store.ring[offset : offset + table.sizes[row]])

    @rule(data=st.data())
    def unpins(self, data: st.DataObject) -> None:
        for number in sorted(self.store.pinned):
            if data.draw(st.booleans()):
                self.store.pinned.discard(number)
                self.pinned_bytes.pop(number, None)

    @precondition(lambda self: self.store.table.by_key)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        table = self.store.table
        row = table.by_key[data.draw(st.sampled_from(sorted(table.by_key)))]
        below = self._whole(row)
        self.store.spans.end(below, "explicit")
        self.store.work(settle=False)

    def _whole(self, row: int) -> list[int]:
        """An entry with its descendants, hidden ones too, children first."""
        found: list[int] = []
        for child in list(self.store.families.children_of(row)):
            found += self._whole(child)
        return [*found, row]

    @rule(used=st.lists(st.integers(0, 50), max_size=5))
    def uses(self, used: list[int]) -> None:
        rows = sorted(self.store.table.by_key.values())
        self.store.policy.used([rows[each % len(rows)] for each in used if rows], self.store.now)

    @rule(most=st.integers(1, 6), copies=st.booleans())
    def effects_end(self, most: int, copies: bool) -> None:
        self.store.copies = copies
        for _ in range(min(most, len(self.store.effects))):
            self.store.carry_out(self.store.effects.popleft())
            self.store.work(settle=False)

    @rule(max_bytes=st.sampled_from([12_032, 24_000, 32 << 10]), entries=st.sampled_from([10, 60]))
    def limits_change(self, max_bytes: int, entries: int) -> None:
        self.store.budget.max_bytes, self.store.budget.max_entries = max_bytes, entries
        self.store.lending.limit_changed()
        self.store.work(settle=False)

    @rule()
    def time_passes(self) -> None:
        self.store.now += 3.0
        self.store.runway.tick(self.store.now)
        self.store.work(settle=False)

    @rule()
    def all_settles(self) -> None:
        self.store.copies = True
        self.store.work()
        store, runway = self.store, self.store.runway
        lent = {request for request in self.asked if request not in store.answers}
        assert len(lent) == store.lending.waiting
        assert not len(store.lending._turns), "a request waits for room, and nothing is under way"
        # What is over a limit is only what cannot go.
        for _ in range(20):
            if (timer := runway.next_timer()) is None:
                break
            store.now = max(store.now, timer)
            runway.tick(store.now)
            store.work()
        if not store.pinned:
            assert store.tenants.total_entries <= store.budget.max_entries
            assert store.tenants.total_tokens <= (store.budget.max_tokens or 0)
            assert not store.spans.ended_bytes and not store.grants.revoked

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "store"):
            return
        store = self.store
        store.check_invariants()
        for key in store.table.by_key:
            assert store.read(key) == self.payloads[key]
        for offset, there in self.pinned_bytes.values():
            # But for the time of expiry and the header's copy of it.
            assert store.ring[offset : offset + len(there)] == there, "a reader's bytes were written over"
        for (client, request), size in self.asked.items():
            answer = store.answers.get((client, request))
            if answer is not None and answer.error is None:
                assert answer.grants[0][2] == size

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.all_settles()
            self.all_is_well()


TestRoom = RoomMachine.TestCase
TestRoom.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
