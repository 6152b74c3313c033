"""Baselines: what is held by plan is no pressure, and the modes are about the rest."""

from __future__ import annotations

import pytest

from tensord.daemon.governor.forms.limits import BASELINE_SHARE_MAX
from tensord.ipc.messages.modes import HOST_GAUGE, Mode

from ..stand import GPU, MIB, OTHER, TOTAL, Stand, refused, with_clients


def planned(size: int) -> dict[str, tuple[tuple[str, int], ...]]:
    return {"baselines": ((GPU, size * MIB),)}


def baseline(stand: Stand, device: str = GPU) -> int:
    row = next(row for row in stand.status()["gauges"] if row["gauge"] == device)
    return int(row["baseline_bytes"]) // MIB


def test_an_engine_that_holds_what_is_planned_puts_its_card_under_no_pressure() -> None:
    stand = with_clients(**planned(900))
    stand.open(1)
    stand.register(1, 1, 10 * MIB)
    for used, mode in ((900, "relaxed"), (970, "normal"), (985, "pressure"), (992, "critical"), (996, "emergency")):
        stand.sample(used * MIB)
        assert stand.mode() == mode, used
    assert "96.0% full beside its baseline of" in refused(stand.register(1, 2), "UnderPressure")
    assert baseline(stand) == 900
    assert stand.governor.modes()[0].baseline_bytes == 900 * MIB


def test_a_pass_brings_the_rest_under_its_threshold() -> None:
    stand = with_clients(pass_share=1.0, **planned(800))
    stand.open(1)
    for number in range(20):
        stand.register(1, number, 10 * MIB, tokens=0)
    stand.sample(990 * MIB)
    assert sum(len(order.keys) for order in stand.orders(1)) == 3, "990 - 30 is the first below 800 + 0.85 * 200"


def test_a_baseline_is_of_one_card_or_of_all_and_lasts_until_a_reload_whatever_happens() -> None:
    stand = with_clients(baselines=(("", 100 * MIB), (OTHER, 200 * MIB)))
    stand.sample(0.9)
    stand.sample(0.9, OTHER)
    assert (baseline(stand), baseline(stand, OTHER)) == (100, 200)
    stand.leave(1)
    for _ in range(3):
        stand.sample(0.05, stale=True)
    stand.lose(OTHER)
    stand.sample(0.05)
    stand.sample(0.9, OTHER)
    assert (baseline(stand), baseline(stand, OTHER)) == (100, 200)
    stand.change_limits(baselines=())
    assert baseline(stand) == 0


@pytest.mark.parametrize(
    ("gauge", "planned_bytes", "mode"),
    [(GPU, int(BASELINE_SHARE_MAX * TOTAL), Mode.RELAXED), (HOST_GAUGE, 0, Mode.PRESSURE)],
)
def test_a_baseline_leaves_a_rest_about_which_modes_can_be_and_the_host_has_none(
    gauge: str, planned_bytes: int, mode: Mode
) -> None:
    stand = with_clients(baselines=(("", 2000 * MIB),))
    stand.sample(0.9, gauge)
    assert stand.status()["gauges"][0]["baseline_bytes"] == planned_bytes
    assert stand.mode(gauge) is mode
