"""The registry of device entries, as owners meet it: registrations, budgets, orders, promotion, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.errors import BelowFloor, DeviceFull, LimitReached, OwnedElsewhere, UnknownOrder
from tensord.ipc.messages.modes import Mode

from .registry import GPU, Registry, key, ordered


@pytest.fixture
def registry() -> Any:
    registry = Registry()
    yield registry
    registry.devices.check_invariants()


def test_uses_of_before_a_restart_and_of_before_a_renewal_count() -> None:
    registry = Registry(pass_share=1.0)
    registry.register(1, 1, uses=40)
    registry.register(1, 2)
    registry.use(1, 2, 2)
    registry.register(1, 2)
    registry.register(1, 3)
    assert ordered(registry.sample(100)) == [3, 2]


# ---- budgets


@pytest.mark.parametrize("budget", [{"max_bytes": 50}, {"max_entries": 5}])
def test_every_budget_is_kept_by_ordering_the_least_recently_used_away(budget: dict[str, int]) -> None:
    registry = Registry(**budget)
    for each in range(5):
        registry.register(1, each, 10, tokens=1)
        registry.now += 1
    registry.use(1, 0)
    assert registry.orders == []
    registry.register(2, 5, 10, tokens=1)
    registry.register(2, 6, 10, tokens=1)
    assert [(client, ordered([o]), o.reason) for client, o in registry.orders] == [
        (1, [1], "budget"),
        (1, [2], "budget"),
    ]
    status = registry.status
    assert status["entries"] - status["ordered_entries"] == 5
    registry.carry_out()
    assert registry.status["entries"] == 5
    registry.devices.check_invariants()


def test_an_entry_over_a_budget_by_itself_is_refused() -> None:
    registry = Registry(max_bytes=50)
    registry.register(1, 1, 1)
    before = registry.snapshot()
    with pytest.raises(DeviceFull, match="max_bytes = 50"):
        registry.register(1, 2, 51)
    assert registry.snapshot() == before


def test_the_coldest_entry_goes_first_as_soon_as_it_may_again() -> None:
    registry = Registry(max_entries=5, ack_s=10.0, retry_s=30.0)
    for each in range(1, 6):
        registry.register(2 if each == 2 else 1, each)
        registry.now += 1
    for which, then in ((10, 1), (11, 2)):  # 1 is kept; 2 is late, and its owner is silent
        registry.register(1, which)
        assert ordered([order for _, order in registry.orders]) == [then]
        if then == 1:
            registry.carry_out(keep=True)
        registry.release(1, which)
    registry.pass_time(11)
    registry.orders.clear()
    registry.register(1, 12)
    assert ordered([order for _, order in registry.orders]) == [3]
    registry.carry_out()
    registry.pass_time(30)
    registry.register(1, 13)
    assert ordered([order for _, order in registry.orders]) == [1], "kept more than retry_s ago"
    registry.carry_out()
    registry.use(2, 99)
    registry.register(1, 14)
    assert ordered([order for _, order in registry.orders]) == [2], "its owner answers again"


# ---- the floor


def test_a_floor_at_the_capacity_refuses_with_a_reason_and_does_not_loop() -> None:
    registry = Registry(max_bytes=50)
    for each in range(5):
        registry.register(1, each, 10)
    before = registry.snapshot()
    for floor in (50, 51, 1 << 40):
        with pytest.raises(BelowFloor, match=f"floor is {floor} blocks of 1 bytes and the capacity 50"):
            registry.register(1, 9, 10, under=registry.stands(40, mode=Mode.NORMAL, floor_blocks=floor))
    with pytest.raises(BelowFloor, match="capacity 30"):
        registry.register(1, 9, 10, under=registry.stands(20, 30, mode=Mode.NORMAL, floor_blocks=30))
    assert registry.snapshot() == before and registry.orders == []


def test_a_large_entry_under_the_floor_is_passed_over_for_a_smaller_one() -> None:
    registry = Registry(max_entries=2)
    registry.register(1, 1, 40)
    registry.register(1, 2, 5)
    registry.register(1, 3, 10, under=registry.stands(55, mode=Mode.NORMAL, floor_blocks=45))
    assert ordered([order for _, order in registry.orders]) == [2]


# ---- orders and what owners say to them


def test_orders_are_of_limited_length_and_their_numbers_rise() -> None:
    registry = Registry(keys_per_request_max=7)
    for each in range(40):
        registry.register(1 + each % 2, each)
    registry.pass_time(100)
    orders = registry.sample(95, mode=Mode.CRITICAL)
    assert sorted(len(order.keys) for order in orders) == [6, 6, 7, 7, 7, 7]
    assert sorted(ordered(orders)) == list(range(40))
    assert [client for client, _ in registry.orders] == [1, 2, 1, 2, 1, 2], "everybody's first before anybody's second"
    registry.carry_out(freed=1)
    registry.register(1, 1)
    registry.pass_time(100)
    (later,) = registry.sample(95, mode=Mode.CRITICAL)
    assert later.order > max(order.order for order in orders)


def test_an_owner_that_does_not_answer_is_shown_and_left_alone_and_its_entries_stay() -> None:
    registry = Registry(ack_s=10.0, retry_s=30.0)
    registry.register(1, 1)
    registry.register(2, 2)
    registry.pass_time(100)
    registry.sample(95, mode=Mode.CRITICAL)
    orders = dict(registry.orders)
    registry.acknowledge(2, orders[2].order, dropped=orders[2].keys, freed=1)
    registry.pass_time(9.5)
    assert registry.counters["timed_out"] == 0
    assert registry.devices.next_timer() == registry.now - 9.5 + 10
    registry.pass_time(1)
    assert registry.counters["timed_out"] == 1 and registry.status["entries"] == 1
    assert [row["client"] for row in registry.devices.owners() if row["unresponsive"]] == [1]
    assert [log.event for log in registry.logged] == ["owner does not answer"]
    registry.pass_time(100)
    assert registry.sample(95, mode=Mode.CRITICAL) == [], "nothing more is asked of it"
    registry.use(1, 99)
    assert not any(row["unresponsive"] for row in registry.devices.owners())
    assert ordered(registry.sample(95, mode=Mode.CRITICAL)) == [1]
    assert [body["unresponsive"] for body in registry.told if body["event"] == "owner"] == [True, False]


def test_an_owner_that_is_at_work_on_its_orders_is_not_late() -> None:
    registry = Registry(ack_s=10.0, keys_per_request_max=2)
    for each in range(6):
        registry.register(1, each)
    registry.pass_time(100)
    for order in registry.sample(95, mode=Mode.CRITICAL):
        for one in order.keys:
            registry.pass_time(8)
            registry.acknowledge(1, order.order, dropped=[one])
    assert registry.counters["timed_out"] == 0 and registry.counters["dropped"] == 6
    assert registry.devices.next_timer() is None


# ---- promotion


def test_entries_of_an_agent_up_next_are_promoted() -> None:
    registry = Registry()
    for each, agent in enumerate(("next", "far", "next", ""), 1):
        registry.register(1, each, 10, tokens=5, agent=agent, uses=7)
    registry.pass_time(100)
    registry.sample(95, 1000, mode=Mode.CRITICAL)
    registry.carry_out(freed=40)
    assert registry.devices.remembered == 4
    registry.workflows.set(next=1, far=2)
    (order,) = registry.sample(50, 1000, mode=Mode.RELAXED)
    assert (order.kind, ordered([order]), order.reason) == ("promote", [1, 3], "relaxed")
    assert registry.sample(50, 1000, mode=Mode.RELAXED) == [], "asked for once"
    with pytest.raises(UnknownOrder):
        registry.acknowledge(1, order.order, dropped=[key(1)])
    registry.register(1, 1, 10)
    assert registry.counters["promoted"] == 1
    assert registry.devices.remembered == 3
    registry.pass_time(31)
    assert ordered(registry.sample(50, 1000, mode=Mode.RELAXED)) == [3], "again, if nothing came of it"
    registry.devices.check_invariants()


@pytest.mark.parametrize("mode", [Mode.NORMAL, Mode.PRESSURE, Mode.CRITICAL, Mode.EMERGENCY])
def test_other_modes_promote_nothing(mode: Mode) -> None:
    registry = Registry()
    registry.register(1, 1, agent="next")
    registry.pass_time(700)
    registry.sample(10, mode=Mode.CRITICAL)
    registry.carry_out()
    registry.workflows.set(next=0)
    assert registry.sample(10, mode=mode) == []
    assert len(registry.sample(10, mode=Mode.WORKFLOW_AWARE)) == 1


def test_promotion_stays_under_the_threshold_counting_what_is_reserved_and_on_its_way() -> None:
    registry = Registry()
    for each in range(1, 9):
        registry.register(1, each, 10, agent="next")
        registry.now += 1
    registry.pass_time(100)
    registry.sample(95, mode=Mode.CRITICAL)
    registry.carry_out(freed=80)
    registry.workflows.set(next=0)
    orders = registry.sample(30, mode=Mode.RELAXED, reserved_bytes=15)
    assert ordered(orders) == [1, 2, 3], "30 + 15 + 30 < 85, and 10 more would not be"
    registry.register(1, 1, agent="next")
    assert registry.sample(30, mode=Mode.RELAXED, reserved_bytes=25, began_at=registry.now - 0.5) == []
    registry.register(1, 2, agent="next")
    assert ordered(registry.sample(50, mode=Mode.RELAXED, reserved_bytes=0)) == [4, 5], "10 still on their way"


def test_promotion_keeps_the_budgets() -> None:
    registry = Registry(max_entries=2)
    for each in range(1, 5):
        registry.register(1, each, agent="next")
        registry.carry_out()
    registry.release(1, 3)
    registry.workflows.set(next=0)
    assert ordered(registry.sample(10, mode=Mode.RELAXED)) == [1], "2 would be one too many"


def test_entries_deleted_by_or_lost_with_their_owner_are_not_promoted() -> None:
    registry = Registry()
    for client in (1, 2, 3):
        registry.register(client, client, agent="next")
    registry.pass_time(100)
    registry.sample(10, mode=Mode.CRITICAL)
    registry.carry_out()
    assert registry.release(3, 1) == 0 and registry.devices.remembered == 3, "another client's"
    registry.release(1, 1)
    assert registry.devices.remembered == 2
    registry.leave(2)
    assert registry.devices.remembered == 1
    registry.workflows.set(next=0)
    assert ordered(registry.sample(10, mode=Mode.RELAXED)) == [3]


def test_no_more_is_remembered_than_the_limit_and_the_oldest_is_forgotten() -> None:
    registry = Registry(remembered_max=3, max_entries=1)
    for each in range(1, 7):
        registry.register(1, each, agent="next")
        registry.carry_out()
    assert registry.devices.remembered == 3
    registry.release(1, 6)
    registry.limits.become(registry.limits.__class__())
    registry.workflows.set(next=0)
    assert ordered(registry.sample(10, mode=Mode.RELAXED)) == [3, 4, 5]


# ---- refusals, after which everything is as it was


def test_devices_are_limited_in_number_and_forgotten_with_their_last_owner() -> None:
    registry = Registry(devices_max=2)
    registry.devices.open(1, "second")
    registry.devices.open(1, "second")
    with pytest.raises(LimitReached, match=r"2 may be \(a fixed limit"):
        registry.devices.open(2, "third")
    registry.leave(1)
    registry.devices.open(2, "third")
    assert [row["device"] for row in registry.devices.status()] == [GPU, "third"]


def test_another_owners_key_cannot_be_registered(registry: Registry) -> None:
    registry.register(2, 1)
    told = rf"client 2 \(client 2, pid 2\) has registered key {key(1).hex()} on {GPU}, .*Client.put.*with a parameter"
    with pytest.raises(OwnedElsewhere, match=told):
        registry.register(1, 1)
