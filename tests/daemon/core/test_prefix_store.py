"""Cached sequences in the store: no block without the one before it, whatever evicts, ends or restarts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tensord.daemon.core.events import AgentsTurned, FoundCorrupt, Tick
from tensord.daemon.core.matching import USES_MAX, USES_SLICE
from tensord.daemon.core.sequences import REBUILD_SLICE
from tensord.daemon.core.sweeps import SLICE
from tensord.daemon.policy.registry import POLICIES
from tensord.ipc import messages
from tensord.shm.layout import SPAN_HEADER_BYTES, aligned, span_bytes

from .blocks import BLOCK, TAG, Block, block, name, query, snapshot, text
from .stand import Stand, key
from .test_recovery import finish, restart

SPAN = span_bytes(block([1]).payload_bytes)


def stand_of(blocks: int, **more: Any) -> Stand:
    """A ring that holds so many blocks."""
    stand = Stand(SPAN * blocks, max_entries=max(1000, blocks), **more)
    stand.join(1, 2)
    return stand


def begin(stand: Stand, request: int, put: Block, client: int = 2) -> None:
    """A put whose parts have not come."""
    stand.records[put.key] = put.packed
    stand.send(client, put.commit(request))


def whole(stand: Stand, *sequences: tuple[int, ...]) -> None:
    """No block of these is there without all those before it; and what is there is matched."""
    for words in sequences:
        there = [stand.has_block(*words[: end + 1]) for end in range(len(words))]
        assert there == sorted(there, reverse=True), f"a block of {words} without the one before: {there}"
        assert stand.matched(*words) == sum(there)
    stand.check()


# ---- taken in


def test_a_sequence_is_matched_as_far_as_its_blocks_are_stored() -> None:
    stand = stand_of(10)
    assert stand.put_sequence(1, 2, 3) == ["stored"] * 3
    assert stand.put_sequence(1, 2, 4) == ["existed", "existed", "stored"]
    assert [stand.matched(1, 2, 3), stand.matched(1, 2, 4, 5), stand.matched(1, 9), stand.matched(9)] == [3, 3, 1, 0]
    cut = stand.match(1, 2, rest=0)
    assert isinstance(cut, messages.Matched)
    assert (cut.offset, len(cut.blocks)) == (2 * BLOCK - 1, 2), "a full match leaves the last token"
    whole(stand, (1, 2, 3), (1, 2, 4))


def test_a_match_names_the_snapshot_at_its_offset() -> None:
    stand = stand_of(10)
    stand.put_sequence(1, 2)
    assert stand.put_block(snapshot([1])) == "stored"
    found = stand.match(1, 7)
    assert isinstance(found, messages.Matched)
    assert (found.offset, found.snapshot) == (BLOCK, snapshot([1]).key)


def test_a_block_whose_parent_is_neither_stored_nor_in_flight_is_refused_at_once() -> None:
    stand = stand_of(10)
    begin(stand, 1, block([1, 2]))
    assert stand.ended(2, 1) == "ParentGone"
    begin(stand, 2, block([1]))
    begin(stand, 3, block([1, 2]))
    assert stand.ended(2, 3) == "", "what it follows is on its way"
    stand.check()


def test_the_descendants_of_a_refused_block_are_refused_as_well() -> None:
    stand = stand_of(10)
    first, second = block([1]), block([1, 2])
    begin(stand, 1, first)
    begin(stand, 2, second)
    stand.part(2, 1, first.payload_bytes + 1, last=True)
    stand.part(2, 2, second.payload_bytes, last=True)
    stand.settle()
    assert [stand.ended(2, 1), stand.ended(2, 2)] == ["BadMessage", "ParentGone"]
    assert stand.store.memory.ring.used_bytes == 0
    stand.check()


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (block([1, 2])._replace(packed=block([1, 3], b"namespac").packed), "BadPrefix"),
        (block([5])._replace(packed=block([5, 6]).packed), "BadPrefix"),
        (block([1, 2])._replace(record=replace(block([1, 2]).record, parent=None)), "BadPrefix"),
        (block([1, 2])._replace(record=replace(block([1, 2]).record, parent=key(1))), "BadPrefix"),
        (Block(name([1, 9]), block([1, 2, 3]).record, block([1, 2, 3]).packed), "ParentGone"),
    ],
    ids=["another's record", "not a beginning", "other than its Commit", "another namespace's", "not stored"],
)
def test_a_block_that_does_not_fit_is_refused_by_name_and_leaves_nothing(bad: Block, code: str) -> None:
    stand = stand_of(10)
    stand.put_sequence(1)
    used = stand.store.memory.ring.used_bytes
    assert stand.put_block(bad) == code
    assert stand.store.memory.ring.used_bytes == used
    assert stand.store.status()["refusals"] == {code: 1}
    assert len(stand.store.memory.sequences.index) == 1
    stand.check()


@pytest.mark.parametrize("wrong", [{"prefix_bytes": 95}, {"prefix_bytes": 1 << 20}])
def test_a_commit_with_impossible_block_fields_is_refused_before_any_copy(wrong: dict[str, int]) -> None:
    stand = stand_of(10)
    stand.put_sequence(1)
    assert stand.put_block(block([1, 2]), **wrong) == "BadPrefix"
    assert not stand.copies
    stand.check()


def test_a_sequence_over_prefix_tokens_max_is_neither_stored_nor_matched() -> None:
    stand = stand_of(10, prefix_tokens_max=2 * BLOCK)
    assert stand.put_sequence(1, 2, 3) == ["stored", "stored", "LimitReached"]
    refused = stand.match(1, 2, rest=1)
    assert isinstance(refused, messages.Error)
    assert refused.code == "LimitReached"
    assert "prefix_tokens_max" in refused.text
    stand.check()


def test_a_query_whose_record_is_a_block_or_a_snapshot_is_refused() -> None:
    stand = stand_of(10)
    stand.put_sequence(1)
    for wrong in (block([1, 2]).record, snapshot([1]).record):
        tokens = text([1] * (wrong.count // BLOCK))
        stand.do(stand.asked(wrong, tokens))
        assert isinstance(stand.last(), messages.Error)
        assert stand.last().code == "BadPrefix"


# ---- eviction


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_go_leaf_first_for_room(policy: str) -> None:
    stand = stand_of(12, policy=policy)
    sequences = [(1, 2, 3, 4), (1, 2, 5), (6, 7, 8, 9)]
    for words in sequences:
        stand.put_sequence(*words)
    for number in range(30):
        assert stand.put(number, 3 * 64) == "stored"
        whole(stand, *sequences)


def test_a_chain_goes_for_one_put_with_one_scan() -> None:
    stand = stand_of(20)
    stand.put_sequence(*range(1, 21))
    scans = stand.store.counters.scans
    assert stand.put(1, 15 * SPAN - SPAN_HEADER_BYTES) == "stored"
    assert stand.store.counters.scans == scans + 1
    whole(stand, tuple(range(1, 21)))
    assert stand.has_block(1, 2, 3, 4, 5)


def test_a_lease_on_a_block_keeps_all_its_ancestors() -> None:
    stand = stand_of(10)
    stand.put_sequence(1, 2, 3, 4, 5)
    stand.pin_block(1, 2, 3)
    for number in range(20):
        assert stand.put(number, 3 * 64) == "stored"
        assert stand.matched(1, 2, 3, 4, 5) >= 3
    assert not stand.has_block(1, 2, 3, 4)
    assert stand.store.counters.republished <= 1, "what is known to stay is not hidden"
    assert stand.put(99, 8 * SPAN - SPAN_HEADER_BYTES) == "StoreFull"
    assert f"{3 * SPAN} bytes are pinned" in stand.last().error.text, "three blocks stay, though one is pinned"
    assert stand.matched(1, 2, 3) == 3, "what cannot fit costs nobody a block"
    stand.views.clear()
    assert stand.put(99, 8 * SPAN - SPAN_HEADER_BYTES) == "stored"
    whole(stand, (1, 2, 3, 4, 5))


def test_a_pin_by_message_keeps_all_ancestors_of_the_block() -> None:
    stand = stand_of(6, pinned_bytes_max=10 * SPAN)
    stand.put_sequence(1, 2, 3)
    stand.send(1, messages.Pin(7, name([1, 2, 3]), 60.0))
    for number in range(12):
        stand.put(number, 3 * 64)
        assert stand.matched(1, 2, 3) == 3
    stand.send(1, messages.Unpin(8, name([1, 2, 3])))
    for number in range(12):
        stand.put(number, 3 * 64)
    assert stand.matched(1, 2, 3) == 0


def test_the_ancestors_of_a_put_in_flight_stay_until_the_put_has_ended() -> None:
    stand = stand_of(6)
    stand.put_sequence(1, 2)
    child = block([1, 2, 3])
    begin(stand, 1, child)
    for number in range(20):
        assert stand.put(number, 3 * 64) == "stored"
        assert stand.matched(1, 2) == 2
    stand.part(2, 1, child.payload_bytes, last=True)
    stand.settle()
    assert stand.ended(2, 1) == "stored"
    # While its uid has a client it would keep its share.
    stand.leave(2)
    for number in range(20, 40):
        stand.put(number, 3 * 64)
    assert stand.matched(1, 2, 3) == 0


def test_a_victim_is_republished_if_a_put_of_its_child_comes() -> None:
    stand = stand_of(4)
    stand.put_sequence(1)
    stand.begin(1, 1, key(1), 3 * SPAN)
    stand.begin(1, 2, key(2), 64)
    assert stand.scans == 1
    assert not stand.has_block(1)
    begin(stand, 3, block([1, 2]))
    stand.scan()
    assert stand.has_block(1)
    stand.check()


def test_the_ancestors_of_a_pinned_victim_are_republished_with_it() -> None:
    stand = stand_of(8)
    stand.put_sequence(1, 2, 3)
    for number in range(5):
        stand.put(number, SPAN - SPAN_HEADER_BYTES)
    view = stand.find(name([1, 2, 3]))
    stand.begin(1, 1, key(9), 3 * SPAN - SPAN_HEADER_BYTES)
    assert stand.scans == 1
    assert not stand.has_block(1), "all three were chosen"
    assert view is not None
    stand.views.append(view)
    stand.scan()
    whole(stand, (1, 2, 3))
    assert stand.has_block(1, 2, 3)


def test_evicting_a_block_of_a_window_evicts_its_descendants_elsewhere_too() -> None:
    """One large put: the only stretch that is long enough has the beginning of a sequence, which stands elsewhere."""
    stand = stand_of(12)
    for number in range(6):
        stand.put(number, 3 * 64)
    stand.put_sequence(1)
    for number in range(6, 9):
        stand.put(number, 3 * 64)
    stand.put_sequence(1, 2, 3)
    for number in range(6):
        stand.pin(number)
    assert stand.put(99, 4 * SPAN - SPAN_HEADER_BYTES) == "stored"
    whole(stand, (1, 2, 3))


def test_pages_are_given_back_leaf_first() -> None:
    stand = stand_of(64, page_bytes=SPAN)
    sequences = [tuple(range(10 * n, 10 * n + 8)) for n in range(8)]
    for words in sequences:
        stand.put_sequence(*words)
    for blocks in (40, 23, 5, 0):
        stand.press(blocks * SPAN)
        assert stand.store.status()["resident_bytes"] <= blocks * SPAN
        whole(stand, *sequences)
    stand.press()


def test_an_idle_block_is_evicted_with_its_descendants_if_all_are_idle() -> None:
    stand = stand_of(20)
    stand.put_sequence(1, 2, 3)
    stand.put_sequence(4, 5)
    stand.now = 100.0
    assert stand.put_sequence(4, 5, 6) == ["existed", "existed", "stored"]
    stand.put_sequence(1, 2, 3, 7)
    stand.now = 150.0
    stand.match(1, 2)
    stand.settle()
    stand.press(None, idle_s=40.0)
    assert (stand.matched(1, 2, 3, 7), stand.matched(4, 5, 6)) == (2, 0)
    whole(stand, (1, 2, 3, 7), (4, 5, 6))


def test_an_emergency_takes_trees_larger_than_a_slice() -> None:
    stand = stand_of(700)
    for leaf in range(600):
        stand.put_sequence(1, 1000 + leaf)
    stand.now = 100.0
    stand.press(None, idle_s=10.0)
    assert len(stand.store.memory.entries) == 0
    stand.check()


def test_a_block_worth_less_to_the_policy_than_its_victims_is_refused_and_evicts_nothing() -> None:
    stand = stand_of(5)
    stand.put_sequence(1, 2)
    for number in range(3):
        stand.put(number, SPAN - SPAN_HEADER_BYTES)
    asked: list[tuple[Any, int]] = []

    def admits(new: Any, victim: int) -> bool:
        asked.append((new, victim))
        return False

    stand.store.memory.policy.admits = admits  # type: ignore[method-assign]
    coldest = stand.find(key(0))
    assert coldest is not None
    stand.match(1, 2)
    stand.settle()
    assert stand.put_block(block([1, 2, 3]), cost_ms=8.0, agent="planner") == "StoreFull"
    [(new, victim)] = asked
    assert (new.key, new.depth, new.cost_ms, new.agent) == (name([1, 2, 3]), 2, 8.0, "planner")
    assert victim == coldest.span_id
    assert (stand.matched(1, 2), stand.stored() >= {0, 1, 2}) == (2, True)
    assert (stand.put_block(block([7])), stand.put(9)) == ("stored", "stored"), "others are not asked about"
    assert len(asked) == 1
    stand.check()


# ---- ends


@pytest.mark.parametrize("reason", ["explicit", "corrupt"])
def test_the_descendants_of_an_ended_block_end_and_are_no_longer_matched(reason: str) -> None:
    stand = stand_of(SLICE + 50)
    for leaf in range(SLICE + 20):
        stand.put_sequence(1, 2, 1000 + leaf)
    kept = stand.store.entry(name([1, 2]))
    assert kept is not None
    if reason == "explicit":
        stand.send(1, messages.Evict(5, [name([1, 2])]))
        assert stand.last() == messages.Counted(5, 1)
    else:
        stand.do(FoundCorrupt(kept["span_id"]))
    assert stand.matched(1, 2, 1000) == 1
    assert 0 < len(stand.store.memory.entries) - 1 <= 20, "one slice at a time"
    assert stand.store.next_timer() == stand.now
    stand.check()
    stand.settle()
    assert len(stand.store.memory.entries) == 1
    assert stand.store.status()["evictions"] == {reason: SLICE + 21}
    assert stand.matched(1) == 1
    stand.check()


def test_a_pinned_descendant_of_an_ended_block_is_not_republished() -> None:
    stand = stand_of(2 * SLICE + 21)
    for leaf in range(2 * SLICE + 20):
        stand.put_sequence(1, 1000 + leaf)
    view = stand.find(name([1, 1000]))
    stand.begin(1, 1, key(1), 64)
    assert stand.scans == 1
    assert not stand.has_block(1, 1000), "it was chosen"
    assert view is not None
    stand.views.append(view)
    stand.send(1, messages.Evict(5, [name([1])]))
    stand.scan()
    assert stand.store.next_timer() == stand.now, "others are still to end"
    assert not stand.has_block(1, 1000)
    stand.check()
    stand.settle()
    assert len(stand.store.memory.entries) == 0
    stand.check()


@pytest.mark.parametrize("by", ["clear", "invalidate", "evict_prefixes"])
def test_clearing_a_namespace_counts_each_block_once(by: str) -> None:
    stand = stand_of(2 * SLICE + 100)
    for leaf in range(SLICE):
        stand.put_sequence(1, 1000 + leaf, 2)
    stand.put_sequence(5, 6)
    stand.put(1)
    requests = {
        "clear": messages.Clear(9, TAG),
        "invalidate": messages.Invalidate(9, TAG, 0),
        "evict_prefixes": messages.EvictPrefixes(9, TAG),
    }
    blocks = 2 * SLICE + 3
    stand.send(1, requests[by])
    assert stand.matched(5, 6) + stand.matched(1) <= 3
    stand.settle()
    [answer] = [each for each in stand.answers[1] if getattr(each, "id", None) == 9]
    assert (answer.dropped if isinstance(answer, messages.Generation) else answer.count) == blocks
    assert stand.stored() == {1}
    stand.check()


def test_evicting_prefixes_leaves_the_rest_of_the_namespace() -> None:
    stand = stand_of(20)
    stand.put_sequence(1, 2)
    stand.put_block(block([1, 2], b"another.")._replace(record=block([1]).record, packed=block([1]).packed))
    stand.commit(1, 5, TAG + bytes(24), 64)
    stand.part(1, 5, 64, last=True)
    stand.settle()
    stand.send(1, messages.EvictPrefixes(9, TAG))
    assert stand.last() == messages.Counted(9, 2)
    assert len(stand.store.memory.entries) == 2
    stand.check()


def test_an_expired_block_stays_as_long_as_it_has_children_and_no_longer() -> None:
    stand = stand_of(10)
    stand.put_sequence(1, ttl_s=10.0)
    stand.pass_time(5.0)
    stand.put_sequence(1, 2, ttl_s=10.0)
    stand.pass_time(9.0)
    assert stand.matched(1, 2) == 2
    stand.pass_time(2.0)
    assert stand.matched(1) == 0
    assert stand.store.status()["evictions"] == {"ttl": 2}
    stand.check()


def test_a_sequence_ends_when_its_time_is_over_however_long_it_is() -> None:
    stand = stand_of(40)
    stand.put_sequence(*range(32), ttl_s=6.0)
    stand.pass_time(5.9)
    assert stand.matched(*range(32)) == 32
    stand.pass_time(0.2)
    assert stand.matched(*range(32)) == 0
    assert stand.store.status()["evictions"] == {"ttl": 32}
    stand.check()


def test_an_expired_block_ends_with_its_last_child_whatever_ends_that_child() -> None:
    stand = stand_of(10)
    stand.put_sequence(1, ttl_s=10.0)
    stand.put_sequence(1, 2)
    stand.pass_time(60.0)
    assert stand.matched(1, 2) == 2
    stand.send(1, messages.Evict(9, [name((1, 2))]))
    stand.pass_time(0.1)
    assert stand.matched(1) == 0
    assert stand.store.status()["evictions"] == {"explicit": 1, "ttl": 1}
    stand.check()


# ---- uses


class Noted:
    """A policy that notes who uses what."""

    def __init__(self, stand: Stand) -> None:
        self.uses: list[tuple[int, str]] = []
        policy = stand.store.memory.policy
        accessed = policy.accessed

        def note(span_id: int, now: float, agent: str = "") -> None:
            self.uses.append((span_id, agent))
            accessed(span_id, now, agent)

        policy.accessed = note  # type: ignore[method-assign]
        self.turns: list[tuple[str, str]] = []
        policy.turn = lambda agent, state, now: self.turns.append((agent, state))  # type: ignore[method-assign]


def span(stand: Stand, *words: int) -> int:
    found = stand.find(name(words))
    assert found is not None
    return found.span_id


def test_a_match_counts_a_use_of_each_matched_block_in_order_after_its_answer() -> None:
    stand = stand_of(10)
    stand.put_sequence(1, 2, 3)
    noted = Noted(stand)
    stand.match(1, 2, agent="planner")
    assert noted.uses == []
    stand.do(Tick())
    assert noted.uses == [(span(stand, 1), "planner"), (span(stand, 1, 2), "planner")]
    used = stand.store.entry(name([1, 2]))
    assert used is not None
    assert used["uses"] == 1
    assert stand.store.next_timer() is None


def test_uses_are_counted_in_slices_and_those_that_are_too_many_are_lost_the_oldest_first() -> None:
    stand = stand_of(70)
    words = tuple(range(1, 65))
    stand.put_sequence(*words)
    noted = Noted(stand)
    for _ in range(USES_MAX // 64 + 5):
        stand.match(*words)
    assert stand.store.status()["prefix_uses_lost"] == 5 * 64
    stand.do(Tick())
    assert len(noted.uses) == USES_SLICE
    assert stand.store.next_timer() == stand.now


def test_the_policy_gets_the_reported_state_of_an_agent() -> None:
    stand = stand_of(4)
    noted = Noted(stand)
    stand.send(1, messages.AgentTurn(3, "planner", "finished"))
    assert (noted.turns, stand.last()) == ([("planner", "finished")], messages.Done(3))


def test_the_policy_is_told_of_agents_whose_step_graph_has_ended_or_begun_again() -> None:
    stand = stand_of(4)
    noted = Noted(stand)
    stand.do(AgentsTurned(["planner"], ["coder"]))
    assert noted.turns == [("planner", "finished"), ("coder", "began")]


def test_the_policy_knows_what_a_put_says() -> None:
    stand = stand_of(4)
    stand.put_sequence(1)
    told: list[Any] = []
    stand.store.memory.policy.inserted = lambda new, now: told.append(new)  # type: ignore[method-assign]
    stand.put_block(block([1, 2]), cost_ms=12.5, agent="planner", tokens=7)
    assert [(n.cost_ms, n.agent, n.tokens, n.depth) for n in told] == [(12.5, "planner", 7, 1)]


def test_queries_are_counted() -> None:
    stand = stand_of(10)
    stand.put_sequence(1, 2)
    stand.match(1, 2, rest=5)
    stand.match(9)
    status = stand.store.status()
    counted = {figure: status[f"prefix_{figure}"] for figure in ("queries", "hits", "tokens_asked", "tokens_matched")}
    assert counted == {"queries": 2, "hits": 1, "tokens_asked": 37 + 17, "tokens_matched": 32}
    assert (status["prefix_blocks"], status["prefix_rebuilding"]) == (2, 0)


def test_an_entry_is_described_with_its_place_in_a_sequence() -> None:
    stand = stand_of(10)
    stand.put_sequence(1, 2, cost_ms=3.0)
    told = stand.store.entry(name([1, 2]))
    assert told is not None
    assert told["prefix"] == {
        "start": BLOCK,
        "tokens": BLOCK,
        "snapshot": False,
        "parent": name([1]).hex(),
        "children": 0,
    }
    assert told["cost_ms"] == 3.0
    stand.put(1)
    other = stand.store.entry(key(1))
    assert other is not None
    assert other["prefix"] is None


# ---- restarts


def test_a_restarted_store_serves_at_once_and_matches_more_with_each_tick() -> None:
    stand = stand_of(200)
    words = tuple(range(1, 2 * REBUILD_SLICE + 11))
    stand.put_sequence(*words)
    restart(stand)
    assert stand.has_block(*words), "readers find it at once"
    assert (stand.matched(*words), stand.store.status()["prefix_rebuilding"]) == (0, len(words))
    matched = []
    while stand.store.status()["prefix_rebuilding"]:
        stand.do(Tick())
        matched.append(stand.matched(*words))
        stand.check()
    assert matched[-1] == len(words)
    assert all(before < after for before, after in pairwise(matched))
    finish(stand)


def asked_in_vain(stand: Stand, *words: int) -> bool:
    """Whether a query was not answered."""
    answers = len(stand.answers[1])
    tokens = np.append(text(words), np.uint32(999_999))
    stand.do(stand.asked(query(tokens), tokens))
    return len(stand.answers[1]) == answers


def test_a_query_after_a_restart_waits_until_its_sequence_is_matched_again() -> None:
    stand = stand_of(200)
    words = tuple(range(1, 2 * REBUILD_SLICE + 11))
    stand.put_sequence(*words)
    restart(stand)
    assert asked_in_vain(stand, *words)
    assert stand.store.status()["prefix_queries_waiting"] == 1
    stand.go_on()
    answer = stand.last()
    assert isinstance(answer, messages.Matched)
    assert answer.blocks == [name(words[: end + 1]) for end in range(len(words))]
    assert stand.store.status()["prefix_queries_waiting"] == 0
    assert not asked_in_vain(stand, 7, 7), "nothing is rebuilt any more"
    finish(stand)


def test_a_query_whose_sequence_is_all_there_waits_for_no_other() -> None:
    stand = stand_of(200)
    stand.put_sequence(1, 2)
    stand.put_sequence(*range(10, 2 * REBUILD_SLICE))
    restart(stand)
    stand.do(Tick())
    assert stand.store.status()["prefix_rebuilding"]
    whole = [words for words in ((1, 2), tuple(range(10, 20))) if stand.matched(*words) == len(words)]
    assert whole
    assert not asked_in_vain(stand, *whole[0])
    assert asked_in_vain(stand, 1, 3)
    stand.go_on()
    finish(stand)


def test_a_query_waits_no_longer_than_prefix_wait_s() -> None:
    stand = stand_of(400, prefix_wait_s=0.5)
    words = tuple(range(1, 4 * REBUILD_SLICE))
    stand.put_sequence(*words)
    restart(stand)
    assert asked_in_vain(stand, *words)
    stand.now = 0.4
    stand.do(Tick())
    assert stand.store.status()["prefix_queries_waiting"] == 1
    stand.now = 0.5
    stand.do(Tick())
    answer = stand.last()
    assert isinstance(answer, messages.Matched)
    assert stand.store.status()["prefix_rebuilding"]
    assert 0 < len(answer.blocks) < len(words), "what is there by then"
    stand.go_on()
    finish(stand)


def test_without_prefix_wait_s_a_query_is_answered_at_once() -> None:
    stand = stand_of(100, prefix_wait_s=0.0)
    stand.put_sequence(1, 2, 3)
    restart(stand)
    assert not asked_in_vain(stand, 1, 2, 3)
    stand.go_on()
    finish(stand)


def test_a_child_of_a_block_that_is_not_rebuilt_yet_is_stored() -> None:
    stand = stand_of(200)
    words = tuple(range(1, 2 * REBUILD_SLICE + 11))
    stand.put_sequence(*words)
    restart(stand)
    last = block([*words, 999])
    begin(stand, 1, last, client=1)
    stand.part(1, 1, last.payload_bytes, last=True)
    stand.copy()
    assert stand.ended(1, 1) == "stored"
    assert stand.matched(*words, 999) == len(words) + 1
    stand.settle()
    finish(stand)


def test_all_that_is_known_of_a_block_is_known_after_a_restart() -> None:
    stand = stand_of(10)
    stand.put_sequence(1, 2, cost_ms=4.5)
    stand.put_block(snapshot([1, 2]))
    before = {words: stand.store.entry(name(words)) for words in ((1,), (1, 2))}
    restart(stand)
    for words, told in before.items():
        assert told is not None
        now = stand.store.entry(name(words))
        assert now is not None
        assert (now["prefix"], now["cost_ms"]) == (told["prefix"], 4.5)
    stand.settle()
    found = stand.match(1, 2, 3)
    assert isinstance(found, messages.Matched)
    assert found.snapshot == snapshot([1, 2]).key
    finish(stand)


def test_a_recovered_block_whose_parent_is_missing_ends_with_its_descendants() -> None:
    stand = stand_of(10)
    stand.put_sequence(1, 2, 3, 4)
    stand.put_sequence(1, 5)
    # A daemon that was killed while it ended what followed an evicted block.
    stand.send(1, messages.Evict(77, [name([1, 2])]))
    [slot] = [s for s in stand.index.slots() if s.key == name([1, 2])]
    assert not slot.published
    for words in ((1, 2, 3), (1, 2, 3, 4)):
        for slot in stand.index.slots():
            if slot.key == name(words) and not slot.published:
                stand.index.publish(slot.number)
    restart(stand)
    stand.settle()
    assert [stand.matched(1, 2, 3, 4), stand.matched(1, 5)] == [1, 2]
    assert not stand.has_block(1, 2, 3)
    assert stand.store.status()["found_corrupt"] == 0
    finish(stand)


@pytest.mark.parametrize("at", [0, 4, 60], ids=["no record", "another version", "another predecessor"])
def test_a_damaged_record_found_at_recovery_ends_its_block_and_its_descendants(at: int) -> None:
    stand = stand_of(10)
    stand.put_sequence(1, 2, 3)
    found = stand.find(name([1, 2]))
    assert found is not None
    stand.bytes[found.offset + aligned(16) + at] ^= 0xFF
    restart(stand)
    stand.settle()
    assert stand.matched(1, 2, 3) == 1
    assert not stand.has_block(1, 2, 3)
    finish(stand)


def test_recovered_blocks_are_matched_whatever_the_order_of_their_puts() -> None:
    stand = stand_of(10)
    first, second = block([1]), block([1, 2])
    begin(stand, 1, first)
    begin(stand, 2, second)
    # The second has its place before the first has all of its parts.
    stand.part(2, 2, second.payload_bytes // 2, last=False)
    stand.now = 5.0
    stand.part(2, 1, first.payload_bytes, last=True)
    stand.settle()
    stand.part(2, 2, second.payload_bytes - second.payload_bytes // 2, last=True)
    stand.settle()
    for slot in stand.index.slots():
        if slot.key == first.key:
            stand.headers[slot.offset] = replace(stand.headers[slot.offset], created_s=9.0)
    restart(stand, now=20.0)
    stand.settle()
    assert stand.matched(1, 2) == 2
    finish(stand)


def test_descendants_of_an_ended_put_that_wait_for_room_evict_nothing() -> None:
    stand = Stand(ring_bytes=64 * SPAN)
    stand.join(1, 2)
    filled = 0
    while stand.store.memory.ring.largest_free_bytes >= SPAN:
        assert stand.put(filled) == "stored"
        filled += 1
    blocks = [block(list(range(1, length + 1))) for length in range(1, 7)]
    for number, each in enumerate(blocks):
        stand.records[each.key] = each.packed
        stand.send(2 if number == 0 else 1, each.commit(500 + number))
    stand.leave(2)
    for number, each in enumerate(blocks[1:], 1):
        stand.part(1, 500 + number, each.payload_bytes, last=True)
    stand.settle()
    assert [stand.ended(1, 500 + number) for number in range(1, 6)] == ["ParentGone"] * 5
    assert len(stand.stored()) == filled


def test_a_victim_republished_for_a_put_of_its_child_is_not_chosen_again() -> None:
    stand = Stand(ring_bytes=40 * SPAN)
    stand.join(1, 2)
    first, second = block([1]), block([1, 2])
    assert stand.put_block(first) == "stored"
    number = 0
    while stand.store.memory.ring.largest_free_bytes >= SPAN:
        assert stand.put(number) == "stored"
        number += 1
    stand.pin(0)
    stand.commit(1, 500, key(900), 64 * 14)
    stand.part(1, 500, 64 * 14, last=True)
    assert not stand.has_block(1)
    begin(stand, 600, second)
    for _ in range(8):
        if not stand.scans:
            break
        stand.scan()
        assert stand.has_block(1)
    stand.settle()
    assert stand.ended(1, 500) == "stored"
