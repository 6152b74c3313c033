"""Queueing floors: what reported requests forbid, for how long, and which devices are remembered."""

from __future__ import annotations

import math
from fractions import Fraction

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tensord.daemon.forms.events import Tick
from tensord.daemon.governor.floors import COVERED_S_MIN, WINDOW_S
from tensord.ipc.messages import control as messages

from .stand import GPU, MIB, Make, Stand, refused


def known() -> Stand:
    stand = Stand()
    stand.join(1)
    stand.sample(0.5)
    return stand


def blocks(stand: Stand) -> int:
    stand.do(Tick())  # status is as of the last event
    return int(stand.device()["floor_blocks"])


REQUESTS = st.tuples(st.just("arrive"), st.integers(1, 500), st.just(0))
COMPLETIONS = st.tuples(st.just("complete"), st.integers(0, 100_000), st.integers(0, 1000))
WAITS = st.sampled_from([0, 1, 999, 1000, 1001, 5000, 59_000, 60_000, 100_000])
STARTS = st.sampled_from([10_000, 1_234_567, 98_765_432_100, 1_725_144_060_822])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WAITS, REQUESTS | COMPLETIONS), min_size=1, max_size=25), WAITS, STARTS)
@example([(0, ("arrive", 373, 0)), (37_300, ("complete", 2000, 10))], 0, 1_725_144_060_822)
def test_the_floor_is_littles_law_over_the_window_whatever_the_clock_shows(
    events: list[tuple[int, tuple[str, int, int]]], last_ms: int, start_ms: int
) -> None:
    """As somebody would compute it who kept every request."""
    stand, now_ms = known(), start_ms
    arrivals: list[int] = []
    completions: list[tuple[int, int, int]] = []
    for wait_ms, (kind, number, held) in events:
        now_ms += wait_ms
        stand.now = now_ms / 1000
        if kind == "arrive":
            stand.say(1, messages.RequestsArrived(GPU, number))
            arrivals += [now_ms] * number
        else:
            stand.say(1, messages.RequestCompleted(GPU, number / 1000, held))
            completions.append((now_ms, number, held))
        stand.check()
    first_ms = start_ms + events[0][0]
    now_ms += last_ms
    stand.now = now_ms / 1000
    begins_ms = (now_ms // 1000 - WINDOW_S + 1) * 1000
    covered_ms = max(now_ms - max(begins_ms, first_ms), COVERED_S_MIN * 1000)
    services = [(ms, held) for at, ms, held in completions if at >= begins_ms]
    count = max(len(services), 1)
    mean_s = Fraction(sum(ms for ms, _ in services), count * 1000)
    mean_blocks = Fraction(sum(held for _, held in services), count)
    rate = Fraction(sum(at >= begins_ms for at in arrivals) * 1000, covered_ms)
    assert blocks(stand) == math.ceil(rate * mean_s * mean_blocks * Fraction(115, 100))


def test_a_devices_floor_keeps_its_entries_and_ends_when_its_requests_do(make: Make) -> None:
    stand = make(block_bytes=MIB)
    stand.open(1)
    for number in range(10):
        stand.register(1, number, MIB)
    stand.serve_requests()
    stand.sample(0.97)
    assert stand.device()["floor_blocks"] == 10
    assert stand.orders() == []
    stand.pass_time(120)
    stand.sample(0.97)
    assert stand.device()["floor_blocks"] == 0
    assert sum(len(order.keys) for order in stand.orders()) == 10


def test_a_floor_holds_and_victims_are_offloaded_though_nobody_knows_the_size_of_the_device(make: Make) -> None:
    stand = make(block_bytes=MIB, max_entries=3)
    stand.open(1)
    for number in range(4):
        stand.register(1, number, MIB, tokens=0)
    assert [(order.kind, order.reason) for order in stand.orders()] == [("offload", "budget")]
    stand.serve_requests()
    refused(stand.register(1, 4, MIB), "BelowFloor")
    assert len(stand.orders()) == 1


def test_requests_of_made_up_devices_are_not_counted(make: Make) -> None:
    stand = make()
    for device in ("dev0", GPU):
        stand.say(1, messages.RequestsArrived(device, 1))
    assert stand.status()["counters"]["refused"] == {"NoGauge": 2} and stand.answers[1] == [], "silently"
    stand.sample(0.5)
    stand.say(1, messages.RequestsArrived(GPU, 1))
    assert [row["device"] for row in stand.status()["devices"]] == [GPU]
    stand.pass_time(70)
    stand.sample(0.5)
    assert stand.status()["devices"] == []
