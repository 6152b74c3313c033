"""The policy that learns: what it keeps, what it forgets, and that all it remembers is bounded."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import islice, pairwise

import pytest

from tensord.daemon.policy import ages as ages_of
from tensord.daemon.policy import hazard as hazard_of
from tensord.daemon.policy.ages import Ages
from tensord.daemon.policy.candidate import Candidate
from tensord.daemon.policy.explained import times_used
from tensord.daemon.policy.ghosts import GHOST_COLUMNS, PLACES_MIN
from tensord.daemon.policy.hazard import Hazard
from tensord.daemon.policy.hazards import (
    BUCKETS,
    KNOWN_MIN,
    REFRESHED_COUNTS,
    REFRESHED_SHARE,
    Hazards,
    Row,
    bucket,
)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def put_long_ago(policy: Hazard, now: float) -> None:
    """So much is put that nothing of what is known was put just now."""
    policy.inserted(Candidate(999_999, key_of(999_999), 1 << 40), now)


def piece(number: int, depth: int) -> Candidate:
    """Of a sequence of which so many pieces come before."""
    return Candidate(number, key_of(number), 64, 16, depth=depth, before_bytes=64 * depth)


class Cache:
    """So many bytes, kept by the policy; spans are never numbered twice."""

    def __init__(self, capacity_bytes: int) -> None:
        self.policy = Hazard()
        self.capacity_bytes = capacity_bytes
        self.span_of: dict[int, int] = {}
        self.news: dict[int, tuple[int, int]] = {}
        self.now = 0.0
        self.spans = 0
        self.hits = 0

    def ask(self, *blocks: int, agent: str = "", size_bytes: int = 1, tokens: int = 0, chained: bool = False) -> None:
        """A use of blocks, of a sequence if `chained`; what is not there is stored."""
        stays: set[int] = set()
        for depth, block in enumerate(blocks):
            span = self.span_of.get(block)
            if span is not None:
                self.policy.accessed(span, self.now, agent)
                self.hits += 1
            else:
                self.make_room(size_bytes, stays)
                self.spans += 1
                span = self.span_of[block] = self.spans
                self.news[span] = (block, size_bytes)
                new = Candidate(span, key_of(block), size_bytes, tokens, depth=depth if chained else 0, agent=agent)
                self.policy.inserted(new, self.now)
            stays.add(span)

    def make_room(self, size_bytes: int, stays: set[int]) -> None:
        while sum(size for _, size in self.news.values()) + size_bytes > self.capacity_bytes:
            victim = next(span for span in self.policy.coldest() if span not in stays)
            self.policy.removed(victim, evicted=True)
            block, _ = self.news.pop(victim)
            del self.span_of[block]


def test_a_popular_entry_outlives_an_entry_that_was_used_once() -> None:
    cache, chance = Cache(40), random.Random(1)
    for turn in range(3000):
        cache.now += 1
        cache.ask(chance.randrange(20) if turn % 2 else 1000 + turn)
    assert all(block in cache.span_of for block in range(20))


def test_large_entries_leave_before_small_ones_of_equal_popularity() -> None:
    cache, chance = Cache(100), random.Random(2)
    for _ in range(4000):
        cache.now += 1
        block = chance.randrange(40)
        cache.ask(block, size_bytes=1 if block < 20 else 16)
    assert all(block in cache.span_of for block in range(20))


def test_cheap_entries_leave_before_expensive_ones_of_equal_popularity() -> None:
    cache, chance = Cache(20), random.Random(3)
    for _ in range(4000):
        cache.now += 1
        block = chance.randrange(40)
        cache.ask(block, tokens=1024 if block < 15 else 16)
    assert sum(block in cache.span_of for block in range(15)) >= 14


def test_a_missing_cost_is_estimated_from_tokens_and_the_costs_of_other_puts() -> None:
    policy = Hazard()
    for number in range(1, 50):
        policy.inserted(Candidate(number, key_of(number), 64, tokens=100, cost_ms=50.0), 0.0)
    policy.inserted(Candidate(100, key_of(100), 64, tokens=100), 0.0)
    policy.inserted(Candidate(101, key_of(101), 64, tokens=3200), 0.0)
    policy.inserted(Candidate(102, key_of(102), 64, cost_ms=1600.0), 0.0)
    put_long_ago(policy, 0.0)
    assert policy.rank(100)[0] == policy.rank(1)[0]
    assert policy.rank(101)[0] == policy.rank(102)[0] > policy.rank(1)[0]


def test_an_entry_without_cost_and_tokens_costs_the_mean_of_the_others() -> None:
    policy = Hazard()
    for number in range(1, 50):
        policy.inserted(Candidate(number, key_of(number), 64, tokens=1000), 0.0)
    policy.inserted(Candidate(100, key_of(100), 64), 0.0)
    put_long_ago(policy, 0.0)
    assert policy.rank(100)[0] == policy.rank(1)[0]


def agents_at_work() -> tuple[Hazard, float]:
    """A policy that has seen agents call tools, ask again for what is theirs after a second, and finish."""
    policy, now = Hazard(), 0.0
    for number in range(1, 600):
        now += 4
        agent = f"agent {number}"
        policy.inserted(Candidate(number, key_of(number), 64, 16, agent=agent), now)
        for call in range(2):
            policy.turn(agent, "tool_call", now + call)
            policy.accessed(number, now + call + 1, agent)
        policy.turn(agent, "finished", now + 2)
    return policy, now + 100


def test_those_of_agents_that_have_finished_go_first() -> None:
    policy, now = agents_at_work()
    for number, agent in ((1000, "done"), (1001, "about")):
        policy.inserted(Candidate(number, key_of(number), 64, 16, agent=agent), now)
    put_long_ago(policy, now)
    assert policy.rank(1000)[0] == policy.rank(1001)[0]
    policy.turn("about", "tool_call", now)
    policy.turn("done", "finished", now)
    assert policy.rank(1000)[0] < policy.rank(1001)[0] / 5
    assert policy.rank(1001)[0] > 1 / 8, "it was learned that it comes back at once"
    policy.check_invariants()


def test_those_of_a_finished_agent_go_first_also_if_those_of_waiting_agents_never_came_back() -> None:
    policy, now = Hazard(), 0.0
    for number in range(1, 600):
        now += 4
        policy.inserted(Candidate(number, key_of(number), 64, 16, agent="waits"), now)
        policy.turn("waits", "turn_ended", now)
    for number in range(1001, 1011):
        policy.inserted(Candidate(number, key_of(number), 64, 16, agent="done"), now)
    policy.turn("done", "finished", now)
    put_long_ago(policy, now)
    assert list(islice(policy.coldest(), 10)) == list(range(1001, 1011)), "the one unused for longest first"
    policy.check_invariants()


def test_a_put_that_was_sent_before_its_agent_finished_and_ends_after_it_changes_nothing() -> None:
    policy, now = agents_at_work()
    for number in (1001, 1002):
        policy.inserted(Candidate(number, key_of(number), 64, 16, agent="one"), now)
    policy.turn("one", "finished", now)
    put_long_ago(policy, now)
    before = policy.rank(1001)[0]
    policy.inserted(Candidate(1003, key_of(1003), 64, 16, agent="one"), now)
    assert policy.rank(1001)[0] == before
    policy.turn("one", "began", now)
    assert policy.rank(1001)[0] > before
    policy.check_invariants()


def test_entries_that_agents_share_outlive_the_end_of_one_agent() -> None:
    policy, now = agents_at_work()
    for number in (1001, 1002):
        policy.inserted(Candidate(number, key_of(number), 64, 16, agent="one"), now)
    put_long_ago(policy, now)
    policy.accessed(1001, now, "two")
    policy.accessed(1002, now, "one")
    shared, own = policy.rank(1001), policy.rank(1002)
    policy.turn("one", "finished", now)
    assert policy.rank(1001) == shared
    assert policy.rank(1002)[0] < own[0]
    policy.check_invariants()


def test_an_entry_that_was_popular_long_ago_leaves_in_the_end() -> None:
    cache = Cache(20)
    for _ in range(50):
        cache.now += 1
        cache.ask(*range(10))
    for turn in range(3000):
        cache.now += 1
        cache.ask(1000 + turn % 30)
        if not any(block in cache.span_of for block in range(10)):
            return
    pytest.fail("what was popular once is never evicted")


def test_an_evicted_key_that_is_put_again_keeps_its_uses() -> None:
    policy = Hazard()
    policy.inserted(Candidate(1, key_of(1), 64), 0.0)
    policy.accessed(1, 1.0)
    policy.removed(1, evicted=True)
    policy.inserted(Candidate(2, key_of(1), 64), 5.0)
    policy.inserted(Candidate(3, key_of(3), 64), 5.0)
    assert policy.explain(2).uses == 3
    assert policy.explain(3).uses == 1
    policy.removed(2, evicted=False)
    policy.inserted(Candidate(4, key_of(1), 64), 6.0)
    assert policy.explain(4).uses == 1


def test_only_the_tail_of_a_long_sequence_has_to_be_worth_its_place() -> None:
    policy, now, number = Hazard(), 0.0, 0
    for turn in range(200):  # short ones come back at once, long ones never
        now += 100
        short = number = number + 1
        policy.inserted(Candidate(short, key_of(short), 64, 16), now)
        for place in range(12):
            number += 1
            policy.inserted(piece(number, place), now)
        for _ in range(3):
            now += 1
            policy.accessed(short, now)
        for span in range(number, short, -1):
            policy.removed(span, evicted=True)
        if turn >= 32:
            policy.removed(short - 32 * 13, evicted=True)
    victim = short
    assert policy.admits(Candidate(9000, key_of(9000), 64, 16), victim)
    declined = 0
    for place in range(200):
        new = piece(10_000 + place, place)
        if not policy.admits(new, victim):
            declined = place
            break
        policy.inserted(new, now)
    assert 1 <= declined <= 4
    assert policy.recall(key_of(10_000 + declined)) is not None
    policy.check_invariants()


def test_all_that_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ages_of, "WATCHED_MAX", 32)
    cache, chance = Cache(50), random.Random(5)
    for turn in range(6000):
        cache.now += chance.random()
        agent = f"agent {turn // 10}"
        cache.ask(chance.randrange(20), 1000 + turn, agent=agent)
        if not turn % 10:
            cache.policy.turn(agent, chance.choice(("began", "tool_call", "turn_ended", "finished")), cache.now)
    policy = cache.policy
    policy.check_invariants()
    known = len(policy)
    assert known == 50
    assert len(policy._ghosts) <= PLACES_MIN
    assert len(policy._ages) <= 32 + 2 * hazard_of.ROUND_USES
    assert len(policy._ages._log) <= 2 * 32 + 512 + 2 * hazard_of.ROUND_USES
    assert len(policy._hazards) <= 8 * 3 * 8 * 6 + 8 * 6 + 1
    assert len(policy._records.span) <= known + 2


def test_ages_count_each_bucket_once_whether_a_sweep_or_a_use_reaches_it() -> None:
    seen: list[int] = []
    used: list[int] = []
    watched = Ages(lambda _, __, at, count: seen.extend([at] * count), lambda _, __, at: used.append(at))
    watched.use(1, 0, 0, 10.0, again=False)
    for now in (10.0, 10.1, 11.0, 11.0, 40.0):
        watched.sweep(now)
    assert seen == list(range(bucket(30.0) + 1))
    watched.use(1, 0, 0, 100.0, again=True)
    assert seen == list(range(bucket(90.0) + 1))
    assert used == [bucket(90.0)]
    watched.forget(1)
    watched.sweep(1e6)
    assert seen == list(range(bucket(90.0) + 1))


def test_an_index_rises_to_one_peak_and_falls_after_it() -> None:
    chance = random.Random(6)
    hazards = Hazards()
    for number in range(20):
        row = hazards.row(number % 5, 0, number)
        for _ in range(chance.randrange(200)):
            until = chance.randrange(BUCKETS)
            for at in range(until + 1):
                hazards.reached(row, at, 1)
            hazards.used(row, until)
        row.refresh()
        rising, falling = row.index[: row.peak + 1], row.index[row.peak :]
        assert rising == sorted(rising) and falling == sorted(falling, reverse=True)


def test_an_index_is_refreshed_after_few_counts_in_a_new_class_and_after_more_in_an_old_one() -> None:
    hazards = Hazards()
    row = hazards.row(0, 0, 0)
    refreshed_at = []
    for count in range(1, 400 * REFRESHED_COUNTS):
        hazards.reached(row, 0, 1)
        if hazards.refresh_one():
            refreshed_at.append(count)
    pauses = [after - before for before, after in pairwise([0, *refreshed_at])]
    # A workload of a few hundred requests must see what it counted last.
    new = [pause for pause, at in zip(pauses, refreshed_at, strict=True) if at <= REFRESHED_COUNTS / REFRESHED_SHARE]
    assert set(new) == {REFRESHED_COUNTS}
    assert 2 * REFRESHED_COUNTS < pauses[-1] <= 2 * REFRESHED_SHARE * refreshed_at[-1]


def test_a_class_used_after_ten_seconds_is_worth_most_just_before_ten_seconds() -> None:
    hazards = Hazards()
    row = hazards.row(0, 3, 1)
    for _ in range(1000):
        for at in range(bucket(10.0) + 1):
            hazards.reached(row, at, 1)
        hazards.used(row, bucket(10.0))
    row.refresh()
    assert row.peak in (bucket(10.0) - 1, bucket(10.0))
    assert row.index[0] < row.index[bucket(5.0)] < row.index[bucket(10.0)]
    assert row.index[bucket(60.0)] < row.index[bucket(10.0)] / 4


@pytest.mark.parametrize("every_s", [0.0, 0.001, 0.1, 3.0, 100.0])
def test_before_anything_is_known_the_least_recently_used_goes_first(every_s: float) -> None:
    policy = Hazard()
    for number in range(1, 41):
        policy.inserted(Candidate(number, key_of(number), 64), 10 + number * every_s)
    assert list(policy.coldest()) == list(range(1, 41))


def taught_that_puts_are_in_vain() -> tuple[Hazard, float]:
    """A policy that has seen ten entries used all the time, and thousands that were put and never used."""
    policy, now = Hazard(), 0.0
    for number in range(1, 4001):
        now += 1
        policy.inserted(Candidate(number, key_of(number), 64, 1000 if number <= 10 else 0), now)
        policy.accessed(1 + number % min(number, 10), now)
        if number > 100:
            policy.removed(number - 90, evicted=True)
    return policy, now


def test_a_new_entry_leaves_after_all_older_ones_whatever_the_history() -> None:
    policy, now = taught_that_puts_are_in_vain()
    policy.inserted(Candidate(9000, key_of(9000), 64, 1), now + 1)
    order = list(policy.coldest())
    assert max(order.index(number) for number in (*range(1, 11), *range(3920, 3980))) < order.index(9000)
    policy.check_invariants()


def test_an_entry_leaves_the_window_once_an_eighth_of_the_stored_bytes_was_put_after_it() -> None:
    policy, now = taught_that_puts_are_in_vain()
    policy.inserted(Candidate(9000, key_of(9000), 64, 1), now)
    stored = len(policy)
    for number in range(9001, 9001 + stored // 8):
        assert policy.rank(9000) > policy.rank(1)
        policy.inserted(Candidate(number, key_of(number), 64), now)
        policy.removed(next(policy.coldest()), evicted=True)
    for number in range(9800, 9800 + hazard_of.ROUND_USES):
        policy.inserted(Candidate(number, key_of(number), 64), now)
    assert policy.rank(9000) < policy.rank(1)
    policy.check_invariants()


def test_an_entry_that_is_put_again_is_protected_again() -> None:
    policy, now = taught_that_puts_are_in_vain()
    eighth = len(policy) // 8
    policy.inserted(Candidate(9000, key_of(9000), 64), now)
    policy.removed(9000, evicted=True)
    for number in range(9002, 9002 + eighth // 2):
        policy.inserted(Candidate(number, key_of(number), 64), now)
    policy.inserted(Candidate(9001, key_of(9000), 64), now)
    for number in range(9100, 9100 + eighth - 1):
        policy.inserted(Candidate(number, key_of(number), 64), now)
        policy.check_invariants()
        assert policy.explain(9001).in_window


def test_a_block_with_a_parent_is_never_in_the_window_of_new_entries() -> None:
    policy, now = taught_that_puts_are_in_vain()
    policy.inserted(Candidate(9000, key_of(9000), 64), now)
    policy.inserted(piece(9001, 1), now)
    assert policy.rank(9001) < policy.rank(9000)
    order = list(policy.coldest())
    assert order.index(9001) < len(order) - 2


@pytest.mark.parametrize("pause_s", [0.0, 8 * 3600.0])
def test_entries_in_use_keep_their_worth_over_hours_without_a_request(pause_s: float) -> None:
    policy, now = taught_that_puts_are_in_vain()
    policy.accessed(5, now + pause_s)
    order = list(policy.coldest())
    unused = [order.index(number) for number in range(3920, 3980)]
    assert max(unused) < min(order.index(number) for number in range(1, 11))


def test_an_unused_entry_gains_no_worth_with_age() -> None:
    hazards = Hazards()
    row = hazards.row(0, 0, 1)
    for _ in range(5000):
        for at in range(bucket(100.0) + 1):
            hazards.reached(row, at, 1)
    row.refresh()
    assert row.peak == 0
    assert row.index == sorted(row.index, reverse=True)


def test_an_entry_is_explained_by_its_class_and_the_reuse_of_that_class() -> None:
    cache, chance = Cache(200), random.Random(3)
    for number in range(20_000):
        cache.now += 1
        # Of five entries one is asked for again, once, shortly after its put.
        cache.ask(10 * number)
        if chance.random() < 0.2:
            cache.now += 1
            cache.ask(10 * number)
    cache.now += 1
    cache.ask(7)
    put = cache.policy.explain(cache.span_of[7])
    assert (put.uses, put.like, put.in_window) == (1, ("not used since it was put",), True)
    assert put.comes_back is not None and 0.15 < put.comes_back < 0.25
    cache.now += 1
    cache.ask(7)
    used = cache.policy.explain(cache.span_of[7])
    assert (used.uses, used.like) == (2, ("used once",))
    assert used.comes_back is not None and used.comes_back < 0.01, "nothing was ever used twice"
    cache.ask(8)
    for number in range(50):
        cache.now += 1
        cache.ask(10 * number + 9)
    unused = cache.policy.recall(key_of(8))
    assert unused is not None and unused.comes_back is not None
    assert unused.comes_back < 0.01, "nothing comes back so late"


def test_an_evicted_key_is_explained_until_it_is_forgotten() -> None:
    policy = Hazard()
    policy.inserted(Candidate(1, key_of(1), 64), 0.0)
    policy.accessed(1, 1.0)
    before = policy.explain(1)
    policy.may_go(1, False)
    policy.removed(1, evicted=True)
    gone = policy.recall(key_of(1))
    assert gone is not None
    assert (gone.uses, gone.like) == (2, before.like)
    policy.inserted(Candidate(2, key_of(1), 64), 2.0)
    assert policy.recall(key_of(1)) is None, "it is stored"
    assert policy.explain(2).uses == 3, "its return is a use"


def test_only_evicted_entries_are_remembered() -> None:
    policy = Hazard()
    policy.inserted(Candidate(1, key_of(1), 64), 0.0)
    policy.removed(1, evicted=False)
    assert policy.recall(key_of(1)) is None


@pytest.mark.parametrize(
    ("often", "words"),
    [(0, "not used since it was put"), (1, "used once"), (2, "used 2 to 3 times"), (3, "used 4 to 7 times")],
)
def test_a_class_of_uses_is_described_in_words(often: int, words: str) -> None:
    assert times_used(often, 7) == words
    assert times_used(7, 7) == "used 64 times or more"


def test_the_traits_of_a_block_name_its_depth_and_its_agent() -> None:
    cache = Cache(1000)
    cache.ask(*range(12), agent="coder", chained=True)
    cache.policy.turn("coder", "tool_call", cache.now)
    told = [cache.policy.explain(cache.span_of[block]).like[1:] for block in (0, 1, 11)]
    waits = "its agent waits for a tool"
    assert told == [(waits,), ("near the start of its sequence", waits), ("far into its sequence", waits)]


def test_a_share_is_reported_only_for_classes_with_enough_known_entries() -> None:
    row = Row(1, Row(0, None))
    row.reached[0], row.used[0] = KNOWN_MIN - 1, 1
    assert row.comes_back(0) is None
    assert row.wider is not None
    row.wider.reached[0], row.wider.used[0] = 100, 25
    assert row.comes_back(0) == 0.25, "of the wider class"
    row.reached[0], row.reached[1] = KNOWN_MIN, 1
    row.used[0], row.used[1] = KNOWN_MIN / 2, 1
    assert row.comes_back(0) == 0.5, "one of one is no experience"


def after_a_restart(policy: Hazard, spans: Iterable[int], keys: dict[int, int], now: float) -> Hazard:
    """What another daemon goes on with, once it has found those spans."""
    again = Hazard()
    for span in spans:
        again.inserted(Candidate(span, key_of(keys[span]), 1), now)
    again.learn(list(policy.learned()))
    again.check_invariants()
    return again


def test_after_a_restart_as_much_is_found_as_before() -> None:
    cache, chance = Cache(200), random.Random(3)
    weights = [1 / (number + 1) ** 0.9 for number in range(400)]
    found: list[int] = []
    for turn, block in enumerate(chance.choices(range(400), weights, k=14_000)):
        cache.now += 0.1
        cache.ask(block if turn % 3 else 1000 + turn)
        if turn % 1000 == 999:
            found.append(cache.hits)
            cache.hits = 0
        if turn == 11_999:
            blocks = {span: block for block, span in cache.span_of.items()}
            cache.now = 5.0
            cache.policy = after_a_restart(cache.policy, sorted(blocks), blocks, cache.now)
    before, after = sum(found[8:12]) / 4, found[12]
    assert after >= 0.98 * before, found


def test_after_a_restart_each_span_is_worth_what_it_was_and_what_was_evicted_is_remembered() -> None:
    cache, chance = Cache(50), random.Random(4)
    for turn in range(5000):
        cache.now += 1
        agent = f"agent {turn % 3}"
        cache.ask(chance.randrange(20) if turn % 2 else 1000 + turn, agent=agent)
        if not turn % 50:
            cache.policy.turn(agent, "tool_call", cache.now)
    blocks = {span: block for block, span in cache.span_of.items()}
    again = after_a_restart(cache.policy, sorted(blocks, reverse=True), blocks, 0.0)
    before = {span: cache.policy.explain(span) for span in blocks}
    told = {span: again.explain(span) for span in blocks}
    for span in blocks:
        assert (told[span].uses, told[span].like, told[span].in_window) == (
            before[span].uses,
            before[span].like,
            before[span].in_window,
        )
        assert told[span].worth == pytest.approx(before[span].worth, rel=0.2)
    assert len(again._ghosts) == len(cache.policy._ghosts)
    gone = next(block for block in range(1000, 6000) if cache.policy.recall(key_of(block)) is not None)
    assert again.recall(key_of(gone)) is not None


def test_a_new_entry_stays_protected_after_a_restart() -> None:
    policy, now = taught_that_puts_are_in_vain()
    data = list(policy.learned())
    again = Hazard()
    again.inserted(Candidate(9000, key_of(9000), 64), now)
    for span in range(3950, 4001):
        again.inserted(Candidate(span, key_of(span), 64), now)
    again.learn(data)
    assert list(again.coldest())[-1] == 9000
    assert again.explain(9000).in_window


@pytest.mark.parametrize("cut", range(GHOST_COLUMNS + 8))
def test_data_that_is_no_learned_state_is_refused(cut: int) -> None:
    data = list(taught_that_puts_are_in_vain()[0].learned())
    policy = Hazard()
    missing = data[:cut]
    assert len(data) > GHOST_COLUMNS + 6
    with pytest.raises(ValueError, match="not a learned state"):
        policy.learn(missing if cut < len(data) else [b"\x81\xa7version\x09"] * len(data))
    policy.inserted(Candidate(1, key_of(1), 64), 1.0)
    assert list(policy.coldest()) == [1]
    policy.check_invariants()


def test_after_a_sudden_change_of_the_set_in_use_the_hit_rate_soon_recovers() -> None:
    cache, chance = Cache(1000), random.Random(1)
    weights = [1 / (number + 1) ** 0.9 for number in range(2000)]
    found: list[int] = []
    for turn, block in enumerate(chance.choices(range(2000), weights, k=17_000)):
        cache.now += 0.1
        cache.ask(block if turn < 14_000 else 3000 + block)
        if turn % 1000 == 999:
            found.append(cache.hits)
            cache.hits = 0
    before = sum(found[10:14]) / 4
    assert sum(found[15:17]) / 2 >= 0.85 * before, found
