"""Puts, readers, pressure, limits and restarts in any order: what is stored is read, and what is viewed stays."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensord.daemon.core.host_memory import Pressed
from tensord.daemon.store.table import LIVE
from tensord.shm.records import NO_KEY

from ..store.rows import RowStore, key_of
from .host import Host

PAGE = 256
PAGES = 48
KEYS = range(24)


class HostMachine(RuleBasedStateMachine):
    """`payloads`: what the entries have that were put. `viewed`: by span id, where a reader looks, and what it saw."""

    @initialize(policy=st.sampled_from(["lru", "hazard"]))
    def start(self, policy: str) -> None:
        self.host = Host(PAGES * PAGE, page_bytes=PAGE, policy=policy)
        self.payloads: dict[int, bytes] = {}
        self.viewed: dict[int, tuple[int, bytes]] = {}
        self.lent = False

    @property
    def store(self) -> RowStore:
        return self.host.store

    @rule(
        number=st.sampled_from(KEYS), size=st.integers(1, 2000), parent=st.sampled_from(KEYS), client=st.integers(1, 2)
    )
    def put(self, number: int, size: int, parent: int, client: int) -> None:
        above = key_of(parent) if parent < number and parent % 3 == 0 else NO_KEY
        body = random.Random(size).randbytes(size)
        self.host.now += 1
        if self.store.put(key_of(number), body, client=client, uid=client, now=self.host.now, parent=above):
            self.payloads[number] = body
        self.host.follow()

    @rule(number=st.sampled_from(KEYS))
    def view(self, number: int) -> None:
        row = self.store.table.by_key.get(key_of(number))
        if row is not None:
            offset, size = self.store.table.offsets[row], self.store.table.sizes[row]
            self.viewed[self.store.table.span_ids[row]] = offset, bytes(self.store.ring[offset : offset + size])
            self.store.pinned.add(self.store.table.span_ids[row])

    @rule(which=st.integers(0, 5))
    def release(self, which: int) -> None:
        if self.viewed:
            span_id = sorted(self.viewed)[which % len(self.viewed)]
            del self.viewed[span_id]
            self.store.pinned.discard(span_id)

    @rule(number=st.sampled_from(KEYS))
    def use(self, number: int) -> None:
        if key_of(number) in self.store.table.by_key:
            self.host.now += 1
            self.host.use(number)

    @rule(number=st.sampled_from(KEYS))
    def end(self, number: int) -> None:
        row = self.store.table.by_key.get(key_of(number))
        if row is not None:
            self.store.spans.end(list(self.store.families.leaves_first(row))[::-1], "explicit")
            self.host.follow()

    @rule(most=st.integers(1, 4))
    def make_room(self, most: int) -> None:
        self.store.spans.hide(self.store.policy.victims(most), "capacity")
        self.host.follow()

    @precondition(lambda self: len(self.store.client().grants) < 3)
    @rule(pages=st.integers(1, 6))
    def lend(self, pages: int) -> None:
        self.store.lend(pages * PAGE // 2)
        self.host.follow()

    @rule(pages=st.none() | st.integers(0, PAGES), idle_s=st.none() | st.integers(1, 10))
    def press(self, pages: int | None, idle_s: int | None) -> None:
        self.host.host.press(Pressed(None if pages is None else pages * PAGE, idle_s))
        self.host.holds = None
        self.host.follow()

    @rule(pages=st.integers(8, PAGES))
    def limit(self, pages: int) -> None:
        self.host.budget.max_bytes = pages * PAGE
        self.host.follow()

    @rule()
    def exchange(self) -> None:
        residency = self.host.host.residency
        where = self.host.host.withdrawn.widest(4 * PAGE)
        if where is not None and not residency.exchanging:
            residency.exchange(*where, 4 * PAGE)
            self.host.follow()

    @rule()
    def end_exchange(self) -> None:
        self.host.host.residency.drop_exchange()
        self.host.follow()

    @rule(count=st.integers(1, 8), short=st.booleans())
    def step(self, count: int, short: bool) -> None:
        self.host.short = short
        for _ in range(count):
            self.host.step()

    @rule(unwritten=st.sets(st.integers(1, 60), max_size=8))
    def wait_for_the_remote_store(self, unwritten: set[int]) -> None:
        self.host.remote.write()
        self.host.remote.unwritten = unwritten
        self.host.follow()

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.host.now += seconds
        self.host.host.tick(self.host.now)
        self.host.follow()

    @rule(row_bits=st.sampled_from([10, 10, 11]))
    def restart(self, row_bits: int) -> None:
        before = self.store
        stored = {number for number in KEYS if key_of(number) in before.table.by_key}
        after = before.restarted(row_bits=row_bits)
        found = after.recovery(self.host.now, self.host.host.withdrawn.within(0, PAGES * PAGE)).run()
        assert found.corrupt == 0
        after.pinned = set(before.pinned)
        limit, now = self.host.budget.max_bytes, self.host.now
        self.host = Host(PAGES * PAGE, page_bytes=PAGE, store=after)
        self.host.budget.max_bytes, self.host.now = limit, now
        self.host.follow()
        assert {number for number in KEYS if key_of(number) in after.table.by_key} == stored

    @invariant()
    def what_is_stored_is_read_and_what_is_viewed_stays(self) -> None:
        if not hasattr(self, "host"):
            return
        self.host.check()
        for key, row in self.store.table.by_key.items():
            assert self.store.table.states[row] == LIVE
            assert self.store.read(key) == self.payloads[self.host.number(row)]
        for offset, seen in self.viewed.values():
            header, payload = 192, slice(offset + 192, offset + len(seen))
            assert bytes(self.store.ring[payload]) == seen[header:]

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        self.viewed.clear()
        self.store.pinned.clear()
        for submitter in self.store.submitters.values():
            for grant in submitter.grants.values():
                self.store.grants.revoke(grant)
            submitter.grants.clear()
        self.host.remote.write()
        self.host.remote.unwritten.clear()
        self.host.short = False
        self.host.host.residency.drop_exchange()
        self.host.budget.max_bytes = PAGES * PAGE
        self.host.press(0)
        self.host.pass_time(60)
        assert self.host.host.residency.resident_bytes == 0 and not self.host.stored()
        self.host.press()
        self.host.pass_time(60)
        assert self.store.holes.largest_bytes == PAGES * PAGE


test_host_machine = pytest.mark.timeout(300)(HostMachine.TestCase)
HostMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
