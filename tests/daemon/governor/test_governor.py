"""The governor as a whole: requests and their answers, and what one part's change means to the others."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.governor.forms.events import OWNERS_EVERY_S
from tensord.daemon.governor.forms.limits import NeighbourPlace
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.control import AgentStep
from tensord.ipc.messages.modes import HOST_GAUGE, Mode

from .stand import GPU, MIB, OTHER, key, refused, with_clients


def test_the_workflow_mode_is_entered_and_left_with_the_last_workflow_of_the_card() -> None:
    """By its own client, by one whose agents have entries there, and with the end of a connection."""
    stand = with_clients()
    stand.ask(2, messages.Subscribe)
    stand.sample(0.75, HOST_GAUGE)
    stand.sample(0.75, OTHER)
    stand.sample(0.75)
    stand.open(1)
    stand.open(2, device=OTHER)
    stand.register(1, 1, agent="c")

    def modes() -> tuple[Mode, Mode, Mode]:
        return stand.mode(), stand.mode(OTHER), stand.mode(HOST_GAUGE)

    stand.ask(1, messages.RegisterWorkflow, "a", [AgentStep("a")])
    assert modes() == (Mode.WORKFLOW_AWARE, Mode.NORMAL, Mode.NORMAL)
    stand.ask(1, messages.EndWorkflow, "a")
    assert modes() == (Mode.NORMAL,) * 3
    stand.ask(3, messages.RegisterWorkflow, "c", [AgentStep("c")])
    assert stand.mode() is Mode.WORKFLOW_AWARE, "an entry of its agent is there"
    stand.ask(1, messages.RegisterWorkflow, "a", [AgentStep("a")])
    stand.leave(1)
    stand.open(3)
    assert modes() == (Mode.WORKFLOW_AWARE, Mode.NORMAL, Mode.NORMAL)
    stand.leave(3)
    assert stand.mode() is Mode.NORMAL
    aware = [push.state.mode for push in stand.pushes(2) if push.state.gauge == GPU][-4:]
    assert aware == [Mode.WORKFLOW_AWARE, Mode.NORMAL] * 2
    ended = [told for told in stand.told if told["event"] == "workflow" and told["change"] == "ended"]
    assert [told["workflow"] for told in ended] == ["a", "a", "c"]


def test_a_stale_gauge_begins_no_pass_and_the_refusal_ends_with_emergency_or_with_the_gauge() -> None:
    stand = with_clients()
    stand.open(1)
    stand.register(1, 1, MIB)
    stand.sample(0.5)
    stand.pass_time(60)
    stand.sample(0.97, stale=True)
    assert stand.orders() == []
    stand.sample(0.97)
    assert len(stand.orders()) == 1
    refused(stand.register(1, 2), "UnderPressure")
    assert stand.status()["gauges"][0]["refuses"]
    stand.lose()
    assert isinstance(stand.register(1, 2), messages.Registered)
    stand.sample(0.97)
    refused(stand.register(1, 3), "UnderPressure")
    for _ in range(2):
        stand.sample(0.5)
    assert isinstance(stand.register(1, 3), messages.Registered)


@pytest.mark.parametrize(
    ("source", "every_s"), [("pyrsmi", 0.0), ("file", 0.0), ("owners", OWNERS_EVERY_S), (None, OWNERS_EVERY_S)]
)
def test_owners_are_asked_for_readings_where_nobody_else_gives_them_at_a_pace_of_their_own(
    source: str | None, every_s: float
) -> None:
    stand = with_clients(sample_s=60.0)
    if source is not None:
        stand.sample(0.9, source=source)
    answer = stand.ask(1, messages.OpenDevice, GPU)
    assert answer.report_every_s == every_s
    assert (answer.state is None) == (source is None)
    if answer.state is not None:
        assert answer.state.mode is Mode.PRESSURE


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
    code: str, make_request: Any, arguments: tuple[Any, ...]
) -> None:
    stand = with_clients()
    before = stand.status()
    text = refused(stand.ask(1, make_request, *arguments), code)
    after = stand.status()
    assert after["counters"].pop("refused") == {code: 1}
    assert before["counters"].pop("refused") == {}
    assert after == before
    assert stand.told == [{"event": "refuse", "client": 1, "code": code, "text": text}]


@pytest.mark.parametrize("promotes", [False, True])
def test_memory_of_a_card_without_a_gauge_that_can_be_read_is_not_reserved(promotes: bool) -> None:
    stand = with_clients()
    code = "DeviceFull" if promotes else "NoGauge"

    def reserve() -> Any:
        return stand.ask(1, messages.ReserveDevice, GPU, MIB, 1.0, promotes=promotes)

    assert "has no gauge" in refused(reserve(), code)
    stand.sample(0.5)
    stand.sample(0.5, stale=True, began_at=stand.now, failure="no answer for 4 s")
    stand.now += 7
    text = refused(reserve(), code)
    assert "cannot be read (test: no answer for 4 s); its last reading is 8 s old" in text
    assert ("use the host tier's copy" if promotes else "tensorctl health") in text
    stand.sample(0.5)
    assert isinstance(reserve(), messages.Reserved)


def test_a_setting_that_names_a_card_that_is_not_there_is_shown_once_the_cards_are_known() -> None:
    places = NeighbourPlace("vllm", "127.0.0.1", 8000, "crad0"), NeighbourPlace("ollama", "127.0.0.1", 11434, GPU)
    stand = with_clients(baselines=(("", MIB), ("nope", 5 * MIB), (GPU, MIB)), neighbours=places)
    stand.sample(0.5, HOST_GAUGE)
    stand.sample(0.5, source="owners")
    assert stand.status()["missing_cards"] == []
    stand.sample(0.5)
    missing = [{"setting": "device.baseline", "card": "nope"}, {"setting": "neighbours.servers", "card": "crad0"}]
    assert stand.status()["missing_cards"] == missing
    stand.change_limits(baselines=())
    stand.sample(0.5, "crad0")
    assert stand.status()["missing_cards"] == []
