"""Queries: what is answered and when, after a restart too, and which uses are counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from tensord.daemon.forms.effects import Send
from tensord.daemon.forms.events import ClientJoined, PrefixAsked
from tensord.daemon.forms.outbox import StoreOutbox
from tensord.daemon.prefix.matching import USES_MAX, USES_SLICE, Matching
from tensord.daemon.reports.counters import StoreCounters
from tensord.errors import BadPrefix, LimitReached
from tensord.ipc.messages import control as messages
from tensord.shm.payloads.prefix import PrefixRecord

from ..store.rows import TAG
from .stand import SCOPE, SequenceStore, query


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


def test_uses_are_counted_in_slices_and_those_that_are_too_many_are_lost_the_oldest_first() -> None:
    stand = SequenceStore()
    stand.put(range(1, 64 * 16 + 1))
    asked = Asked(stand)
    for _ in range(USES_MAX // 64 + 5):
        asked.ask(range(1, 64 * 16 + 1))
    assert asked.outbox.counters.prefix_uses_lost == 5 * 64
    asked.matching.advance(1.0)
    assert len(asked.uses) == USES_SLICE and asked.matching.due


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"start": 1}, BadPrefix),
        ({"snapshot": True}, BadPrefix),
        ({"parent": bytes(32)}, BadPrefix),
        ({"count": 5}, BadPrefix),
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
