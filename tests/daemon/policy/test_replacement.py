"""What every replacement policy promises the store, and what tells one from the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensord.daemon.policy.lfu import LFU
from tensord.daemon.policy.lru import LRU
from tensord.daemon.policy.newcomer import Newcomer
from tensord.daemon.policy.replacement import POLICIES, Replacement, by_name
from tensord.errors import BadConfiguration


class AnyPolicy(RuleBasedStateMachine):
    """The conformance suite: an order over exactly the spans that are known."""

    make: Callable[[], Replacement]

    def __init__(self) -> None:
        super().__init__()
        self.policy = type(self).make()
        self.known: set[int] = set()
        self.used_at: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        self.clock = 0

    def use(self, span: int) -> None:
        self.clock += 1
        self.used_at[span] = self.clock
        self.uses[span] = self.uses.get(span, 0) + 1

    @rule(span=st.integers(1, 20))
    def insert(self, span: int) -> None:
        if span not in self.known:
            self.policy.inserted(Newcomer(span, bytes(32), 64, 1), 0.0)
            self.known.add(span)
            self.uses.pop(span, None)
            self.use(span)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def access(self, data: st.DataObject) -> None:
        span = data.draw(st.sampled_from(sorted(self.known)))
        self.policy.accessed(span, 0.0)
        self.use(span)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        span = data.draw(st.sampled_from(sorted(self.known)))
        self.policy.removed(span, evicted=True)
        self.known.discard(span)

    @invariant()
    def every_known_span_comes_once_from_cold_to_warm(self) -> None:
        order = list(self.policy.coldest())
        assert len(order) == len(set(order)) == len(self.policy)
        assert set(order) == self.known
        ranks = [self.policy.rank(span) for span in order]
        assert ranks == sorted(ranks)
        assert len(set(ranks)) == len(ranks)
        self.policy.check_invariants()


class LRUPolicy(AnyPolicy):
    make = LRU

    @invariant()
    def is_in_order_of_last_use(self) -> None:
        assert list(self.policy.coldest()) == sorted(self.known, key=self.used_at.__getitem__)


class LFUPolicy(AnyPolicy):
    make = LFU

    def __init__(self) -> None:
        super().__init__()
        self.removals = 0

    @precondition(lambda self: self.clock and len(self.known) == self.clock)
    @invariant()
    def unused_spans_are_in_order_of_arrival(self) -> None:
        assert list(self.policy.coldest()) == sorted(self.known, key=self.used_at.__getitem__)


TestLRU = LRUPolicy.TestCase
TestLFU = LFUPolicy.TestCase
TestLRU.settings = TestLFU.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)


def filled(policy: Replacement, spans: range) -> Replacement:
    for span in spans:
        policy.inserted(Newcomer(span, bytes(32), 64, 1), 0.0)
    return policy


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
        policy.inserted(Newcomer(span, bytes(32), 64, 1), 0.0)
        policy.accessed(span, 0.0)
        coldest = next(policy.coldest())
        policy.removed(coldest, evicted=True)
        if coldest == 1:
            return
    pytest.fail("what was popular once is never evicted")


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_goes_by_its_name(name: str) -> None:
    assert by_name(name).name == name


def test_an_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(BadConfiguration, match=r"'arc' is no policy; choose one of hazard, lfu, lru"):
        by_name("arc")
