"""What every replacement policy promises the store, and what tells one from the other."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensord.daemon.policy import lru
from tensord.daemon.policy.candidate import Candidate
from tensord.daemon.policy.hazard import Hazard
from tensord.daemon.policy.lfu import LFU
from tensord.daemon.policy.lru import LRU
from tensord.daemon.policy.replacement import POLICIES, Replacement, Turn, by_name
from tensord.errors import BadConfiguration

AGENTS = ("", "one", "two")
TURNS: tuple[Turn, ...] = ("tool_call", "turn_ended", "finished")


class AnyPolicy(RuleBasedStateMachine):
    """The conformance suite: an order over exactly the spans that may go.

    A span is named anew each time; what it is the same as before, its key tells.
    """

    make: Callable[[], Replacement]

    def __init__(self) -> None:
        super().__init__()
        self.policy = type(self).make()
        self.known: dict[int, int] = {}
        self.may_go: set[int] = set()
        self.used_at: dict[int, int] = {}
        self.new: dict[int, Candidate] = {}
        self.clock = 0
        self.now = 0.0

    def use(self, span: int) -> None:
        self.clock += 1
        self.used_at[span] = self.clock

    @rule(by=st.sampled_from([0.0, 0.01, 1.0, 100.0]))
    def time_passes(self, by: float) -> None:
        self.now += by

    @rule(
        key=st.integers(1, 20),
        size=st.sampled_from([64, 4096]),
        tokens=st.sampled_from([0, 16]),
        depth=st.sampled_from([0, 1, 20]),
        owner=st.sampled_from([1, 2]),
        agent=st.sampled_from(AGENTS),
        data=st.data(),
    )
    def insert(self, key: int, size: int, tokens: int, depth: int, owner: int, agent: str, data: st.DataObject) -> None:
        span = self.clock + 1
        new = Candidate(span, bytes(31) + bytes([key]), size, tokens, 0.0, depth, depth * size, agent, owner)
        if depth and len(self.known) > 1:
            self.policy.admits(new, data.draw(st.sampled_from(sorted(self.known))))
        self.policy.inserted(new, self.now)
        self.new[span] = new
        self.known[span] = owner
        self.may_go.add(span)
        self.use(span)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), agent=st.sampled_from(AGENTS))
    def access(self, data: st.DataObject, agent: str) -> None:
        span = data.draw(st.sampled_from(sorted(self.known)))
        self.policy.accessed(span, self.now, agent)
        self.use(span)

    @rule(agent=st.sampled_from(("one", "two", "unheard of")), state=st.sampled_from(TURNS))
    def turn(self, agent: str, state: Turn) -> None:
        self.policy.turn(agent, state, self.now)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def change_whether_it_may_go(self, data: st.DataObject) -> None:
        span = data.draw(st.sampled_from(sorted(self.known)))
        self.may_go ^= {span}
        self.policy.may_go(span, span in self.may_go)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), evicted=st.booleans())
    def remove(self, data: st.DataObject, evicted: bool) -> None:
        span = data.draw(st.sampled_from(sorted(self.known)))
        self.policy.removed(span, evicted=evicted)
        del self.known[span]
        self.may_go.discard(span)

    @invariant()
    def every_span_that_may_go_comes_once_from_cold_to_warm(self) -> None:
        assert len(self.policy) == len(self.known)
        for owners in (None, {1}, {1, 2}):
            order = list(self.policy.coldest(owners))
            assert len(order) == len(set(order))
            assert set(order) == {span for span in self.may_go if owners is None or self.known[span] in owners}
            ranks = [self.policy.rank(span) for span in order]
            assert ranks == sorted(ranks)
        every = [self.policy.rank(span) for span in self.known]
        assert len(set(every)) == len(every)
        self.policy.check_invariants()

    @invariant()
    def outside_the_window_the_one_worth_less_goes_first(self) -> None:
        told = {span: self.policy.explain(span) for span in self.policy.coldest()}
        worths = [each.worth for each in told.values() if not each.in_window]
        assert worths == sorted(worths)
        order = [each.in_window for each in told.values()]
        assert order == sorted(order), "something of the window goes before what is outside it"

    @invariant()
    def what_it_tells_of_a_span_is_what_it_goes_by(self) -> None:
        told = {span: self.policy.explain(span) for span in self.known}
        assert all(each.worth == self.policy.worth(span) for span, each in told.items())
        window = sum(self.new[span].size_bytes for span, each in told.items() if each.in_window)
        assert window == (self.policy.window_bytes or 0)


class LRUPolicy(AnyPolicy):
    make = LRU

    @invariant()
    def they_are_in_order_of_last_use(self) -> None:
        assert list(self.policy.coldest()) == sorted(self.may_go, key=self.used_at.__getitem__)


class LFUPolicy(AnyPolicy):
    make = LFU


class HazardPolicy(AnyPolicy):
    make = Hazard


TestLRU = LRUPolicy.TestCase
TestLFU = LFUPolicy.TestCase
TestHazard = HazardPolicy.TestCase
TestLRU.settings = TestLFU.settings = TestHazard.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None
)


def filled(policy: Replacement, spans: range) -> Replacement:
    for span in spans:
        policy.inserted(Candidate(span, bytes(32), 64, 1), 0.0)
    return policy


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


def test_lfu_tells_the_uses_that_it_counted() -> None:
    policy = filled(LFU(), range(1, 3))
    policy.accessed(1, 0.0)
    assert [(policy.explain(span).uses, policy.explain(span).worth) for span in (1, 2)] == [(2, 2.0), (1, 1.0)]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_key_that_was_never_put_is_not_remembered(name: str) -> None:
    assert filled(by_name(name), range(1, 9)).recall(b"\1" * 32) is None


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_goes_by_its_name(name: str) -> None:
    assert by_name(name).name == name


def test_an_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(BadConfiguration, match=r"'arc' is no policy; choose one of hazard, lfu, lru"):
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
