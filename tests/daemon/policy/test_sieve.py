"""SIEVE: the same victims as the algorithm of the paper, with its bits and its hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.policy.candidate import Candidate
from tensord.daemon.policy.sieve import Sieve

from .conformance import filled


class Paper:
    """SIEVE as the paper has it: a queue from old to new, a bit for each span, and a hand."""

    def __init__(self) -> None:
        self.queue: list[int] = []
        self.used: dict[int, bool] = {}
        self.hand = 0
        """The place in the queue that the hand looks at next."""

    def insert(self, span: int) -> None:
        self.queue.append(span)
        self.used[span] = False

    def evict(self) -> int:
        while True:
            if self.hand == len(self.queue):
                self.hand = 0
            span = self.queue[self.hand]
            if not self.used[span]:
                del self.queue[self.hand], self.used[span]
                return span
            self.used[span] = False
            self.hand += 1


@given(st.lists(st.integers(0, 30), max_size=300), st.integers(1, 12))
def test_its_victims_are_those_of_the_paper(requests: list[int], capacity: int) -> None:
    policy, paper = Sieve(), Paper()
    span_of: dict[int, int] = {}
    key_of: dict[int, int] = {}
    for number, key in enumerate(requests):
        if key in span_of:
            policy.accessed(span_of[key], 0.0)
            paper.used[span_of[key]] = True
            continue
        if len(policy) == capacity:
            victim = next(policy.coldest())
            assert victim == paper.evict()
            policy.removed(victim, evicted=True)
            del span_of[key_of.pop(victim)]
        span = number + 1
        policy.inserted(Candidate(span, bytes(32), 64), 0.0)
        paper.insert(span)
        span_of[key], key_of[span] = span, key
        policy.check_invariants()


@given(st.lists(st.integers(1, 8), max_size=20))
def test_the_whole_order_is_that_in_which_the_hand_would_take_them(uses: list[int]) -> None:
    policy, paper = filled(Sieve(), range(1, 9)), Paper()
    for span in range(1, 9):
        paper.insert(span)
    for span in uses:
        policy.accessed(span, 0.0)
        paper.used[span] = True
    assert list(policy.coldest()) == [paper.evict() for _ in range(8)]


def test_a_span_that_is_held_when_the_hand_comes_by_goes_first_later() -> None:
    policy = filled(Sieve(), range(1, 5))
    policy.may_go(1, False)
    for victim in (2, 3):
        assert next(policy.coldest()) == victim
        policy.removed(victim, evicted=True)
    policy.may_go(1, True)
    assert list(policy.coldest()) == [1, 4]


def test_a_span_that_ends_for_another_reason_than_room_does_not_move_the_hand() -> None:
    policy = filled(Sieve(), range(1, 5))
    policy.may_go(1, False)
    policy.removed(2, evicted=False)
    policy.may_go(1, True)
    for span in (1, 3):
        policy.accessed(span, 0.0)
    assert list(policy.coldest()) == [4, 1, 3]


def test_a_victim_out_of_turn_does_not_move_the_hand() -> None:
    policy = filled(Sieve(), range(1, 5))
    policy.removed(3, evicted=True)
    policy.accessed(1, 0.0)
    assert list(policy.coldest()) == [2, 4, 1], "the hand has not passed the first one"
    assert [policy.explain(span).worth for span in (2, 4, 1)] == [0.0, 0.0, 1.0]
