"""When a mode is entered and left: rises at once, falls by two samples. Whoever is told hears of each change once."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.governor.forms.limits import Thresholds
from tensord.errors import BadConfiguration
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.control import AgentStep
from tensord.ipc.messages.modes import HOST_GAUGE, Mode, Tier

from ..stand import GPU, OTHER, TOTAL, Stand, with_clients

BEGINS = {Mode.NORMAL: 0.70, Mode.PRESSURE: 0.85, Mode.CRITICAL: 0.92, Mode.EMERGENCY: 0.96}
LEFT = {Mode.NORMAL: 0.68, Mode.PRESSURE: 0.83, Mode.CRITICAL: 0.90, Mode.EMERGENCY: 0.94}


def levels(stand: Stand, *permilles: int) -> list[Mode]:
    found = []
    for permille in permilles:
        stand.sample(permille, total=1000)
        found.append(stand.mode())
    return found


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({"normal": 0.9}, "normal = 0.9 and pressure = 0.85 with a hysteresis of 0.02: each must be above"),
        ({"pressure": 0.95}, "pressure = 0.95 and critical = 0.92"),
        ({"critical": 0.94}, "critical = 0.94 and emergency = 0.96"),
        ({"emergency": 1.01}, "emergency = 1.01 .* at most 1"),
        ({"emergency": math.nan}, "emergency = nan"),
        ({"normal": 0.0, "hysteresis": 0.0}, "normal = 0 with a hysteresis of 0: it must be above 0"),
        ({"normal": 0.01}, "normal = 0.01 with a hysteresis of 0.02: .* would never end"),
        ({"hysteresis": -0.01}, "hysteresis = -0.01: give a share of at least 0"),
        ({"hysteresis": 0.04}, "critical = 0.92 and emergency = 0.96 with a hysteresis of 0.04"),
    ],
)
def test_thresholds_out_of_order_are_refused_by_name(settings_: dict[str, float], said: str) -> None:
    with pytest.raises(BadConfiguration, match=said):
        Thresholds(**settings_)


def test_new_thresholds_hold_from_the_next_sample_on() -> None:
    stand = with_clients()
    assert levels(stand, 750) == [Mode.NORMAL]
    stand.change_limits(thresholds=Thresholds(0.2, 0.4, 0.6, 0.8))
    assert stand.mode() is Mode.NORMAL
    assert levels(stand, 750, 500) == [Mode.CRITICAL] * 2
    stand.change_limits(thresholds=Thresholds())
    assert levels(stand, 500, 500) == [Mode.CRITICAL, Mode.RELAXED], "samples before speak for nothing any more"


points = st.one_of(
    st.integers(0, 1100),
    st.sampled_from([round(s * 1000) + d for s in (*BEGINS.values(), *LEFT.values()) for d in (-1, 0, 1)]),
)


@settings(max_examples=60, deadline=None)
@given(readings=st.lists(points | st.none(), max_size=40))
def test_a_level_is_entered_at_once_and_left_by_two_readings_in_a_row_below_it(readings: list[int | None]) -> None:
    """Each threshold by itself, in exact fractions. None: a workflow of the card begins or ends."""
    stand = Stand()
    stand.join(1)
    stand.open(1)
    for gauge in ("before", GPU, "behind"):  # two that are never pressed
        stand.sample(0, gauge, total=1000)
    last, entered, workflow = Fraction(0), dict.fromkeys(BEGINS, False), False
    for permille in readings:
        if permille is None:
            message = messages.EndWorkflow if workflow else messages.RegisterWorkflow
            stand.ask(1, message, "w", *([] if workflow else [[AgentStep("a")]]))
            workflow = not workflow
        else:
            stand.sample(permille, total=1000)
            before, last = last, Fraction(permille, 1000)
            for level, begins in BEGINS.items():
                exact = Fraction(str(begins))
                entered[level] |= last >= exact
                entered[level] &= max(before, last) > exact - Fraction(2, 100)
        highest = ([Mode.RELAXED] + [level for level, held in entered.items() if held])[-1]
        row = next(row for row in stand.status()["gauges"] if row["gauge"] == GPU)
        aware = workflow and highest in (Mode.NORMAL, Mode.PRESSURE)
        assert (row["level"], row["mode"]) == (highest, Mode.WORKFLOW_AWARE if aware else highest)
        assert stand.governor.sample_every_s == (0.25 if entered[Mode.PRESSURE] else 2.0)
        stand.check()


def test_a_transition_is_logged_counted_shown_announced_and_pushed_once() -> None:
    stand = with_clients()
    stand.sample(0.5)
    stand.ask(1, messages.Subscribe)
    stand.sample(0.93)
    stand.sample(0.93)
    said = {"gauge": GPU, "tier": "device", "before": "relaxed", "mode": "critical", "share": 0.93}
    assert [(log.level, log.event, log.fields) for log in stand.logged] == [
        ("warning", "mode", said | {"source": "test"})
    ]
    assert [told for told in stand.told if told["event"] == "mode"] == [{"event": "mode"} | said]
    assert stand.status()["counters"]["transitions"] == {"critical": 1}
    state = messages.TierState(GPU, Tier.DEVICE, Mode.CRITICAL, round(0.93 * TOTAL), TOTAL)
    assert stand.pushes(1) == [messages.ModeChanged(Mode.RELAXED, state)]
    assert stand.pushes(2) == []


def test_a_gauge_that_is_new_is_pushed_once_and_is_a_transition_only_if_it_is_not_relaxed() -> None:
    stand = with_clients()
    assert stand.ask(1, messages.Subscribe).tiers == []
    stand.sample(0.5)
    stand.sample(0.5)
    stand.sample(0.93, OTHER)
    pushes = [(push.state.gauge, push.before, push.state.mode) for push in stand.pushes(1)]
    assert pushes == [(GPU, Mode.RELAXED, Mode.RELAXED), (OTHER, Mode.RELAXED, Mode.CRITICAL)]
    assert stand.status()["counters"]["transitions"] == {"critical": 1}


def test_a_new_subscriber_first_gets_every_gauge() -> None:
    stand = with_clients()
    stand.sample(0.86)
    stand.sample(0.97, HOST_GAUGE)
    answer = stand.ask(1, messages.Subscribe)
    assert [(state.gauge, state.mode, state.refuses) for state in answer.tiers] == [
        (GPU, Mode.PRESSURE, False),
        (HOST_GAUGE, Mode.EMERGENCY, True),
    ]


@pytest.mark.parametrize(
    ("began_s", "stale", "used"),
    [(1.0, False, 0.5), (-5.0, False, 0.9), (1.0, True, 0.5)],
    ids=["twice", "older", "stale"],
)
def test_a_reading_that_is_not_newer_or_stale_changes_no_mode(began_s: float, stale: bool, used: float) -> None:
    stand = with_clients()
    stand.sample(0.9)
    began_at = stand.now
    for _ in range(5):
        stand.sample(0.5, began_at=began_at + began_s, stale=stale)
    row = stand.status()["gauges"][0]
    assert (row["stale"], row["mode"], row["share"], row["since_s"]) == (stale, "pressure", used, 5.0)
    for _ in range(2):
        stand.sample(0.5)
    assert stand.mode() is Mode.RELAXED


def test_a_gauge_that_is_gone_leaves_its_mode() -> None:
    stand = with_clients()
    stand.ask(1, messages.Subscribe)
    stand.sample(0.97)
    stand.lose()
    assert stand.governor.modes() == []
    last = stand.pushes(1)[-1]
    assert (last.before, last.state.mode, last.state.refuses) == (Mode.EMERGENCY, Mode.RELAXED, False)
    stand.sample(0.97)
    assert stand.mode() is Mode.EMERGENCY
    assert stand.status()["counters"]["transitions"] == {"emergency": 2, "relaxed": 1}
