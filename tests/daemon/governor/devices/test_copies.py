"""Which entries are worth their copy: by the measured rate of copies, and the cost of computing."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.governor.devices import copies
from tensord.daemon.governor.devices.copies import (
    ASSUMED_BYTES_PER_S,
    ASSUMED_COUNTS,
    RATE_FRESH_S,
    RATES_KEPT,
    CopyRates,
)
from tensord.daemon.governor.forms.limits import GovernorLimits
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.modes import Mode

from ..stand import Make
from .registry import GPU, Registry, ordered

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def went(registry: Registry) -> tuple[list[int], list[int]]:
    """What a pass offloads, and what it drops."""
    registry.pass_time(100)
    orders = registry.sample(95, mode=Mode.CRITICAL)
    return sorted(ordered(orders, "offload")), sorted(ordered(orders, "drop"))


@pytest.mark.parametrize("kind", ["kv", "unknown", "encoder"])
def test_the_kv_of_an_8b_model_is_offloaded_by_default(kind: str) -> None:
    registry = Registry()
    for each in range(1, 5):
        registry.register(1, each, 512 * 128 * KIB, tokens=512, kind=kind)
    assert went(registry) == ([1, 2, 3, 4], [])


def test_a_reported_cost_decides_and_not_the_tokens() -> None:
    registry = Registry(copy_bytes_per_s=GIB)
    registry.register(1, 1, 100 * MIB, tokens=1, cost_ms=98.0)
    registry.register(1, 2, 100 * MIB, tokens=1_000_000, cost_ms=97.0)
    registry.register(1, 3, 100 * MIB, tokens=0, cost_ms=97.0)
    assert went(registry) == ([1], [2, 3]), "a copy takes 97.7 ms"


def test_without_a_reported_cost_the_kind_says_what_a_token_takes() -> None:
    limits: dict[str, Any] = {"compute_s_per_token": 1e-3, "encoder_s_per_token": 3e-3}
    registry = Registry(copy_bytes_per_s=1000, **limits)
    for each, (kind, size) in enumerate(
        [("unknown", 1), ("unknown", 2), ("kv", 1), ("kv", 2), ("encoder", 3), ("encoder", 4)], 1
    ):
        registry.register(1, each, size, tokens=1, kind=kind)
    registry.register(1, 7, 10**9, tokens=0, kind="kv")
    assert went(registry) == ([1, 3, 5, 7], [2, 4, 6]), "of the last nothing is known"


def test_the_rate_is_an_assumed_one_until_offloads_have_shown_another(make: Make) -> None:
    stand = make()
    stand.open(1)
    assert stand.device()["copy_bytes_per_s"] == ASSUMED_BYTES_PER_S
    stand.sample(0.5)
    for number in range(ASSUMED_COUNTS + 1):
        stand.register(1, number, 100 * MIB, tokens=0)
    stand.pass_time(700)
    stand.sample(0.5)
    (order,) = stand.orders(1)
    for each in order.keys:
        said = {"offloaded": [each], "freed_bytes": 1, "copy_s": 100 * MIB / 2e9}
        stand.ask(1, messages.AcknowledgeOrder, order.device, order.order, **said)
    assert stand.device()["copy_bytes_per_s"] == 2_000_000_000
    stand.change_limits(copy_bytes_per_s=5)
    assert stand.device()["copy_bytes_per_s"] == 5, "a configured rate is not measured"


def test_dropped_and_unmeasured_entries_are_no_measurement() -> None:
    registry = Registry(pass_share=1.0)
    for each in (1, 2, 3):
        registry.register(1, each, 100 * MIB, tokens=0)
    registry.pass_time(100)
    (order,) = registry.sample(95, mode=Mode.CRITICAL)
    before = registry.devices.copies.bytes_per_s(GPU, registry.now)
    for entry, how in zip(order.keys, ("dropped", "kept", "offloaded"), strict=True):
        seconds = 0.0 if how == "offloaded" else 5.0
        message = messages.AcknowledgeOrder(1, GPU, order.order, **{how: [entry]}, copy_s=seconds)  # type: ignore[arg-type]
        registry.devices.acknowledge(1, message, registry.now)
    assert registry.devices.copies.bytes_per_s(GPU, registry.now) == before


def test_a_copy_during_which_its_process_was_stopped_changes_no_rate() -> None:
    one = CopyRates(GovernorLimits())
    one.copied("card", 100 * MIB, 30.0, 1.0)
    assert one.bytes_per_s("card", 1.0) == ASSUMED_BYTES_PER_S
    for _ in range(4):
        one.copied("card", 100 * MIB, 100 * MIB / 5e9, 2.0)
    assert one.bytes_per_s("card", 2.0) == pytest.approx(5e9)


def test_a_slow_rate_is_forgotten_so_that_entries_are_copied_and_measured_again() -> None:
    one = CopyRates(GovernorLimits())
    for _ in range(2 * RATES_KEPT):
        one.copied("card", 100 * MIB, 1.0, 5.0)
    one.check_invariants({"card"})
    assert one.bytes_per_s("card", 5.0) == 100 * MIB
    assert one.bytes_per_s("card", 5.0 + RATE_FRESH_S) == ASSUMED_BYTES_PER_S


def test_each_device_has_a_rate_of_its_own_which_ends_with_its_last_owner() -> None:
    one = CopyRates(GovernorLimits())
    for _ in range(5):
        one.copied("slow", 100 * MIB, 1.0, 0.0)
    assert (one.bytes_per_s("slow", 0.0), one.bytes_per_s("fast", 0.0)) == (100 * MIB, ASSUMED_BYTES_PER_S)
    one.closed("slow")
    assert one.bytes_per_s("slow", 0.0) == ASSUMED_BYTES_PER_S


def test_small_offloads_measure_nothing() -> None:
    one = CopyRates(GovernorLimits())
    for _ in range(5):
        one.copied("card", copies.MEASURED_BYTES_MIN - 1, 1.0, 0.0)
    assert one.bytes_per_s("card", 0.0) == ASSUMED_BYTES_PER_S
