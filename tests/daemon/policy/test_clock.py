"""The policy's time: what a pause adds to it, and what it does not depend on."""

from __future__ import annotations

import random

import pytest

from tensord.daemon.policy.clock import PAUSE_MAX, Clock


def passed(pauses_s: list[float], began: float = 0.0) -> list[float]:
    """How far the clock is after each pause."""
    clock, at, found = Clock(), began, []
    clock.pass_to(at)
    for pause_s in pauses_s:
        at += pause_s
        clock.pass_to(at)
        found.append(clock.now)
    return found


def test_the_mean_pause_is_one() -> None:
    chance = random.Random(1)
    pauses_s = [chance.expovariate(50.0) for _ in range(20_000)]
    assert passed(pauses_s)[-1] == pytest.approx(20_000, rel=0.05)


@pytest.mark.parametrize("rate", [0.001, 1000.0])
def test_at_any_rate_of_requests_the_same_time_passes(rate: float) -> None:
    chance = random.Random(1)
    pauses_s = [chance.expovariate(1.0) for _ in range(500)]
    assert passed([pause_s / rate for pause_s in pauses_s]) == pytest.approx(passed(pauses_s))


@pytest.mark.parametrize("rate", [0.001, 1000.0])
def test_another_rate_is_known_after_some_hundreds_of_requests(rate: float) -> None:
    found = passed([1.0] * 1000 + [1 / rate] * 4000)
    assert found[-1] - found[-1001] == pytest.approx(1000, rel=0.05)


def test_hours_without_a_request_count_as_one_bounded_pause() -> None:
    before, after = passed([0.1] * 1000 + [8 * 3600.0])[-2:]
    assert after - before == pytest.approx(PAUSE_MAX)


def test_a_time_no_later_than_before_is_no_pause() -> None:
    assert passed([1.0, 0.0, -5.0, 5.0, 1.0], began=1e9) == [1.0, 1.0, 1.0, 1.0, 2.0]
