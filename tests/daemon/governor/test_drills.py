"""Drills: what would follow from a reading, without any of it; or with all of it, until whoever drills leaves."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.core.effects import Send
from tensord.daemon.core.host_memory import Pressed
from tensord.daemon.governor.forms.events import GovernorReceived
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.modes import HOST_GAUGE, Mode

from .stand import GPU, MIB, TOTAL, Make, Stand, refused


def drill(stand: Stand, share: float, gauge: str = GPU, *, client: int = 1, act: bool = False) -> Any:
    stand.now += 1
    return stand.ask(client, messages.Drill, gauge, round(share * TOTAL), TOTAL, act=act)


def modes(answers: list[messages.Drilled]) -> list[Mode]:
    return [answers[0].before, *(answer.state.mode for answer in answers)]


def test_a_shadow_plays_readings_as_they_would_be_with_hysteresis(make: Make) -> None:
    stand = make()
    answers = [drill(stand, share) for share in (0.75, 0.97, 0.5, 0.5)]
    assert modes(answers) == [Mode.RELAXED, Mode.NORMAL, Mode.EMERGENCY, Mode.EMERGENCY, Mode.RELAXED]
    assert [answer.before for answer in answers[1:]] == [answer.state.mode for answer in answers[:-1]]
    assert answers[1].state.refuses and not answers[3].state.refuses


def test_each_client_has_shadows_of_its_own(make: Make) -> None:
    stand = make()
    drill(stand, 0.97, client=1)
    assert drill(stand, 0.5, client=2).before is Mode.RELAXED
    stand.leave(1)
    assert drill(stand, 0.5, client=2).before is Mode.RELAXED


def test_asking_returns_what_a_pass_would_order_and_orders_nothing(make: Make) -> None:
    stand = make()
    stand.open(1, 2)
    for number in range(4):
        stand.register(1 + number % 2, number, 10 * MIB, tokens=0 if number < 3 else 1)
    stand.pass_time(60)
    stand.sample(0.5)
    before = stand.status()
    stand.now += 1
    message = messages.Drill(99, GPU, round(0.93 * TOTAL), TOTAL)
    effects = stand.governor.handle(GovernorReceived(3, message), stand.now)
    answer = effects[0].message if isinstance(effects[0], Send) else None
    assert effects == [Send(3, answer)]  # type: ignore[arg-type]
    assert isinstance(answer, messages.Drilled)
    assert (answer.offload_entries, answer.offload_bytes) == (3, 30 * MIB)
    assert (answer.drop_entries, answer.drop_bytes) == (1, 10 * MIB)
    after = stand.status()
    for row in (before, after):
        del row["gauges"][0]["since_s"], row["gauges"][0]["age_s"]
    assert after == before


def test_asking_about_the_host_returns_what_the_ring_would_give_back(make: Make) -> None:
    stand = make()
    stand.holds(500 * MIB, 500 * MIB)
    assert drill(stand, 0.5, HOST_GAUGE).shrink_bytes == 0
    assert drill(stand, 0.9, HOST_GAUGE).shrink_bytes == 50 * MIB
    assert stand.pressed == []


def test_acting_is_a_reading_at_once_and_shown_as_a_drill(make: Make) -> None:
    stand = make()
    stand.ask(2, messages.Subscribe)
    stand.open(2)
    stand.sample(0.5)
    answer = drill(stand, 0.97, act=True)
    assert (answer.before, answer.state.mode) == (Mode.RELAXED, Mode.EMERGENCY)
    assert stand.pushes(2)[-1].state == answer.state
    assert stand.status()["gauges"][0]["source"] == "drill"
    refused(stand.register(2, 1), "UnderPressure")


def test_a_drill_replaces_the_gauge_s_reading_until_it_ends(make: Make) -> None:
    stand = make()
    stand.sample(0.9)
    drill(stand, 0.97, act=True)
    stand.sample(0.5)
    stand.sample(0.5)
    assert stand.mode() is Mode.EMERGENCY
    stand.leave(1)
    assert stand.mode() is Mode.RELAXED
    row = stand.status()["gauges"][0]
    assert (row["source"], row["share"]) == ("test", 0.5)
    assert stand.status()["transitions"][-1]["mode"] == "relaxed"


def test_a_drilled_gauge_that_there_is_not_ends_with_its_drill(make: Make) -> None:
    stand = make()
    stand.open(2)
    drill(stand, 0.97, act=True)
    refused(stand.register(2, 1), "UnderPressure")
    stand.leave(1)
    assert stand.governor.modes() == []
    assert stand.register(2, 1) == messages.Registered(stand.answers[2][-1].id)


def test_a_drill_of_the_host_presses_and_ends(make: Make) -> None:
    stand = make()
    stand.holds(500 * MIB, 500 * MIB)
    drill(stand, 0.97, HOST_GAUGE, act=True)
    assert stand.press.refuse
    assert stand.press.resident_bytes_max == 380 * MIB
    stand.leave(1)
    assert stand.press == Pressed()


def test_one_client_at_a_time_drills_a_gauge(make: Make) -> None:
    stand = make()
    drill(stand, 0.5, client=1, act=True)
    text = refused(drill(stand, 0.97, client=2, act=True), "OwnedElsewhere")
    assert "client 1" in text
    assert stand.mode() is Mode.RELAXED
    stand.leave(1)
    assert drill(stand, 0.97, client=2, act=True).state.mode is Mode.EMERGENCY


@pytest.mark.parametrize("act", [False, True])
def test_as_many_gauges_as_devices_max_may_be_drilled(make: Make, act: bool) -> None:
    stand = make(devices_max=2)
    drill(stand, 0.5, "a", act=act)
    drill(stand, 0.5, "b", act=act)
    assert "2 may be (a fixed limit)" in refused(drill(stand, 0.5, "c", act=act), "LimitReached")
    drill(stand, 0.5, "a", act=act)
