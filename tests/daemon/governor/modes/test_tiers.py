"""Modes, from readings to whoever is told: each change once, and undone when it is left."""

from __future__ import annotations

import pytest

from tensord.ipc.messages import control as messages
from tensord.ipc.messages.modes import HOST_GAUGE, Mode, Tier

from ..stand import GPU, TOTAL, Make

OTHER = "0000:66:00.0"


def test_a_transition_is_logged_counted_shown_announced_and_pushed_once(make: Make) -> None:
    stand = make()
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


def test_a_gauge_that_is_new_is_pushed_once_and_is_a_transition_only_if_it_is_not_relaxed(make: Make) -> None:
    stand = make()
    assert stand.ask(1, messages.Subscribe).tiers == []
    stand.sample(0.5)
    stand.sample(0.5)
    stand.sample(0.93, OTHER)
    pushes = [(push.state.gauge, push.before, push.state.mode) for push in stand.pushes(1)]
    assert pushes == [(GPU, Mode.RELAXED, Mode.RELAXED), (OTHER, Mode.RELAXED, Mode.CRITICAL)]
    assert stand.status()["counters"]["transitions"] == {"critical": 1}


def test_readings_come_more_often_while_any_tier_is_pressed(make: Make) -> None:
    stand = make(sample_s=2.0, sample_pressed_s=0.25)
    assert stand.governor.sample_every_s == 2.0
    stand.sample(0.84)
    assert stand.governor.sample_every_s == 2.0
    stand.sample(0.85, OTHER)
    assert stand.governor.sample_every_s == 0.25
    stand.sample(0.5, OTHER)
    assert stand.governor.sample_every_s == 0.25
    stand.sample(0.5, OTHER)
    assert stand.governor.sample_every_s == 2.0


def test_a_new_subscriber_first_gets_every_gauge(make: Make) -> None:
    stand = make()
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
def test_a_reading_that_is_not_newer_or_stale_changes_no_mode(
    make: Make, began_s: float, stale: bool, used: float
) -> None:
    stand = make()
    stand.sample(0.9)
    began_at = stand.now
    for _ in range(5):
        stand.sample(0.5, began_at=began_at + began_s, stale=stale)
    row = stand.status()["gauges"][0]
    assert (row["stale"], row["mode"], row["share"], row["since_s"]) == (stale, "pressure", used, 5.0)
    for _ in range(2):
        stand.sample(0.5)
    assert stand.mode() is Mode.RELAXED


def test_a_gauge_that_is_gone_leaves_its_mode(make: Make) -> None:
    stand = make()
    stand.ask(1, messages.Subscribe)
    stand.sample(0.97)
    stand.lose()
    assert stand.governor.modes() == []
    last = stand.pushes(1)[-1]
    assert (last.before, last.state.mode, last.state.refuses) == (Mode.EMERGENCY, Mode.RELAXED, False)
    stand.sample(0.97)
    assert stand.mode() is Mode.EMERGENCY
    assert stand.status()["counters"]["transitions"] == {"emergency": 2, "relaxed": 1}
