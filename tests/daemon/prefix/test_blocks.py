"""Blocks of sequences from their records to their ends: what is matched, what is refused, what a restart knows, when a
query is answered, and which uses are counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensord.daemon.forms.effects import Send
from tensord.daemon.forms.events import ClientJoined, PrefixAsked
from tensord.daemon.forms.outbox import StoreOutbox
from tensord.daemon.prefix.matching import Matching
from tensord.daemon.prefix.nodes import LAYOUTS_MAX
from tensord.daemon.reports.counters import StoreCounters
from tensord.daemon.store.commit import BAD_BLOCK, NO_PARENT
from tensord.errors import BadPrefix, LimitReached
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.schema import BLOCKS_MAX
from tensord.shm.payloads.prefix import RECORD_BYTES_MAX, PrefixRecord, block_key, fold

from ..store.rows import TAG, key_of
from .stand import SCOPE, SequenceStore, item, query

# ---- matches


def test_tokens_that_look_like_folded_ones_are_not_taken_for_a_picture() -> None:
    stand, picture = SequenceStore(), item("image", 20, 4)
    tokens = np.arange(1, 65, dtype=np.uint32)
    stand.put(tokens.tolist(), media=[picture])
    assert stand.offset([*tokens.tolist(), 1], [picture]) == 64
    assert stand.offset(fold(tokens, [picture]).tolist()) == 20


# ---- refusals


def fitting(stand: SequenceStore) -> PrefixRecord:
    """A record that fits behind two blocks."""
    put = stand.put(range(1, 33), media=[item("image", 30, 5)])
    first = stand.blocks.record(stand.row(put.blocks[0]))
    assert first is not None
    return PrefixRecord(SCOPE, first.layout, False, False, 32, 16, put.blocks[1], (), 16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"start": 31}, "begins at token 31"),
        ({"start": 1 << 40}, "prefix_tokens_max"),
        ({"count": 0}, "0 tokens"),
        ({"count": 17}, "17 tokens"),
        ({"layout": bytes(16)}, "layout"),
        ({"scope": bytes(16)}, "scope"),
        ({"exact": True}, "layout"),
        ({"block_tokens": 32}, "block size"),
        ({"media": (item("image", 34, 2),)}, ""),  # which no query can have
        ({"media": (item("audio", 31, 2),)}, "begin"),
        ({"media": (item("audio", 48, 2),)}, "begin"),
        ({"media": (item("audio", 40, 0),)}, "no tokens"),
        ({"media": (item("audio", 41, 1), item("image", 40, 1))}, "order"),
        ({"media": (item("audio", 40, 2), item("audio", 41, 2))}, "overlaps"),
        ({"media": (item("audio", 40, 20),)}, ""),
        ({"snapshot": True}, "no tokens"),
        ({"snapshot": True, "count": 0}, ""),
        ({"snapshot": True, "count": 0, "start": 16}, "not in its block"),
        ({"snapshot": True, "count": 0, "start": 33}, "not in its block"),
        ({"snapshot": True, "count": 0, "start": 0, "parent": None}, "stands in a block"),
        ({"parent": None}, "begins at token"),
        ({"parent": None, "start": 0, "block_tokens": 8, "layout": b"o" * 16}, "8 tokens"),
        ({"parent": None, "start": 0, "block_tokens": 1 << 40, "layout": b"o" * 16}, "tokens a block"),
        ({"parent": None, "start": 0}, ""),
    ],
)
def test_a_record_that_does_not_fit_its_parent_is_refused_and_nothing_has_changed(
    change: dict[str, object], says: str
) -> None:
    stand = SequenceStore()
    record = replace(fitting(stand), **change)  # type: ignore[arg-type]
    before = len(stand.index), stand.offset(range(1, 60))
    key = stand.put_record(record, np.arange(record.count, dtype=np.uint32))
    assert bool(stand.row(key)) != bool(says)
    if says:
        [error] = stand.blocks.errors
        assert says in str(error)
        assert [each[2] for each in stand.store.commits.refused] == [BAD_BLOCK]
        assert (len(stand.index), stand.offset(range(1, 60))) == before
        assert stand.store.put(key_of(1), 64), "where the record was"
    stand.check()


def test_a_block_is_refused_whose_key_parent_or_bytes_are_not_those_of_its_record() -> None:
    stand = SequenceStore()
    record = fitting(stand)
    packed = record.pack(np.arange(16, dtype=np.uint32)).tobytes()
    key, parent = block_key(TAG, packed), record.parent
    first = stand.store.families.ancestors([stand.row(parent or b"")])
    plain = key_of(5)
    stand.store.put(plain, 64)
    for put, says in (
        ((key_of(9), packed, parent), "digest"),
        ((key, packed, None), "another parent"),
        ((key, packed, stand.store.slots.key(stand.store.table.slots[first.pop()])), "another parent"),
        ((key, packed, parent, len(packed) + 1), "within the payload"),
        ((key, packed, parent, 8), "96 to"),
        ((key, bytes(RECORD_BYTES_MAX + 64), parent, RECORD_BYTES_MAX + 1), "96 to"),
        ((key, bytes(len(packed)), parent), "begins with"),
    ):
        assert not stand.put_packed(*put)
        assert says in str(stand.blocks.errors.pop()), says
    on_plain = replace(record, parent=plain)
    stand.put_record(on_plain, np.arange(16, dtype=np.uint32))
    assert "has no record" in str(stand.blocks.errors.pop())
    partial = stand.put(range(50, 60)).blocks[0]
    snapshot = stand.put(range(70, 80), [10]).snapshots[10]
    for above in (partial, snapshot):
        assert stand.blocks.errors == []
        layout = stand.blocks.record(stand.row(above))
        assert layout is not None
        behind = replace(record, parent=above, start=16, layout=layout.layout, exact=layout.exact)
        stand.put_record(behind, np.arange(16, dtype=np.uint32))
        assert stand.blocks.errors.pop().code
    stand.put_record(replace(record, parent=key_of(77)), np.arange(16, dtype=np.uint32))
    assert stand.store.commits.refused[-1][2] == NO_PARENT and not stand.blocks.errors
    assert stand.put_packed(key, packed, parent)
    stand.check()


def test_a_sequence_has_at_most_blocks_max_blocks_and_a_namespace_layouts_max_layouts() -> None:
    stand = SequenceStore(2 << 20)
    put = stand.put(range(1, 16 * BLOCKS_MAX + 1))
    record = stand.blocks.record(stand.row(put.blocks[-1]))
    assert record is not None
    stand.put_record(replace(record, start=16 * BLOCKS_MAX, parent=put.blocks[-1]), np.arange(16, dtype=np.uint32))
    assert str(BLOCKS_MAX) in str(stand.blocks.errors.pop())
    for number in range(2, LAYOUTS_MAX + 1):
        stand.put(range(1, 9), layout=b"%d" % number)
    assert not stand.blocks.errors
    stand.put(range(1, 9), layout=b"another")
    assert str(LAYOUTS_MAX) in str(stand.blocks.errors.pop())
    stand.end_all(put.blocks[0])
    stand.put(range(1, 9), layout=b"another")
    assert not stand.blocks.errors, "a layout without blocks does not count"
    stand.check()


# ---- restarts and sweeps


def test_a_restarted_index_matches_more_with_each_slice_and_ends_what_is_damaged() -> None:
    stand = SequenceStore()
    put = stand.put(range(1, 65), media=[item("image", 20, 4)])
    exact = stand.put(range(200, 232), [24, 32])
    bad = stand.put(range(300, 348))
    new = stand.restart()
    offset = new.store.table.offsets[new.row(bad.blocks[1])]
    new.store.ring_memory[offset + 192 + 64 + 100] ^= 1
    assert new.offset(range(1, 90)) == 0
    waits = new.blocks.rebuilding
    assert waits == 4 + 4 + 3 and len(new.index) == 0
    assert new.blocks.rebuild(3) == [] and new.blocks.rebuilding == waits - 3
    new.check()
    ended = []
    while new.blocks.rebuilding:
        ended += new.blocks.rebuild(3)
        new.check() if not ended else None
    assert sorted(ended) == sorted(new.row(key) for key in bad.blocks[1:])
    for row in reversed(ended):
        new.store.spans.end([row], "corrupt")
    new.check()
    assert new.ask(range(1, 90), [item("image", 20, 4)]).offset == 64
    found = new.ask(range(200, 260))
    assert found.offset == 32 and found.snapshot == new.row(exact.snapshots[32])
    assert new.offset(range(300, 360)) == 16
    assert put.blocks[0] in new.store.table.by_key


class Asked:
    """A client's queries of a store, and the uses that follow."""

    def __init__(self, stand: SequenceStore, wait_s: float = 1.0) -> None:
        self.stand = stand
        self.outbox = StoreOutbox(StoreCounters())
        self.outbox.clients[1] = ClientJoined(1, 0)
        self.uses: list[tuple[int, int]] = []
        store = stand.store
        self.matching = Matching(store.table, store.slots, store.agents, stand.blocks, self.used, self.outbox, wait_s)

    def used(self, rows: list[int], now: float, agent: int) -> None:
        self.uses += [(row, agent) for row in rows]

    def ask(self, tokens: Iterable[int], agent: str = "", now: float = 0.0, **more: Any) -> messages.Matched | None:
        """The answer to a query; None if it waits."""
        asked = np.array([*tokens, 1 << 20], np.uint32)
        record = query(asked)
        fields = {name: getattr(record, name) for name in PrefixRecord.__slots__} | more
        message = messages.MatchPrefix(7, TAG, 0, 1000, agent)
        self.matching.asked(PrefixAsked(1, message, PrefixRecord(**fields), asked), now)
        return self.answer()

    def due(self) -> bool:
        return self.matching.due

    def answer(self) -> messages.Matched | None:
        for effect in self.outbox.take():
            assert isinstance(effect, Send) and isinstance(effect.message, messages.Matched)
            return effect.message
        return None


