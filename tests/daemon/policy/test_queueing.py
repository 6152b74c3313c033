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


def served(*, arrivals: int, service_s: float, blocks: int, seconds: int = 63) -> QueueingController:
    """`arrivals` over `seconds` (from 0 to their end), each service alike; asked at `seconds`."""
    queue = QueueingController(WINDOW_S)
    queue.record_request_arrival(0.0, arrivals)
    for _ in range(3):
        queue.record_request_completion(float(seconds), service_s, blocks)
    return queue


# ---- the formula


@pytest.mark.parametrize(
    ("arrivals", "service_s", "blocks", "floor"),
    [
        (60, 10.0, 10, 115),  # λ = 1: 1 · 10 · 10 · 1.15, which floats make 114.99999999999999
        (600, 0.5, 20, 115),
        (600, 0.1, 100, 115),
        (60, 20.0, 10, 230),
        (60, 20.0, 1, 23),
        (60, 10.0, 11, 127),  # 126.5
        (60, 0.001, 1, 1),  # 0.00115: never 0 while requests are served
        (60, 7.0, 100, 805),  # 1.15 * 700 is 804.9999999999999, 7 * 115.0 is 805
        (180, 0.7, 100, 242),  # 241.5
        (180, 1.1, 1000, 3795),  # 3 * 1.1 is 3.3000000000000003
        (60, 0.0, 10, 0),
        (60, 10.0, 0, 0),
    ],
)
def test_the_floor_is_lambda_times_mean_service_times_mean_blocks_and_fifteen_percent(
    arrivals: int, service_s: float, blocks: int, floor: int
) -> None:
    queue = served(arrivals=arrivals, service_s=service_s, blocks=blocks, seconds=60)
    assert queue.get_minimum_stable_blocks(60.0) == floor
    assert queue.compute_stability_state(60.0).minimum_stable_blocks == floor


@pytest.mark.parametrize("started_s", [0.0, 0.1, 1234.567, 98_765_432.1, 1_725_144_060.822])
def test_the_floor_does_not_depend_on_what_the_clock_shows(started_s: float) -> None:
    queue = QueueingController(WINDOW_S)
    queue.record_request_arrival(started_s, 373)
    ended_s = round(started_s + 37.3, 3)
    queue.record_request_completion(ended_s, 2.0, 10)
    assert queue.get_minimum_stable_blocks(ended_s) == 230, "though the difference of the two floats is not 37.3"


def test_the_state_says_what_the_floor_comes_from() -> None:
    queue = QueueingController(WINDOW_S)
    queue.record_request_arrival(0.0, 120)
    queue.record_request_completion(10.0, 2.0, 10)
    queue.record_request_completion(20.0, 4.0, 30)
    state = queue.compute_stability_state(60.0, 240)
    assert (state.arrivals_per_s, state.service_s, state.blocks_per_request, state.samples) == (2.0, 3.0, 20.0, 2)
    assert state.offered_load == 6.0
    assert state.minimum_stable_blocks == 138
    assert state.utilisation == 0.5
    assert state.stable
    assert queue.compute_stability_state(60.0, 139).stable
    assert not queue.compute_stability_state(60.0, 138).stable
    assert queue.compute_stability_state(60.0).stable
    wanted = {
        "arrivals_per_s": 2.0,
        "service_s": 3.0,
        "blocks_per_request": 20.0,
        "offered_load": 6.0,
        "minimum_stable_blocks": 138.0,
        "samples": 2.0,
    }
    assert queue.export_metrics(60.0) == wanted
    assert queue.export_metrics(60.0, 138) == wanted | {"utilisation": pytest.approx(120 / 138), "stable": 0.0}


# ---- the window


def test_a_clock_that_steps_back_stands_still_instead() -> None:
    queue = served(arrivals=60, service_s=10.0, blocks=10, seconds=60)
    queue.record_request_arrival(30.0, 60)
    assert queue.get_minimum_stable_blocks(0.0) == queue.get_minimum_stable_blocks(60.0) == 230
    queue.check_invariants()


def test_memory_is_bounded_however_many_requests_there_are() -> None:
    queue = QueueingController(WINDOW_S)
    for number in range(20_000):
        queue.record_request_arrival(number / 50)
        queue.record_request_completion(number / 50, 1.0, 3)
    queue.check_invariants()
    assert len(queue._buckets) <= BUCKETS
    assert queue.compute_stability_state(19_999 / 50).arrivals_per_s == pytest.approx(50.0, rel=0.01)


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
        state = self.queue.compute_stability_state(now)
        assert state.minimum_stable_blocks == self.queue.get_minimum_stable_blocks(now) == floor
        assert state.samples == len(services)
        assert state.arrivals_per_s == pytest.approx(float(rate))
        assert state.service_s == pytest.approx(float(mean_s))
        assert state.blocks_per_request == pytest.approx(float(mean_blocks))
        assert state.offered_load == pytest.approx(float(rate * mean_s))
        self.queue.check_invariants()


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
