"""The registry of device entries, as owners meet it: registrations, budgets, orders, promotion, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.forms.events import Tick
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.control import AgentStep
from tensord.ipc.messages.modes import HOST_GAUGE, Mode

from ..stand import GPU, Stand, card, key, named, refused, with_clients


def test_uses_of_before_a_restart_and_of_before_a_renewal_count() -> None:
    stand = card()
    stand.register(1, 1, 10, uses=40)
    stand.register(1, 2, 10)
    stand.use(1, 2, 2)
    stand.register(1, 2, 10)
    stand.register(1, 3, 10)
    assert stand.reading(100) == [3, 2]


@pytest.mark.parametrize("budget", [{"max_bytes": 50}, {"max_entries": 5}])
def test_every_budget_is_kept_by_ordering_the_least_recently_used_away(budget: dict[str, int]) -> None:
    stand = card(**budget)
    for each in range(5):
        stand.register(1, each, 10)
        stand.now += 1
    stand.use(1, 0)
    assert stand.orders() == []
    stand.register(2, 5, 10)
    stand.register(2, 6, 10)
    assert [(client, named([order]), order.reason) for client, order in stand.given] == [
        (1, [1], "budget"),
        (1, [2], "budget"),
    ]
    assert stand.device()["entries"] - stand.device()["ordered_entries"] == 5
    stand.carry_out_all()
    assert stand.device()["entries"] == 5


def test_an_entry_over_a_budget_by_itself_is_refused() -> None:
    stand = card(max_bytes=50)
    stand.register(1, 1, 1)
    assert "size_bytes = 51 alone is over max_bytes = 50" in refused(stand.register(1, 2, 51), "DeviceFull")
    assert stand.device()["entries"] == 1 and stand.orders() == []


def test_a_floor_at_the_capacity_refuses_with_a_reason_and_does_not_loop() -> None:
    stand = card(max_bytes=50, block_bytes=5)
    for each in range(5):
        stand.register(1, each, 10)
    stand.serve_requests()
    for total, capacity in ((100, 10), (30, 6)):
        stand.sample(20, total=total)
        text = refused(stand.register(1, 9, 10), "BelowFloor")
        assert f"floor is 10 blocks of 5 bytes and the capacity {capacity}" in text
    assert stand.device()["entries"] == 5 and stand.orders() == []


def test_orders_are_of_limited_length_and_their_numbers_rise() -> None:
    stand = card(keys_per_request_max=7)
    for each in range(40):
        stand.register(1 + each % 2, each, 1)
    stand.pass_time(100)
    assert sorted(stand.reading(95)) == list(range(40))
    assert sorted(len(order.keys) for order in stand.orders()) == [6, 6, 7, 7, 7, 7]
    assert [client for client, _ in stand.given] == [1, 2, 1, 2, 1, 2], "everybody's first before anybody's second"
    stand.carry_out_all(1)
    stand.register(1, 1)
    stand.pass_time(100)
    stand.reading(95)
    numbers = [order.order for order in stand.orders()]
    assert len(numbers) == 7 and numbers == sorted(set(numbers))


def test_an_owner_that_does_not_answer_is_shown_and_left_alone_and_its_entries_stay() -> None:
    def unresponsive() -> list[int]:
        return [row["client"] for row in stand.status()["owners"] if row["unresponsive"]]

    stand = card(ack_s=10.0, retry_s=30.0)
    stand.register(1, 1)
    stand.register(2, 2)
    stand.pass_time(100)
    stand.reading(95)
    ordered_at = stand.now
    stand.carry_out(2, stand.orders(2)[0])
    stand.pass_time(9.5)
    stand.do(Tick())
    assert stand.status()["counters"]["timed_out"] == 0
    assert stand.governor.next_timer() == ordered_at + 10
    stand.pass_time(1)
    assert stand.status()["counters"]["timed_out"] == 1 and stand.device()["entries"] == 1
    assert unresponsive() == [1]
    assert [log.event for log in stand.logged] == ["mode", "owner does not answer"]
    stand.pass_time(100)
    assert stand.reading(95) == [], "nothing more is asked of it"
    stand.carry_out(1, stand.orders(1)[0], keep=True)
    assert unresponsive() == []
    assert stand.reading(95) == [], "it is not asked for the same at once"
    stand.pass_time(30)
    assert stand.reading(95) == [1]
    assert [body["unresponsive"] for body in stand.told if body["event"] == "owner"] == [True, False]


def test_an_owner_that_is_at_work_on_its_orders_is_not_late() -> None:
    stand = card(ack_s=10.0, keys_per_request_max=2)
    for each in range(6):
        stand.register(1, each)
    stand.pass_time(100)
    stand.reading(95)
    for order in stand.orders():
        for one in order.keys:
            stand.pass_time(8)
            stand.ask(1, messages.AcknowledgeOrder, GPU, order.order, dropped=[one])
    counters = stand.status()["counters"]
    assert counters["timed_out"] == 0 and counters["dropped"] == 6
    assert stand.governor.next_timer() is None


def offloaded(*agents: str, **limits: Any) -> Stand:
    """Entries 1, 2 … of these agents have left, in order: 1 and 2 were client 1's, the others client 2's. Agent "next"
    is next, "far" one step later, and the next reading may show the card as relaxed."""
    stand = card(**limits)
    for each, agent in enumerate(agents, 1):
        stand.register(1 if each < 3 else 2, each, 10, tokens=5, agent=agent, uses=7)
        stand.now += 1
    stand.pass_time(100)
    stand.reading(93)
    stand.carry_out_all(10)
    assert stand.status()["remembered"] == len(agents)
    steps = [AgentStep(agent, step_index=step) for step, agent in enumerate(("now", "next", "far"))]
    stand.ask(1, messages.RegisterWorkflow, "w", steps)
    assert stand.reading(10) == [] and stand.mode() is Mode.CRITICAL, "not in critical"
    return stand


def test_entries_of_an_agent_up_next_are_promoted() -> None:
    stand = offloaded("next", "far", "next", "")
    assert stand.reading(10) == [1, 3] and stand.mode() is Mode.RELAXED
    order = stand.orders()[-1]
    assert (order.kind, order.reason) == ("promote", "relaxed")
    assert stand.reading(10) == [], "asked for once"
    refused(stand.ask(2, messages.AcknowledgeOrder, GPU, order.order, dropped=[key(1)]), "UnknownOrder")
    stand.register(1, 1, 10)
    assert stand.status()["counters"]["promoted"] == 1 and stand.status()["remembered"] == 3
    stand.pass_time(31)
    assert stand.reading(74) == [3] and stand.mode() is Mode.WORKFLOW_AWARE, "again, if nothing came of it"


def test_promotion_stays_under_the_threshold_counting_what_is_reserved_and_on_its_way() -> None:
    stand = offloaded(*["next"] * 8)
    assert isinstance(stand.ask(3, messages.ReserveDevice, GPU, 15, 60.0), messages.Reserved)
    assert stand.reading(30) == [1, 2, 3], "30 + 15 + 30 < 85, and 10 more would not be"
    began_at = stand.now
    stand.now += 1
    stand.register(1, 1, 10)
    assert stand.reading(30, began_at=began_at + 0.5) == [], "the reading does not show the new entry"
    stand.register(1, 2, 10)
    assert stand.reading(49) == [4], "49 + 15 + 10 still on its way + 10 < 85"


def test_the_nearest_agents_entries_are_promoted_first() -> None:
    stand = offloaded("far", "next", "far", lookahead_steps=2)
    assert stand.reading(10) == [2, 1, 3], "of client 1 the next agent's first, and then client 2's"


def test_promotion_keeps_the_budgets() -> None:
    stand = offloaded("next", "next", max_entries=2)
    stand.register(1, 9, 10)
    assert stand.reading(10) == [1], "2 would be one too many"


def test_entries_deleted_by_or_lost_with_their_owner_are_not_promoted() -> None:
    stand = offloaded(*["next"] * 4)
    assert stand.release(3, 1) == 0 and stand.status()["remembered"] == 4, "another client's"
    stand.release(1, 2)
    assert stand.status()["remembered"] == 3
    stand.leave(2)
    assert stand.status()["remembered"] == 1
    assert stand.reading(10) == [1]


# ---- refusals, after which everything is as it was


def test_devices_are_limited_in_number_and_forgotten_with_their_last_owner() -> None:
    stand = with_clients(devices_max=2)
    stand.open(2)
    stand.open(1, 1, device="second")
    assert "2 may be (a fixed limit" in refused(stand.ask(2, messages.OpenDevice, "third"), "LimitReached")
    stand.leave(1)
    stand.open(2, device="third")
    assert [row["device"] for row in stand.status()["devices"]] == [GPU, "third"]


def test_another_owners_key_cannot_be_registered() -> None:
    stand = card()
    stand.register(2, 1)
    text = refused(stand.register(1, 1), "OwnedElsewhere")
    assert f"client 2 (client 2, pid 4002) has registered key {key(1).hex()} on {GPU}" in text
    assert "Client.put" in text and "with a parameter" in text


def test_the_host_is_no_device() -> None:
    stand = with_clients()
    stand.sample(0.5, HOST_GAUGE)
    refused(stand.ask(1, messages.OpenDevice, HOST_GAUGE), "NoGauge")
    refused(stand.ask(1, messages.ReserveDevice, HOST_GAUGE, 1, 1.0), "NoGauge")
