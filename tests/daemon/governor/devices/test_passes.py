"""The table of modes, as a pass carries it out: who goes, how many, and what becomes of a pass in vain."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.governor.devices.choices import ENTRIES_MAX, WAITING_RETRY_S
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.control import AgentStep
from tensord.ipc.messages.modes import HOST_GAUGE, Mode

from ..stand import GPU, SHARES, Stand, card, key, named

USED = {Mode.RELAXED: 50, Mode.NORMAL: 75, Mode.PRESSURE: 91, Mode.CRITICAL: 95, Mode.EMERGENCY: 99}
READING_S = 0.25


@pytest.mark.parametrize("idle_long_enough", [False, True])
@pytest.mark.parametrize(
    ("mode", "idle_s"), [(Mode.RELAXED, 600.0), (Mode.NORMAL, 120.0), (Mode.CRITICAL, 30.0), (Mode.EMERGENCY, 30.0)]
)
def test_on_a_device_under_its_threshold_only_entries_idle_for_the_modes_time_are_evicted(
    mode: Mode, idle_s: float, idle_long_enough: bool
) -> None:
    stand = card(retry_s=0.0)
    for each in (1, 2, 3, 4):
        stand.register(1, each, 1)
    used_at = stand.now
    stand.enter(mode)
    stand.now = used_at + idle_s - (1 if idle_long_enough else 2)
    stand.use(1, 3)
    assert stand.reading(min(SHARES[mode], 0.84)) == ([1, 2, 4] if idle_long_enough else [])
    assert {order.reason for order in stand.orders()[-1:]} <= {mode.value}


@pytest.mark.parametrize(
    ("used", "mode", "first"), [(90, Mode.PRESSURE, 2), (95, Mode.CRITICAL, 2), (97, Mode.EMERGENCY, 13)]
)
def test_pressure_and_critical_take_their_share_of_the_entries_in_one_pass_and_emergency_has_no_limit(
    used: int, mode: Mode, first: int
) -> None:
    stand = card(20, size=1, pass_share=0.1)
    assert stand.reading(used) == list(range(1, first + 1)) and stand.mode() is mode
    if mode is Mode.PRESSURE:
        stand.carry_out_all(1)
        assert stand.reading(88) == [3, 4], "a tenth of 18 entries, rounded up"


@pytest.mark.parametrize(
    ("used", "mode"),
    [
        (85, Mode.PRESSURE),
        (91, Mode.PRESSURE),
        (85, Mode.WORKFLOW_AWARE),
        (90, Mode.WORKFLOW_AWARE),
        (95, Mode.CRITICAL),
        (99, Mode.EMERGENCY),
    ],
)
def test_entries_in_use_leave_in_each_mode_from_pressure_up_until_the_device_is_under_its_threshold(
    used: int, mode: Mode
) -> None:
    """At the threshold itself one byte too much is used."""
    stand = card(20, size=1)
    if mode is Mode.WORKFLOW_AWARE:
        stand.ask(1, messages.RegisterWorkflow, "w", [AgentStep("a")])
    stand.use(1, *range(1, 21))
    assert len(stand.reading(used)) == used - 84 and stand.mode() is mode
    stand.carry_out_all(1)
    assert stand.reading(84) == []


@pytest.mark.parametrize("mode", [Mode.CRITICAL, Mode.EMERGENCY])
def test_critical_and_emergency_take_what_pressure_takes_and_everything_idle_besides(mode: Mode) -> None:
    stand = card(10, size=1, retry_s=0.0)
    stand.enter(mode)
    stand.use(1, 1, 1, 1, 2, 2, 2)
    stand.pass_time(100)
    stand.use(1, *range(3, 11))
    went = stand.reading(86)
    assert went[:2] == [3, 4], "pressure's: used least, although just now"
    assert sorted(went[2:]) == [1, 2], "idle, although used most"


def test_uses_are_weighed_by_tokens_and_the_heaviest_of_equals_goes_first() -> None:
    stand = card()
    for each, (size, tokens, uses) in enumerate(
        [
            (10, 10, 10),  # one use a token
            (10, 1000, 10),  # a hundredth
            (10, 100, 1),  # a hundredth, of fewer tokens
            (30, 100, 1),  # of more bytes, used longer ago than the next one
            (30, 100, 1),
            (10, 0, 1),  # no tokens count as one
        ],
        1,
    ):
        stand.register(1, each, size, tokens, uses=uses)
        stand.now += 1
    went: list[int] = []
    while len(went) < 6:
        went += stand.reading(85)  # one byte too much is used
        stand.carry_out_all(1)
    assert went == [2, 4, 5, 3, 1, 6]


@pytest.mark.parametrize("used", [20_000, 10_000], ids=["emergency", "idle"])
def test_a_pass_takes_so_many_entries_that_the_daemon_is_not_kept_from_other_work(used: int) -> None:
    stand = card()
    for each in range(ENTRIES_MAX + 10):
        stand.say(1, messages.RegisterEntry(0, GPU, key(each), 1))
    stand.pass_time(1000)
    assert len(stand.reading(used, 20_000)) == ENTRIES_MAX


def test_a_workflow_lets_finished_agents_go_then_unknown_ones_then_the_farthest() -> None:
    stand = card()
    for each, agent in enumerate(("next", "far", "", "done", "stranger", "near", "farther"), 1):
        stand.register(1, each, 1, agent=agent)
        stand.now += 1
    at = {"done": 0, "next": 1, "near": 2, "far": 6, "farther": 10}
    stand.ask(1, messages.RegisterWorkflow, "w", [AgentStep(agent, step_index=step) for agent, step in at.items()])
    stand.ask(1, messages.AdvanceWorkflow, "w", 1)
    went: list[int] = []
    for _ in range(7):
        went += stand.reading(85)
        stand.carry_out_all(1)
    assert went == [4, 3, 5, 7, 2, 6, 1]
    stand.register(1, 8, 1, agent="done")
    stand.pass_time(10_000)
    stand.came()
    stand.sample(70, total=100)
    assert stand.came("offload", "drop") == [] and stand.mode() is Mode.WORKFLOW_AWARE, "below pressure nothing leaves"


@pytest.mark.parametrize("host_accepts", [True, False])
def test_an_evicted_entry_is_offloaded_if_the_host_accepts_and_it_is_worth_its_copy(host_accepts: bool) -> None:
    stand = card(copy_bytes_per_s=100, compute_s_per_token=1.0)
    stand.sample(0.5 if host_accepts else 0.86, HOST_GAUGE)
    stand.register(1, 1, 1000, tokens=10)
    stand.register(1, 2, 1000, tokens=9)
    stand.register(1, 3, 1000, tokens=0)
    stand.register(1, 4, 1000, tokens=1, cost_ms=10_000.0)
    stand.register(1, 5, 1000, tokens=1_000_000, cost_ms=9_999.0)
    stand.pass_time(100)
    stand.sample(95, total=100)
    went = sorted(stand.came("offload")), len(stand.orders())
    assert went == (([1, 3, 4], 2) if host_accepts else ([], 1)), "to offload and to drop are orders of their own"
    assert stand.device()["ordered_entries"] == 5


def test_a_pass_that_lowered_nothing_by_a_sample_begun_after_it_is_shown_and_not_repeated() -> None:
    stand = card(10, pass_share=0.1)
    stand.reading(90)
    stand.now += 5
    stand.carry_out_all()
    done_at = stand.now
    for began_at in (done_at - 1, done_at):
        assert stand.reading(90, began_at=began_at) == [] and not stand.device()["stuck"]
    for _ in range(3):
        assert stand.reading(90) == []
    assert "90 bytes are still used" in stand.device()["stuck"]
    assert [body["event"] for body in stand.told].count("stuck") == 1
    assert [log.event for log in stand.logged] == ["mode", "device stuck"]
    assert stand.status()["counters"]["passes"] == 1


@pytest.mark.parametrize("how", ["mode", "registration", "fall", "gauge gone"])
def test_a_device_is_stuck_until_something_changes(how: str) -> None:
    stand = card(10, pass_share=0.1)
    stand.reading(900, 1000)
    stand.carry_out_all()
    assert stand.reading(900, 1000) == [] and stand.device()["stuck"]
    assert stand.reading(891, 1000) == [], "a fall of less than a hundredth"
    if how == "registration":
        stand.register(2, 100)
    elif how == "gauge gone":
        stand.lose()
    assert stand.reading({"fall": 890, "mode": 930}.get(how, 900), 1000)
    assert not stand.device()["stuck"]
    assert stand.told[-1]["event"] == "order" and {"event": "stuck", "device": GPU, "why": ""} in stand.told


@pytest.mark.parametrize("why", ["freed", "fell", "kept"])
def test_a_pass_that_did_something_or_had_nothing_to_do_it_with_is_followed_by_the_next(why: str) -> None:
    stand = card(40, size=1, pass_share=0.1)
    first = stand.reading(90)
    stand.carry_out_all(1 if why == "freed" else 0, keep=why == "kept")
    second = stand.reading(89 if why == "fell" else 90)
    assert second and not set(first) & set(second)
    assert not stand.device()["stuck"]


def test_idle_entries_leave_below_pressure_although_their_owner_keeps_the_memory() -> None:
    stand = card(1)
    stand.pass_time(400)
    stand.register(1, 2)
    stand.pass_time(300)
    assert stand.reading(10) == [1]
    stand.carry_out_all()
    stand.pass_time(400)
    assert stand.reading(10) == [2] and not stand.device()["stuck"]


# ---- owners that return nothing, and entries in use: a card of 1,000 bytes, entries 1 to 5 of client 1, 6 to 10 of 2


def two(used: int, wanted: int = 0, **limits: Any) -> Stand:
    """A reservation waits for `wanted` bytes more than are free."""
    stand = card(5, **{"normal_idle_s": 3600.0, **limits})
    for each in range(6, 11):
        stand.register(2, each, 10)
        stand.now += 1
    stand.reading(used, 1000)
    if wanted:
        stand.say(3, messages.ReserveDevice(900, GPU, 1000 - used + wanted, 60.0, 60.0))
    return stand


@pytest.mark.parametrize(("used", "wanted"), [(831, 20), (867, 0)])
def test_after_a_pass_in_vain_the_entries_of_other_owners_leave(used: int, wanted: int) -> None:
    stand = two(used, wanted)
    assert named(stand.orders()) == [1, 2]
    stand.carry_out_all()
    assert stand.reading(used, 1000) == [6, 7]
    assert "returned nothing to the driver" in stand.device()["stuck"]
    stand.carry_out_all(10)
    assert stand.reading(used - 20, 1000) == [] and not stand.device()["stuck"]


def test_owners_that_returned_nothing_are_asked_again_once_they_have_returned_something() -> None:
    stand = two(800, 10, max_entries=10)
    stand.carry_out_all()
    assert stand.reading(800, 1000) == [6]
    stand.carry_out_all()
    assert stand.reading(800, 1000) == []
    stand.change_limits(max_entries=8)
    stand.register(1, 11, 10)
    assert stand.came() == [2], "for the budget"
    stand.carry_out_all(10)
    assert stand.reading(800, 1000) == [3]


def test_memory_that_came_back_and_was_taken_meanwhile_is_not_returned_in_vain() -> None:
    stand = two(800, 20)
    (order,) = stand.orders()
    stand.ask(1, messages.AcknowledgeOrder, GPU, order.order, offloaded=order.keys[:1])
    assert stand.reading(790, 1000, after_s=READING_S) == [], "the pass is under way"
    stand.ask(1, messages.AcknowledgeOrder, GPU, order.order, offloaded=order.keys[1:])
    assert stand.reading(800, 1000) == [3, 4] and not stand.device()["stuck"]


def test_an_entry_that_was_in_use_leaves_soon_after_if_a_reservation_waits() -> None:
    stand = two(800, 100, retry_s=30.0)
    assert stand.came() == list(range(1, 11))
    stand.carry_out_all(keep=True)
    kept_at = stand.now
    while not (again := stand.reading(800, 1000, after_s=READING_S)):
        assert stand.now < kept_at + WAITING_RETRY_S
    assert stand.now >= kept_at + WAITING_RETRY_S and again == list(range(1, 11))