def test_a_match_names_keys_and_its_uses_are_counted_afterwards_but_not_of_what_has_ended() -> None:
    stand = SequenceStore()
    put = stand.put(range(1, 49))
    asked = Asked(stand)
    answer = asked.ask(range(1, 40), "planner")
    assert answer is not None and (answer.id, answer.offset) == (7, 39)
    assert answer.blocks == put.blocks and answer.snapshot is None
    assert asked.uses == [] and asked.due()
    rows = [stand.row(key) for key in put.blocks]
    stand.end_all(put.blocks[2])
    stand.put(range(60, 70))
    asked.matching.advance(1.0)
    agent = stand.store.agents.named("planner")
    assert asked.uses == [(row, agent) for row in rows[:2]] and not asked.due()
    asked.ask([9, 9])
    counters = asked.outbox.counters
    assert (counters.prefix_queries, counters.prefix_hits) == (2, 1)
    assert (counters.prefix_tokens_asked, counters.prefix_tokens_matched) == (43, 39)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"start": 1}, BadPrefix),
        ({"snapshot": True}, BadPrefix),
        ({"parent": bytes(32)}, BadPrefix),
        ({"count": 101}, LimitReached),
    ],
)
def test_a_query_that_is_no_whole_sequence_or_too_long_is_refused(more: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Asked(SequenceStore(tokens_max=100)).ask(range(9), **more)


@pytest.mark.parametrize("wait_s", [0.5, 0.0])
def test_a_query_after_a_restart_waits_for_its_blocks_and_no_longer_than_it_may(wait_s: float) -> None:
    stand = SequenceStore()
    stand.put(range(1, 101))
    stand.put([5, 5])
    asked = Asked(stand.restart(), wait_s)
    blocks = asked.stand.blocks
    assert blocks.rebuilding
    blocks.rebuild(3)
    assert asked.ask([5, 5]) is not None, "it is all there"
    first = asked.ask(range(1, 101))
    assert (first is None) == bool(wait_s)
    asked.matching.advance(0.4)
    assert asked.answer() is None and len(asked.matching.held) == bool(wait_s)
    if wait_s:
        assert asked.matching.next_timer() == wait_s
        asked.matching.advance(0.5)
        late = asked.answer()
        assert late is not None and 0 < late.offset < 100
        assert asked.ask(range(1, 101), now=0.5) is None
    while blocks.rebuilding:
        assert not blocks.rebuild(3)
    asked.matching.advance(0.6)
    whole = asked.answer() if wait_s else asked.ask(range(1, 101))
    assert whole is not None and whole.offset == 100 and not asked.matching.held


def test_a_scope_and_a_namespace_are_searched_alone() -> None:
    stand = SequenceStore()
    stand.put(range(1, 20))
    assert stand.ask(range(1, 30), scope=SCOPE).offset == 19
    assert stand.ask(range(1, 30), scope=bytes(16)).offset == 0
    assert stand.ask(range(1, 30), tag=b"another!").offset == 0
