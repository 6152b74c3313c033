"""The queueing floor: exactly Little's law over the last window."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tensord.daemon.governor.demand.queueing import BUCKETS, COVERED_BUCKETS_MIN, QueueingController

WINDOW_S = 64.0  # buckets of a second


@pytest.mark.parametrize("started_s", [0.0, 0.1, 1234.567, 98_765_432.1, 1_725_144_060.822])
def test_the_floor_does_not_depend_on_what_the_clock_shows(started_s: float) -> None:
    queue = QueueingController(WINDOW_S)
    queue.record_request_arrival(started_s, 373)
    ended_s = round(started_s + 37.3, 3)
    queue.record_request_completion(ended_s, 2.0, 10)
    assert queue.floor(ended_s) == 230, "though the difference of the two floats is not 37.3"


class AgainstAList(RuleBasedStateMachine):
    """The controller answers as somebody would who kept every request."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 10_000
        self.queue = QueueingController(WINDOW_S)
        self.arrivals: list[int] = []
        self.completions: list[tuple[int, int, int]] = []

    @rule(ms=st.sampled_from([0, 1, 999, 1000, 1001, 5000, 63_000, 64_000, 100_000]))
    def wait(self, ms: int) -> None:
        self.now_ms += ms

    @rule()
    def arrive_by_a_clock_that_stepped_back(self) -> None:
        """It counts as if it stood still."""
        if self.arrivals or self.completions:
            latest_ms = max([*self.arrivals[-1:], *(at for at, _, _ in self.completions[-1:])])
            self.queue.record_request_arrival((latest_ms - 10_000) / 1000, 1)
            self.arrivals.append(latest_ms)

    @rule(count=st.integers(1, 500))
    def arrive(self, count: int) -> None:
        self.queue.record_request_arrival(self.now_ms / 1000, count)
        self.arrivals += [self.now_ms] * count

    @rule(service_ms=st.integers(0, 100_000), blocks=st.integers(0, 1000))
    def complete(self, service_ms: int, blocks: int) -> None:
        self.queue.record_request_completion(self.now_ms / 1000, service_ms / 1000, blocks)
        self.completions.append((self.now_ms, service_ms, blocks))

    @invariant()
    def answers_agree(self) -> None:
        begins_ms = (self.now_ms // 1000 - BUCKETS + 1) * 1000
        first_ms = min([*self.arrivals[:1], *(at for at, _, _ in self.completions[:1])], default=self.now_ms)
        covered_ms = max(self.now_ms - max(begins_ms, first_ms), COVERED_BUCKETS_MIN * 1000)
        arrivals = sum(at >= begins_ms for at in self.arrivals)
        services = [(ms, blocks) for at, ms, blocks in self.completions if at >= begins_ms]
        count = max(len(services), 1)
        mean_s = Fraction(sum(ms for ms, _ in services), count * 1000)
        mean_blocks = Fraction(sum(blocks for _, blocks in services), count)
        rate = Fraction(arrivals * 1000, covered_ms)
        floor = math.ceil(rate * mean_s * mean_blocks * Fraction(115, 100))

        now = self.now_ms / 1000
        means = self.queue.means(now)
        assert self.queue.floor(now) == floor
        assert means["arrivals_per_s"] == pytest.approx(float(rate))
        assert means["service_s"] == pytest.approx(float(mean_s))
        assert means["blocks_per_request"] == pytest.approx(float(mean_blocks))
        self.queue.check_invariants()


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
