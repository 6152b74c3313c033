"""How long an engine waits for another one, by what both expect to take."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from tensord.client.vllm.encoder import pace
from tensord.client.vllm.encoder.asking import Asking
from tensord.client.vllm.encoder.lookups import Input
from tensord.client.vllm.encoder.pace import WAIT_FACTOR, Pace

WAIT_S_MAX = 10.0
FAR_S = 1e6


def request(*rows: int, waiting: int = 0) -> Asking:
    """A request whose inputs have so many rows. Another engine encodes the first `waiting` of them."""
    asking = Asking()
    for number, each in enumerate(rows):
        asking.inputs[str(number)] = found = Input("image", each, None)
        if number < waiting:
            found.wanted = SimpleNamespace(state="waiting")  # type: ignore[assignment]
    return asking


def made(*requests: Asking, row_s: float | None = None, step_requests: int = 2, step_rows: int = 100) -> Pace:
    made = Pace(requests, wait_s_max=WAIT_S_MAX, step_requests=step_requests, step_rows=step_rows)
    made.row_s = row_s
    return made


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "WAIT_S_LEAST", 0.02)
    monkeypatch.setattr(pace, "SOONER", 0.8)


def test_without_a_measured_time_an_engine_waits_as_long_as_it_may() -> None:
    unknown = made(request(10))
    assert unknown.own_s(10) == 0
    assert not unknown.is_sooner(FAR_S, 0.0)
    assert unknown.patience_s(0.0, 0.0) == WAIT_S_MAX


def test_patience_is_a_multiple_of_what_the_other_engine_expects_within_its_limits() -> None:
    known = made(request(10), row_s=0.1)
    assert known.patience_s(expected_at=5.0, since=3.0) == pytest.approx(WAIT_FACTOR * 2.0)
    assert known.patience_s(expected_at=FAR_S, since=3.0) == WAIT_S_MAX
    assert known.patience_s(expected_at=1.0, since=3.0) == 0.02
    assert known.patience_s(expected_at=0.0, since=3.0) == pytest.approx(WAIT_FACTOR * 10 * 0.1), "by its own work"


def test_an_engine_that_would_be_done_well_before_the_other_one_does_not_wait() -> None:
    known = made(request(10), request(10), row_s=0.1)
    assert known.is_sooner(expected_at=102.6, now=100.0)
    assert not known.is_sooner(expected_at=102.4, now=100.0)
    assert not known.is_sooner(expected_at=0.0, now=100.0), "the other one has not said"


def test_an_output_is_announced_for_the_end_of_the_whole_step() -> None:
    known = made(request(30), request(20, 5, waiting=1), request(40), row_s=1.0)
    assert known.own_s(10) == 35, "the two oldest requests fill a step; one input is encoded elsewhere"
    assert known.own_s(50) == 50, "more is claimed already"
    assert made(request(80), request(80), row_s=1.0).own_s(10) == 100, "a step has no more rows"


def test_steps_under_way_come_first() -> None:
    known = made(request(10), row_s=100.0)
    known.allocate(20)
    assert known.end_step() == 20
    now = time.monotonic()
    assert known.own_s(10) == pytest.approx(3000, rel=0.1)
    assert not known.is_sooner(now + 3000, now)
    assert known.end_step() == 0


def test_the_time_of_a_row_follows_what_is_measured() -> None:
    known = made()
    known.learn(rows=10, encode_s=10.0)
    assert known.row_s == 1.0
    known.learn(rows=10, encode_s=50.0)
    assert known.row_s == 2.0
