"""Baselines: what is held by plan is no pressure, and the modes are about the rest."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.governor.modes.baselines import BASELINE_SHARE_MAX, GAP_S
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.modes import HOST_GAUGE, Mode

from ..stand import GPU, MIB, TOTAL, Make, Stand, key, refused

OTHER = "0000:66:00.0"


def declare(stand: Stand, size: int, client: int = 1, device: str = GPU) -> Any:
    return stand.ask(client, messages.DeclareBaseline, device, size * MIB)


def baseline(stand: Stand, device: str = GPU) -> tuple[int, str]:
    row = next(row for row in stand.status()["gauges"] if row["gauge"] == device)
    return row["baseline_bytes"] // MIB, row["baseline"]


def hold(stand: Stand, used: int, seconds: float, every_s: float = 2.0) -> None:
    """The card shows so many MiB for so long."""
    for _ in range(int(seconds / every_s)):
        stand.sample(used * MIB, after_s=every_s)


# ---- declared


def test_an_engine_that_holds_what_it_declared_puts_its_card_under_no_pressure(make: Make) -> None:
    stand = make()
    declare(stand, 900)
    stand.open(1)
    stand.register(1, 1, 10 * MIB)
    for used, mode in ((900, "relaxed"), (970, "normal"), (985, "pressure"), (992, "critical"), (996, "emergency")):
        stand.sample(used * MIB)
        assert stand.mode() == mode, used
    assert "96.0% full beside its baseline of" in refused(stand.register(1, 2), "UnderPressure")
    assert baseline(stand) == (900, "declared")
    assert stand.governor.modes()[0].baseline_bytes == 900 * MIB


def test_a_pass_brings_the_rest_under_its_threshold(make: Make) -> None:
    stand = make(pass_share=1.0)
    stand.open(1)
    declare(stand, 800)
    for number in range(20):
        stand.register(1, number, 10 * MIB, tokens=0)
    stand.sample(990 * MIB)
    assert sum(len(order.keys) for order in stand.orders(1)) == 3, "990 - 30 is the first below 800 + 0.85 * 200"


def test_promotions_stay_below_the_threshold_of_the_rest(make: Make) -> None:
    stand = make()
    declare(stand, 800)
    stand.sample(900 * MIB)
    refused(stand.ask(2, messages.ReserveDevice, GPU, 71 * MIB, 9.0, promotes=True), "DeviceFull")
    assert isinstance(stand.ask(2, messages.ReserveDevice, GPU, 69 * MIB, 9.0, promotes=True), messages.Reserved)


def test_the_declarations_of_several_clients_add_up_and_end_with_them(make: Make) -> None:
    stand = make()
    stand.sample(0.9)
    declare(stand, 300, 1)
    declare(stand, 400, 2)
    assert baseline(stand) == (700, "declared")
    declare(stand, 100, 2)
    assert baseline(stand) == (400, "declared")
    stand.leave(1)
    assert baseline(stand) == (100, "declared")
    declare(stand, 0, 2)
    assert baseline(stand) == (0, "")


def test_a_configured_baseline_is_of_one_card_or_of_all_until_a_reload(make: Make) -> None:
    stand = make(baselines=(("", 100 * MIB), (OTHER, 200 * MIB)))
    stand.sample(0.9)
    stand.sample(0.9, OTHER)
    assert (baseline(stand), baseline(stand, OTHER)) == ((100, "declared"), (200, "declared"))
    stand.change_limits(baselines=())
    assert baseline(stand) == (0, "")


def test_a_baseline_leaves_a_rest_about_which_modes_can_be(make: Make) -> None:
    stand = make()
    declare(stand, 2000)
    stand.sample(0.96)
    assert baseline(stand) == (int(BASELINE_SHARE_MAX * 1000), "declared")
    assert stand.mode() is Mode.RELAXED


def test_the_host_has_no_baseline(make: Make) -> None:
    stand = make(baselines=(("", 900 * MIB),))
    stand.sample(0.9, HOST_GAUGE)
    assert stand.mode(HOST_GAUGE) is Mode.PRESSURE
    refused(declare(stand, 1, device=HOST_GAUGE), "NoGauge")


def test_a_client_declares_baselines_of_so_many_devices_only(make: Make) -> None:
    stand = make(devices_max=1)
    declare(stand, 1)
    assert "1 may be (a fixed limit)" in refused(declare(stand, 1, device=OTHER), "LimitReached")
    declare(stand, 2)
    declare(stand, 0)
    declare(stand, 1, device=OTHER)


# ---- learned


def test_what_others_hold_steadily_is_learned_and_what_entries_hold_is_not(make: Make) -> None:
    stand = make(baseline_learn_s=300.0, normal_idle_s=1e6)
    stand.open(1)
    for number in range(5):
        stand.register(1, number, 10 * MIB)
    stand.sample(840 * MIB)
    hold(stand, 840, 298)
    assert baseline(stand) == (0, "") and stand.mode() is Mode.NORMAL
    hold(stand, 840, 4)
    assert baseline(stand) == (790, "learned") and stand.mode() is Mode.RELAXED


def test_a_learned_baseline_falls_at_once_when_memory_is_returned_and_rises_slowly(make: Make) -> None:
    stand = make(baseline_learn_s=300.0)
    stand.sample(900 * MIB)
    hold(stand, 900, 302)
    assert baseline(stand) == (900, "learned")
    stand.sample(500 * MIB)
    assert baseline(stand) == (500, "learned")
    stand.sample(900 * MIB)
    assert stand.mode() is Mode.NORMAL and baseline(stand) == (500, "learned")
    hold(stand, 900, 290)
    assert baseline(stand) == (500, "learned")
    hold(stand, 900, 12)
    assert baseline(stand) == (900, "learned")


def test_use_that_grows_is_not_learned(make: Make) -> None:
    stand = make(baseline_learn_s=300.0)
    for used in range(400, 800, 3):
        stand.sample(used * MIB, after_s=10.0)
    assert baseline(stand)[1] == ""


def test_nothing_is_learned_of_the_time_without_readings(make: Make) -> None:
    stand = make(baseline_learn_s=300.0)
    stand.sample(900 * MIB)
    for _ in range(10):
        stand.sample(900 * MIB, after_s=GAP_S + 1)
    assert baseline(stand) == (0, "")
    stand.sample(900 * MIB)
    hold(stand, 900, 280)
    for _ in range(40):
        stand.sample(900 * MIB, after_s=2.0, stale=True)
    stand.sample(900 * MIB)
    assert baseline(stand) == (0, "")


# ---- what may happen to each of them

NONE, HELD, LEARNED = (0, ""), (600, "declared"), (600, "learned")
DISTURBED = {
    "its client dies": {"client": NONE, "configured": HELD, "learned": LEARNED},
    "reloaded": {"client": HELD, "configured": NONE, "learned": NONE},
    "stale": {"client": HELD, "configured": HELD, "learned": LEARNED},
    "gone": {"client": HELD, "configured": HELD, "learned": NONE},
    "other card": {"client": HELD, "configured": HELD, "learned": LEARNED},
    "returned": {"client": HELD, "configured": HELD, "learned": (100, "learned")},
}


@pytest.mark.parametrize("source", ["client", "configured", "learned"])
@pytest.mark.parametrize("disturbance", DISTURBED)
def test_a_baseline_is_what_it_should_be_whatever_happens(make: Make, source: str, disturbance: str) -> None:
    limits: dict[str, Any] = {"configured": {"baselines": ((GPU, 600 * MIB),)}, "learned": {"baseline_learn_s": 300.0}}
    stand = make(**limits.get(source, {}))
    stand.sample(600 * MIB)
    if source == "learned":
        hold(stand, 600, 302)
    elif source != "configured":
        declare(stand, 600)
    assert baseline(stand)[0] == 600
    match disturbance:
        case "its client dies":
            stand.leave(1)
        case "reloaded":
            stand.change_limits(baselines=(), baseline_learn_s=None, pass_share=1.0)
        case "stale":
            for _ in range(3):
                stand.sample(100 * MIB, stale=True)
        case "gone":
            stand.lose()
        case "other card":
            stand.sample(0.99, OTHER)
        case "returned":
            stand.sample(100 * MIB)
    if disturbance != "stale":
        stand.sample(100 * MIB if disturbance == "returned" else 600 * MIB)
    assert baseline(stand) == DISTURBED[disturbance][source]


def test_a_reservation_makes_room_beside_a_baseline(make: Make) -> None:
    """All free memory may be reserved: what is held by plan is used already."""
    stand = make()
    stand.open(1)
    declare(stand, 700)
    for number in range(3):
        stand.register(1, number, 50 * MIB, tokens=0)
    stand.sample(850 * MIB)
    assert stand.mode() is Mode.RELAXED
    stand.say(2, messages.ReserveDevice(900, GPU, 200 * MIB, 9.0, 0, 5.0))
    (order,) = stand.orders(1)
    assert len(order.keys) == 1 and order.keys[0] == key(0)
    stand.carry_out(1, order, 50 * MIB)
    stand.sample(800 * MIB, after_s=0.25)
    assert isinstance(stand.answers[2][-1], messages.Reserved)
    assert stand.device()["reserved_bytes"] == 200 * MIB <= TOTAL - 800 * MIB
