"""The governor as a whole: requests and their answers, and what one part's change means to the others."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.governor.forms.events import OWNERS_EVERY_S
from tensord.daemon.governor.forms.limits import NeighbourPlace
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.control import AgentStep
from tensord.ipc.messages.modes import HOST_GAUGE, Mode

from .stand import GPU, MIB, Make, key, refused

OTHER = "0000:66:00.0"


# ---- faults of earlier designs


def test_a_device_that_refused_in_emergency_accepts_when_that_ends(make: Make) -> None:
    stand = make()
    stand.open(1)
    stand.sample(0.97)
    text = refused(stand.register(1, 1), "UnderPressure")
    assert "97.0%" in text and "96.0%" in text and GPU in text
    assert stand.status()["gauges"][0]["refuses"]
    stand.sample(0.5)
    stand.sample(0.5)
    assert isinstance(stand.register(1, 1), messages.Registered)
    assert not stand.status()["gauges"][0]["refuses"]


def test_a_workflow_that_is_registered_is_entered_and_one_that_ended_is_left(make: Make) -> None:
    stand = make()
    stand.ask(2, messages.Subscribe)
    stand.sample(0.75)
    stand.sample(0.75, HOST_GAUGE)
    stand.open(1)
    stand.ask(1, messages.RegisterWorkflow, "w", [AgentStep("a")])
    assert (stand.mode(), stand.mode(HOST_GAUGE)) == (Mode.WORKFLOW_AWARE, Mode.NORMAL)
    stand.ask(1, messages.EndWorkflow, "w")
    assert stand.mode() is Mode.NORMAL
    assert [push.state.mode for push in stand.pushes(2)][-2:] == [Mode.WORKFLOW_AWARE, Mode.NORMAL]


def test_the_workflow_mode_is_left_with_the_last_workflows_client(make: Make) -> None:
    stand = make()
    stand.sample(0.75)
    stand.open(1, 2)
    stand.ask(1, messages.RegisterWorkflow, "a", [AgentStep("a")])
    stand.ask(2, messages.RegisterWorkflow, "b", [AgentStep("b")])
    stand.leave(1)
    assert stand.mode() is Mode.WORKFLOW_AWARE
    stand.leave(2)
    assert stand.mode() is Mode.NORMAL
    ended = [told for told in stand.told if told["event"] == "workflow" and told["change"] == "ended"]
    assert [told["workflow"] for told in ended] == ["a", "b"]


def test_a_step_graph_changes_nothing_for_the_cards_of_others(make: Make) -> None:
    """Neither the mode of the other card, nor whose entries leave it."""

    def gone(with_graph: bool) -> tuple[str, list[bytes]]:
        stand = make(pass_share=1.0, normal_idle_s=5.0)
        stand.open(1)
        stand.open(2, device=OTHER)
        for number, agent in enumerate(("x", "y", "")):
            stand.register(1, number, 10 * MIB, agent="a")
            stand.register(2, number, 10 * MIB, device=OTHER, agent=agent, tokens=0)
        if with_graph:
            stand.ask(1, messages.RegisterWorkflow, "w", [AgentStep("a")])
        stand.sample(0.5)
        stand.sample(0.75, OTHER)
        stand.sample(0.75)
        stand.pass_time(10)
        stand.sample(0.75, OTHER)
        assert stand.mode() is (Mode.WORKFLOW_AWARE if with_graph else Mode.NORMAL)
        return stand.mode(OTHER).value, [each for order in stand.orders(2) for each in order.keys]

    assert gone(with_graph=True) == gone(with_graph=False) == ("normal", [key(0), key(1), key(2)])


def test_a_graph_of_a_client_without_a_card_counts_where_its_agents_have_entries(make: Make) -> None:
    stand = make()
    stand.open(1)
    stand.open(2, device=OTHER)
    stand.sample(0.75)
    stand.sample(0.75, OTHER)
    stand.ask(3, messages.RegisterWorkflow, "w", [AgentStep("a")])
    assert (stand.mode(), stand.mode(OTHER)) == (Mode.NORMAL, Mode.NORMAL)
    stand.register(1, 1, agent="a")
    stand.sample(0.75)
    assert (stand.mode(), stand.mode(OTHER)) == (Mode.WORKFLOW_AWARE, Mode.NORMAL)
    stand.ask(1, messages.ReleaseEntries, GPU, [key(1)])
    stand.sample(0.75)
    assert stand.mode() is Mode.NORMAL


def test_the_victims_depend_on_the_workflows_current_step(make: Make) -> None:
    steps = [AgentStep("first"), AgentStep("second", step_index=1), AgentStep("third", step_index=2)]

    def victim(step: int) -> bytes:
        stand = make()
        stand.open(1)
        for number, agent in enumerate(("first", "second", "third")):
            stand.register(1, number, 10 * MIB, agent=agent)
        stand.ask(1, messages.RegisterWorkflow, "w", steps)
        stand.ask(1, messages.AdvanceWorkflow, "w", step)
        stand.sample(855 * MIB)
        (order,) = stand.orders(1)
        (gone,) = order.keys
        return gone

    assert [victim(step) for step in (0, 1, 2)] == [key(2), key(0), key(0)]


def test_devices_offload_while_the_host_takes_and_drop_while_it_does_not(make: Make) -> None:
    stand = make()
    stand.open(1)
    for number in range(3):
        stand.register(1, number, MIB, tokens=0)
    stand.pass_time(60)
    stand.sample(0.5, HOST_GAUGE)
    stand.sample(0.93)
    assert [order.kind for order in stand.orders(1)] == ["offload"]
    other = make()
    other.open(1)
    other.register(1, 1, MIB, tokens=0)
    other.pass_time(60)
    other.sample(0.86, HOST_GAUGE)
    other.sample(0.93)
    assert [order.kind for order in other.orders(1)] == ["drop"]


def test_a_stale_gauge_begins_no_pass_and_a_gauge_that_is_gone_ends_the_refusal(make: Make) -> None:
    stand = make()
    stand.open(1)
    stand.register(1, 1, MIB)
    stand.sample(0.5)
    stand.pass_time(60)
    stand.sample(0.97, stale=True)
    assert stand.orders() == []
    stand.sample(0.97)
    assert len(stand.orders()) == 1
    refused(stand.register(1, 2), "UnderPressure")
    stand.lose()
    assert isinstance(stand.register(1, 2), messages.Registered)


# ---- opening, reading


@pytest.mark.parametrize(
    ("source", "every_s"), [("pyrsmi", 0.0), ("file", 0.0), ("owners", OWNERS_EVERY_S), (None, OWNERS_EVERY_S)]
)
def test_owners_are_asked_for_readings_where_nobody_else_gives_them_at_a_pace_of_their_own(
    make: Make, source: str | None, every_s: float
) -> None:
    stand = make(sample_s=60.0)
    if source is not None:
        stand.sample(0.9, source=source)
    answer = stand.ask(1, messages.OpenDevice, GPU)
    assert answer.report_every_s == every_s
    assert (answer.state is None) == (source is None)
    if answer.state is not None:
        assert answer.state.mode is Mode.PRESSURE


def test_the_host_is_no_device(make: Make) -> None:
    stand = make()
    stand.sample(0.5, HOST_GAUGE)
    refused(stand.ask(1, messages.OpenDevice, HOST_GAUGE), "NoGauge")
    refused(stand.ask(1, messages.ReserveDevice, HOST_GAUGE, 1, 1.0), "NoGauge")


# ---- refusals


@pytest.mark.parametrize(
    ("code", "make_request", "arguments"),
    [
        ("NoGauge", messages.RegisterEntry, (GPU, key(1), MIB)),
        ("NoGauge", messages.ReserveDevice, (GPU, MIB, 1.0)),
        ("UnknownOrder", messages.AcknowledgeOrder, (GPU, 7)),
        ("UnknownOrder", messages.ReleaseReservation, (7,)),
        ("BadStep", messages.AdvanceWorkflow, ("w", 1)),
        ("BadStep", messages.EndWorkflow, ("w",)),
        ("BadGraph", messages.RegisterWorkflow, ("w", [AgentStep("a", ("b",), 1)])),
    ],
)
def test_a_refused_request_is_answered_counted_announced_and_changes_nothing(
    make: Make, code: str, make_request: Any, arguments: tuple[Any, ...]
) -> None:
    stand = make()
    before = stand.status()
    text = refused(stand.ask(1, make_request, *arguments), code)
    after = stand.status()
    assert after["counters"].pop("refused") == {code: 1}
    assert before["counters"].pop("refused") == {}
    assert after == before
    assert stand.told == [{"event": "refuse", "client": 1, "code": code, "text": text}]


def test_a_request_without_an_answer_is_refused_silently(make: Make) -> None:
    stand = make()
    stand.say(1, messages.RequestsArrived(GPU, 1))
    stand.say(1, messages.RequestCompleted(GPU, 1.0, 1))
    assert stand.answers[1] == []
    assert stand.status()["counters"]["refused"] == {"NoGauge": 2}


# ---- reservations


def test_a_stale_gauge_grants_no_reservation_and_says_why_and_how_old_it_is(make: Make) -> None:
    stand = make()
    stand.sample(0.5)
    stand.sample(0.5, stale=True, began_at=stand.now, failure="no answer for 4 s")
    stand.now += 7
    answer = stand.ask(1, messages.ReserveDevice, GPU, MIB, 1.0)
    refused(answer, "NoGauge")
    assert "cannot be read (test: no answer for 4 s); its last reading is 8 s old" in str(answer)
    stand.sample(0.5)
    assert isinstance(stand.ask(1, messages.ReserveDevice, GPU, MIB, 1.0), messages.Reserved)


def test_a_card_whose_gauge_cannot_be_read_takes_back_no_entry(make: Make) -> None:
    stand = make()
    stand.sample(0.1)
    stand.sample(0.1, stale=True, began_at=stand.now, failure="no answer for 4 s")
    text = refused(stand.ask(1, messages.ReserveDevice, GPU, MIB, 1.0, promotes=True), "DeviceFull")
    assert "cannot be read (test: no answer for 4 s)" in text and "use the host tier's copy" in text
    stand.sample(0.1)
    assert isinstance(stand.ask(1, messages.ReserveDevice, GPU, MIB, 1.0, promotes=True), messages.Reserved)


def test_a_card_without_a_gauge_takes_back_no_entry(make: Make) -> None:
    stand = make()
    refused(stand.ask(1, messages.ReserveDevice, GPU, MIB, 1.0, promotes=True), "DeviceFull")
    refused(stand.ask(1, messages.ReserveDevice, GPU, MIB, 1.0), "NoGauge")


def test_a_setting_that_names_a_card_that_is_not_there_is_shown_once_the_cards_are_known(make: Make) -> None:
    places = NeighbourPlace("vllm", "127.0.0.1", 8000, "crad0"), NeighbourPlace("ollama", "127.0.0.1", 11434, GPU)
    stand = make(baselines=(("", MIB), ("nope", 5 * MIB), (GPU, MIB)), neighbours=places)
    stand.sample(0.5, HOST_GAUGE)
    stand.sample(0.5, source="owners")
    assert stand.status()["missing_cards"] == []
    stand.sample(0.5)
    missing = [
        {"setting": "device.baseline", "card": "nope"},
        {"setting": "neighbours.servers", "card": "crad0"},
    ]
    assert stand.status()["missing_cards"] == missing
    stand.change_limits(baselines=())
    stand.sample(0.5, "crad0")
    assert stand.status()["missing_cards"] == []


# ---- the rest


def test_limits_that_were_changed_count_for_every_part(make: Make) -> None:
    stand = make()
    stand.sample(0.5)
    stand.open(1)
    stand.change_limits(reservations_max=1, max_entries=1, devices_max=1)
    stand.ask(1, messages.ReserveDevice, GPU, MIB, 1.0)
    refused(stand.ask(1, messages.ReserveDevice, GPU, MIB, 1.0), "LimitReached")
    refused(stand.ask(1, messages.OpenDevice, OTHER), "LimitReached")
