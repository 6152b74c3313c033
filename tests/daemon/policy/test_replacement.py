"""What every replacement policy promises the store, and what tells one from the other."""

from __future__ import annotations

import random

import pytest
from hypothesis.stateful import invariant

from tensord.daemon.policy import lru
from tensord.daemon.policy.candidate import Candidate
from tensord.daemon.policy.lfu import LFU
from tensord.daemon.policy.lru import LRU
from tensord.daemon.policy.registry import POLICIES, by_name
from tensord.errors import BadConfiguration

from .conformance import AnyPolicy, check, filled


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_an_order_over_exactly_the_spans_that_may_go(name: str) -> None:
    check(lambda: AnyPolicy(by_name(name)))


class LRUPolicy(AnyPolicy):
    @invariant()
    def they_are_in_order_of_last_use(self) -> None:
        assert list(self.policy.coldest()) == sorted(self.may_go, key=self.used_at.__getitem__)


def test_lru_is_the_order_of_last_uses() -> None:
    check(lambda: LRUPolicy(LRU()))


def test_lru_takes_reads_that_are_reported_after_a_put_for_earlier_until_the_lanes_are_drained() -> None:
    policy = filled(LRU(), range(1, 4))
    policy.drained(reads=True)
    filled(policy, range(4, 7))
    for span in (4, 1, 2):
        policy.accessed(span, 0.0)
    policy.removed(6, evicted=False)
    policy.drained(reads=True)
    policy.check_invariants()
    assert list(policy.coldest()) == [3, 1, 2, 5, 4]
    policy.accessed(1, 0.0)
    policy.drained(reads=True)
    assert list(policy.coldest()) == [3, 2, 5, 4, 1], "that read came after the puts"


def test_lru_takes_a_put_of_a_stored_key_for_later_than_reads_reported_with_it() -> None:
    policy = filled(LRU(), range(1, 4))
    policy.drained(reads=True)
    policy.accessed(1, 0.0)
    policy.put_again(1)
    policy.accessed(2, 0.0)
    policy.drained(reads=True)
    assert list(policy.coldest()) == [3, 2, 1]


def test_lru_keeps_the_order_of_uses_if_no_read_was_reported() -> None:
    policy = filled(LRU(), range(1, 4))
    policy.drained(reads=False)
    filled(policy, range(4, 5))
    # A use that was not read from a lane, such as a matched block.
    policy.accessed(1, 0.0)
    policy.drained(reads=False)
    assert list(policy.coldest()) == [2, 3, 4, 1]


def test_draining_the_lanes_is_no_use_for_lfu() -> None:
    policy = filled(LFU(), range(1, 4))
    policy.accessed(1, 0.0)
    policy.drained(reads=True)
    assert [policy.explain(span).uses for span in (1, 2, 3)] == [2, 1, 1]
    assert list(policy.coldest()) == [2, 3, 1]


def test_unused_spans_of_lfu_are_in_order_of_arrival() -> None:
    assert list(filled(LFU(), range(1, 9)).coldest()) == list(range(1, 9))


def test_lfu_keeps_what_is_used_most() -> None:
    policy = filled(LFU(), range(1, 5))
    for span in (1, 1, 1, 3, 3, 4):
        policy.accessed(span, 0.0)
    assert list(policy.coldest()) == [2, 4, 3, 1]


def test_lfu_forgets_old_popularity() -> None:
    policy = filled(LFU(), range(1, 2))
    for _ in range(5):
        policy.accessed(1, 0.0)
    for span in range(2, 30):
        policy.inserted(Candidate(span, bytes(32), 64, 1), 0.0)
        policy.accessed(span, 0.0)
        coldest = next(policy.coldest())
        policy.removed(coldest, evicted=True)
        if coldest == 1:
            return
    pytest.fail("what was popular once is never evicted")


def test_lru_is_asked_why_by_the_order_of_last_uses() -> None:
    policy = filled(LRU(), range(1, 4))
    policy.accessed(1, 0.0)
    assert [policy.explain(span).worth for span in (2, 3, 1)] == [2.0, 3.0, 4.0]
    assert policy.explain(1).uses is None, "it counts none"


def test_lfu_explains_an_entry_by_the_uses_that_it_counted() -> None:
    policy = filled(LFU(), range(1, 3))
    policy.accessed(1, 0.0)
    assert [(policy.explain(span).uses, policy.explain(span).worth) for span in (1, 2)] == [(2, 2.0), (1, 1.0)]


@pytest.mark.parametrize("name", POLICIES)
def test_a_key_that_was_never_put_is_not_remembered(name: str) -> None:
    assert filled(by_name(name), range(1, 9)).recall(b"\1" * 32) is None


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_chosen_by_its_name(name: str) -> None:
    assert by_name(name).name == name


def test_an_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(BadConfiguration, match=f"'arc' is not a policy; choose one of {', '.join(POLICIES)}"):
        by_name("arc")


def test_after_a_restart_lfu_counts_on_from_before(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "lfu"
    monkeypatch.setattr(lru, "ROWS_AT_ONCE", 7)
    policy, again, chance = by_name(name), by_name(name), random.Random(5)
    for span in range(1, 51):
        policy.inserted(Candidate(span, bytes([span]) * 32, 64), span)
    for at in range(500):
        policy.accessed(chance.randrange(1, 51), 100 + at)
    for span in chance.sample(range(11, 61), 50):
        again.inserted(Candidate(span, bytes([span]) * 32, 64), 0)
    again.learn(list(policy.learned()))
    again.check_invariants()
    order = [span for span in again.coldest() if span < 51]
    assert order == [span for span in policy.coldest() if span > 10]
    with pytest.raises(ValueError, match=r"reshape|buffer size"):
        by_name(name).learn([b"12345"])
