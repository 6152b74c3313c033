"""The table of modes, as a pass carries it out: who goes, how many, and what becomes of a pass in vain."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.governor.devices.passes import ENTRIES_MAX
from tensord.ipc.messages.modes import Mode

from .registry import FINISHED, GPU, Registry, ordered

PASSES = ("offload", "drop")


def registry_of(count: int, size: int = 10, **limits: Any) -> Registry:
    """Entries 1 to `count` of client 1, registered a second apart."""
    registry = Registry(**{"relaxed_idle_s": 600.0, "normal_idle_s": 120.0, "critical_idle_s": 30.0, **limits})
    for each in range(1, count + 1):
        registry.register(1, each, size)
        registry.now += 1
    return registry


# ---- modes


@pytest.mark.parametrize(
    ("mode", "idle_s"),
    [(Mode.RELAXED, 600.0), (Mode.NORMAL, 120.0), (Mode.CRITICAL, 30.0), (Mode.EMERGENCY, 30.0)],
)
def test_on_a_device_under_its_threshold_only_entries_idle_for_the_modes_time_are_evicted(
    mode: Mode, idle_s: float
) -> None:
    registry = Registry()
    for each in (1, 2, 3, 4):
        registry.register(1, each)
    registry.pass_time(idle_s - 2)
    registry.use(1, 3)
    registry.register(2, 5)
    assert registry.sample(50, mode=mode) == []
    registry.now += 0.5
    assert registry.sample(50, mode=mode) and ordered([o for _, o in registry.orders]) == [1, 2, 4]
    assert {order.reason for _, order in registry.orders} == {mode.value}


@pytest.mark.parametrize("mode", [Mode.PRESSURE, Mode.WORKFLOW_AWARE])
def test_at_the_threshold_itself_one_byte_too_much_is_used(mode: Mode) -> None:
    registry = registry_of(50, size=1)
    assert len(ordered(registry.sample(85, mode=mode))) == 1
    assert registry_of(50, size=1).sample(84, mode=mode) == []


def test_pressure_takes_at_most_its_share_of_the_entries_in_one_pass() -> None:
    registry = registry_of(30, size=1, pass_share=0.1)
    assert ordered(registry.sample(95)) == [1, 2, 3]
    registry.carry_out(freed=3)
    assert ordered(registry.sample(92)) == [4, 5, 6], "a tenth of 27 entries, rounded up"


@pytest.mark.parametrize("mode", [Mode.PRESSURE, Mode.WORKFLOW_AWARE, Mode.CRITICAL, Mode.EMERGENCY])
def test_entries_in_use_leave_in_each_mode_from_pressure_up_until_the_device_is_under_its_threshold(mode: Mode) -> None:
    registry = registry_of(20, size=1, pass_share=1.0)
    registry.use(1, *range(1, 21))
    assert len(ordered(registry.sample(90, mode=mode))) == 6, "90 - 6 is the first below 85"
    registry.carry_out(freed=6)
    assert registry.sample(84, mode=mode) == []


@pytest.mark.parametrize("mode", [Mode.CRITICAL, Mode.EMERGENCY])
def test_critical_and_emergency_take_what_pressure_takes_and_everything_idle_besides(mode: Mode) -> None:
    registry = registry_of(10, size=1, pass_share=1.0)
    registry.use(1, 1, 1, 1, 2, 2, 2)
    registry.pass_time(100)
    registry.use(1, *range(3, 11))
    went = ordered(registry.sample(86, mode=mode))
    assert went[:2] == [3, 4], "pressure's: used least, although just now"
    assert sorted(went[2:]) == [1, 2], "idle, although used most"


def test_a_pass_in_critical_takes_the_share_of_pressure_and_one_in_emergency_has_no_limit() -> None:
    assert ordered(registry_of(20, size=1, pass_share=0.1).sample(95, mode=Mode.CRITICAL)) == [1, 2]
    assert ordered(registry_of(20, size=1, pass_share=0.1).sample(97, mode=Mode.EMERGENCY)) == list(range(1, 14))


def test_uses_are_weighed_by_tokens_and_the_heaviest_of_equals_goes_first() -> None:
    registry = Registry(pass_share=1.0)
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
        registry.register(1, each, size, tokens, uses=uses)
        registry.now += 1
    went: list[int] = []
    while len(went) < 6:
        went += ordered(registry.sample(85))  # one byte too much is used
        registry.carry_out(freed=1)
    assert went == [2, 4, 5, 3, 1, 6]


def test_a_pass_takes_so_many_entries_that_the_daemon_is_not_kept_from_other_work() -> None:
    registry = registry_of(ENTRIES_MAX + 10, size=1, pass_share=1.0)
    for mode in (Mode.EMERGENCY, Mode.RELAXED):
        registry.pass_time(1000)
        assert len(ordered(registry.sample(20_000, 20_000, mode=mode))) == ENTRIES_MAX
        registry.carry_out(keep=True)
        registry.pass_time(100)


def test_a_pass_ranks_the_least_recently_used_of_very_many_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensord.daemon.governor.devices.passes.CANDIDATES_MAX", 4)
    registry = registry_of(6, pass_share=1.0)
    registry.use(1, 1, 1, 2, 2, 3, 3, 4, 4)
    registry.use(1, 5, 6)
    assert ordered(registry.sample(100)) == [1, 2], "5 and 6 were used less, but later than four others"


def test_a_workflow_lets_finished_agents_go_then_unknown_ones_then_the_farthest() -> None:
    registry = Registry()
    for each, agent in enumerate(("next", "far", "", "done", "stranger", "near", "farther"), 1):
        registry.register(1, each, 1, agent=agent)
        registry.now += 1
    registry.workflows.set(next=0, near=1, far=5, farther=9, done=FINISHED)
    went: list[int] = []
    for _ in range(7):
        went += ordered(registry.sample(85, mode=Mode.WORKFLOW_AWARE), *PASSES)
        registry.carry_out(freed=1)
    assert went == [4, 3, 5, 7, 2, 6, 1]


def test_a_workflow_below_pressure_evicts_nothing_at_all() -> None:
    registry = Registry()
    registry.register(1, 1, agent="done")
    registry.workflows.set(done=FINISHED)
    registry.pass_time(10_000)
    assert registry.sample(70, mode=Mode.WORKFLOW_AWARE) == []


# ---- where it goes


def test_an_evicted_entry_is_offloaded_if_the_host_accepts_and_it_is_worth_its_copy() -> None:
    def registry() -> Registry:
        registry = Registry(copy_bytes_per_s=100, compute_s_per_token=1.0, pass_share=1.0)
        registry.register(1, 1, 1000, tokens=10)
        registry.register(1, 2, 1000, tokens=9)
        registry.register(1, 3, 1000, tokens=0)
        registry.register(1, 4, 1000, tokens=1, cost_ms=10_000.0)
        registry.register(1, 5, 1000, tokens=1_000_000, cost_ms=9_999.0)
        registry.pass_time(100)
        return registry

    orders = registry().sample(95, mode=Mode.CRITICAL)
    assert (sorted(ordered(orders, "offload")), sorted(ordered(orders, "drop"))) == ([1, 3, 4], [2, 5])
    assert len({order.order for order in orders}) == 2, "to offload and to drop are orders of their own"
    orders = registry().sample(95, mode=Mode.CRITICAL, host_accepts=False)
    assert (ordered(orders, "offload"), sorted(ordered(orders, "drop"))) == ([], [1, 2, 3, 4, 5])


# ---- the floor


@pytest.mark.parametrize("mode", [Mode.PRESSURE, Mode.CRITICAL, Mode.EMERGENCY, Mode.NORMAL, Mode.RELAXED])
def test_no_pass_goes_below_the_floor(mode: Mode) -> None:
    registry = registry_of(10, pass_share=1.0)
    registry.pass_time(1000)
    orders = registry.sample(200, mode=mode, floor_blocks=65)
    assert ordered(orders) == [1, 2, 3]
    registry.carry_out(freed=1)
    assert registry.sample(150, mode=mode, floor_blocks=65) == []
    assert registry.status["bytes"] == 70


def test_an_entry_too_large_for_what_may_go_does_not_hold_up_smaller_ones() -> None:
    registry = Registry()
    registry.register(1, 1, 50)
    registry.pass_time(1)
    registry.register(1, 2, 5)
    registry.pass_time(1000)
    assert ordered(registry.sample(95, mode=Mode.CRITICAL, floor_blocks=40)) == [2]


# ---- from pass to pass


def test_entries_ordered_for_a_budget_count_as_gone_until_the_next_sample() -> None:
    registry = registry_of(10, size=10, pass_share=1.0, max_entries=10)
    registry.register(1, 11, 10)
    assert [order.reason for _, order in registry.orders] == ["budget"]
    assert registry.sample(94) == [], "the 10 bytes that must go are ordered already"
    registry.carry_out(freed=10)
    assert registry.sample(94, began_at=registry.now - 0.5) == [], "a sample of before"
    assert len(ordered(registry.sample(94))) == 1


def test_a_pass_is_judged_by_a_sample_that_was_begun_after_it() -> None:
    registry = registry_of(10, pass_share=0.1)
    registry.sample(90)
    registry.now += 5
    registry.carry_out(freed=0)
    done_at = registry.now
    assert registry.sample(90, began_at=done_at - 1) == [] and not registry.status["stuck"]
    assert registry.sample(90, began_at=done_at) == [], "begun as the last acknowledgement came"
    assert not registry.status["stuck"]
    assert registry.sample(90) == [] and registry.status["stuck"]


def test_a_pass_that_lowered_nothing_is_shown_and_not_repeated() -> None:
    registry = registry_of(10, pass_share=0.1)
    registry.sample(90)
    registry.carry_out(freed=0)
    for _ in range(3):
        assert registry.sample(90) == []
    assert "90 bytes are still used" in registry.status["stuck"]
    assert [body["event"] for body in registry.told].count("stuck") == 1
    assert [log.event for log in registry.logged] == ["device stuck"]
    assert registry.counters["passes"] == 1


@pytest.mark.parametrize("how", ["mode", "registration", "fall", "gauge gone"])
def test_a_device_is_stuck_until_something_changes(how: str) -> None:
    registry = registry_of(10, pass_share=0.1)
    registry.sample(900, 1000)
    registry.carry_out(freed=0)
    assert registry.sample(900, 1000) == [] and registry.status["stuck"]
    assert registry.sample(891, 1000) == [], "a fall of less than a hundredth"
    if how == "mode":
        registry.devices.mode_changed(GPU)
    elif how == "registration":
        registry.register(2, 100)
    elif how == "gauge gone":
        registry.devices.mode_changed(GPU)
    assert len(ordered(registry.sample(890 if how == "fall" else 900, 1000))) >= 1
    assert not registry.status["stuck"]
    assert registry.told[-1]["event"] == "order" and {"event": "stuck", "device": GPU, "why": ""} in registry.told


@pytest.mark.parametrize("why", ["freed", "fell", "kept"])
def test_a_pass_that_did_something_or_had_nothing_to_do_it_with_is_followed_by_the_next(why: str) -> None:
    registry = registry_of(40, size=1, pass_share=0.1)
    first = ordered(registry.sample(95))
    registry.carry_out(freed=1 if why == "freed" else 0, keep=why == "kept")
    second = ordered(registry.sample(94 if why == "fell" else 95))
    assert second and not set(first) & set(second)
    assert not registry.status["stuck"]


def test_idle_entries_leave_below_pressure_although_their_owner_keeps_the_memory() -> None:
    registry = Registry()
    registry.register(1, 1)
    registry.pass_time(400)
    registry.register(1, 2)
    registry.pass_time(300)
    assert ordered(registry.sample(10, mode=Mode.RELAXED)) == [1]
    registry.carry_out(freed=0)
    registry.pass_time(400)
    assert ordered(registry.sample(10, mode=Mode.RELAXED)) == [2]
    assert not registry.status["stuck"]
