"""What clients hear of modes, and say of workflows and requests, against a real daemon whose gauges are a file."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tensord
from tensord.errors import BadGraph, BadStep, UsageError
from tensord.ipc.messages.modes import Mode, Tier
from tensord.testing import FakeCard

from ...daemon_process import PATIENCE_S, Daemon, until
from ...processes import child_says
from ..device.card import watching

TOTAL = 1000


@pytest.fixture
def cards(tmp_path: Path) -> list[FakeCard]:
    return [FakeCard(tmp_path, name, TOTAL) for name in ("card0", "card1")]


@pytest.fixture
def running(cards: list[FakeCard]) -> Iterator[Daemon]:
    with watching(cards[0]) as daemon:
        daemon.start()
        daemon.until(lambda status: len(status["governor"]["gauges"]) == 2, "the first sample")
        yield daemon


def graph(*agents: str) -> tensord.AgentStepGraph:
    """One step each, in a row."""
    made = tensord.AgentStepGraph()
    for index, agent in enumerate(agents):
        made.add_step(tensord.AgentStep(agent, step_index=index))
    return made


def workflows(daemon: Daemon) -> dict[str, int]:
    return {row["workflow"]: row["step"] for row in daemon.status()["governor"]["workflows"]}


# ---- modes


def test_a_callback_gets_every_change_in_order_with_its_reading(running: Daemon, cards: list[FakeCard]) -> None:
    heard: list[tensord.ModeChange] = []
    with running.client().on_mode(heard.append) as subscription:
        assert {name: state.mode for name, state in subscription.states.items()} == {
            "card0": Mode.RELAXED,
            "card1": Mode.RELAXED,
        }
        for used in (750, 870, 930, 970):
            cards[0].occupy(used)
            until(lambda used=used: heard and heard[-1].used_bytes == used, "the change")  # type: ignore[misc]
        cards[0].occupy(100)
        until(lambda: heard[-1].mode is Mode.RELAXED, "the fall")
    modes = [Mode.RELAXED, Mode.NORMAL, Mode.PRESSURE, Mode.CRITICAL, Mode.EMERGENCY, Mode.RELAXED]
    assert [change.mode for change in heard] == modes[1:]
    assert [change.before for change in heard] == modes[:-1]
    assert [change.refuses for change in heard] == [False, False, False, True, False]
    assert {(change.gauge, change.tier, change.total_bytes) for change in heard} == {("card0", Tier.DEVICE, TOTAL)}


def test_a_subscription_may_be_limited_to_one_gauge_and_may_be_ended(running: Daemon, cards: list[FakeCard]) -> None:
    client = running.client()
    one: list[tensord.ModeChange] = []
    both: list[tensord.ModeChange] = []
    of_one = client.on_mode(one.append, "card1")
    client.on_mode(both.append)
    assert list(of_one.states) == ["card1"]
    cards[0].occupy(930)
    until(lambda: both, "the change of card0")
    cards[1].occupy(930)
    until(lambda: len(both) == 2, "the change of card1")
    until(lambda: one, "the change of card1")
    assert [change.gauge for change in one] == ["card1"]
    of_one.close()
    cards[1].occupy(100)
    until(lambda: len(both) == 3, "the fall of card1")
    assert len(one) == 1


def test_a_callback_that_takes_long_and_fails_holds_up_nothing_but_the_next_one(
    running: Daemon, cards: list[FakeCard], caplog: pytest.LogCaptureFixture
) -> None:
    client = running.client()
    enough = threading.Event()
    heard: list[Mode] = []

    def waits(change: tensord.ModeChange) -> None:
        enough.wait(PATIENCE_S)
        heard.append(change.mode)
        raise RuntimeError("an engine's own mistake")

    client.on_mode(waits)
    cards[0].occupy(750)
    until(lambda: client.modes()["card0"].mode is Mode.NORMAL, "the first change")
    cards[0].occupy(930)
    until(lambda: client.modes()["card0"].mode is Mode.CRITICAL, "the second change")
    assert client.put(bytes(32), b"value", wait=True).state == "stored"
    assert heard == []
    enough.set()
    until(lambda: heard == [Mode.NORMAL, Mode.CRITICAL], "both, in order")
    until(lambda: "an engine's own mistake" in caplog.text, "the mistake to be logged")


def test_changes_during_a_daemons_absence_are_reported_though_the_new_one_samples_late(
    running: Daemon, cards: list[FakeCard]
) -> None:
    """A gauge that the next daemon does not have counts as relaxed."""
    client = running.client()
    heard: list[tensord.ModeChange] = []
    subscription = client.on_mode(heard.append)
    cards[0].occupy(930)
    until(lambda: heard, "the change")
    running.kill()
    until(lambda: not client.connected, "the client to notice")
    shutil.rmtree(cards[0].folder / "cards" / "card0")
    cards[0].gauge_file.unlink()
    running.start()
    assert client.wait_connected(PATIENCE_S)
    client.modes()
    cards[1].occupy(750)
    until(lambda: len(heard) == 3, "the differences")
    assert sorted((change.gauge, change.before, change.mode) for change in heard[1:]) == [
        ("card0", Mode.CRITICAL, Mode.RELAXED),
        ("card1", Mode.RELAXED, Mode.NORMAL),
    ]
    assert [(name, state.mode) for name, state in subscription.states.items()] == [("card1", Mode.NORMAL)]


def test_a_client_that_is_closed_or_forgotten_ends_the_thread_of_callbacks(running: Daemon) -> None:
    def thread() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "tensord-modes"]

    client = running.client()
    client.on_mode(print)
    assert thread()
    client.close()
    until(lambda: not thread(), "the thread to end")
    forgotten = tensord.Client(running.socket)
    forgotten.on_mode(print)
    assert thread()
    del forgotten
    until(lambda: not thread(), "the thread to end")


def test_the_child_of_a_fork_gets_no_changes_until_it_subscribes_itself(running: Daemon, cards: list[FakeCard]) -> None:
    client = running.client()
    heard: list[tensord.ModeChange] = []
    inherited = client.on_mode(heard.append)

    def subscribes_itself() -> bool:
        own: list[tensord.ModeChange] = []
        subscription = client.on_mode(own.append)
        assert inherited.closed and subscription.states
        FakeCard(cards[0].folder, "card0").occupy(930)
        until(lambda: own, "the change")
        return not heard

    assert child_says(subscribes_itself) == 0
    until(lambda: heard, "the parent to hear of it too")


# ---- workflows


def test_a_workflow_is_known_where_it_is_and_ended_with_its_block(running: Daemon) -> None:
    client = running.client()
    with client.workflow("report", graph("planner", "writer")) as workflow:
        assert workflows(running) == {"report": 0}
        workflow.advance(1, wait=True)
        assert workflows(running) == {"report": 1}
        assert workflow.error is None
    until(lambda: not workflows(running), "the workflow to end")
    with pytest.raises(BadStep, match="ended"):
        workflow.advance(2)


def test_a_workflow_that_makes_no_sense_is_named_and_nothing_changes(running: Daemon) -> None:
    client = running.client()
    circle = tensord.AgentStepGraph()
    circle.add_step(tensord.AgentStep("a", depends_on=("b",), step_index=0))
    circle.add_step(tensord.AgentStep("b", depends_on=("a",), step_index=1))
    with pytest.raises(BadGraph, match=r"a|b"):
        client.workflow("circle", circle)
    assert workflows(running) == {}
    workflow = client.workflow("row", graph("a", "b", "c"))
    workflow.advance(2, wait=True)
    with pytest.raises(BadStep, match=r"step 2.*step 1"):
        workflow.advance(1)
    with pytest.raises(UsageError, match="step"):
        workflow.advance(-1)
    assert (workflow.step, workflows(running)) == (2, {"row": 2})
    with pytest.raises(BadGraph, match="another"):
        running.client().workflow("row", graph("a"))


def test_a_new_daemon_gets_the_workflows_and_their_current_steps(running: Daemon) -> None:
    client = running.client()
    kept = client.workflow("kept", graph("a", "b", "c"))
    kept.advance(1)
    ended = client.workflow("ended", graph("a"))
    running.kill()
    until(lambda: not client.connected, "the client to notice")
    kept.advance(2)
    ended.end()
    running.start()
    until(lambda: workflows(running) == {"kept": 2}, "the new daemon to know")


# ---- requests


def test_requests_make_a_floor(running: Daemon) -> None:
    client = running.client()
    for _ in range(20):
        client.request_arrived("card0", 10)
        client.request_completed("card0", 0.5, 4)
    rows: list[dict[str, Any]] = running.until(
        lambda status: [row for row in status["governor"]["devices"] if row["floor_blocks"] > 0], "a floor"
    )
    assert [row["device"] for row in rows] == ["card0"]
