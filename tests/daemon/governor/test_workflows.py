"""Workflows: how soon an agent's entries are needed, through every step, replacement and end."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.forms.events import AGENTS_MAX
from tensord.daemon.governor.workflows import FINISHED, UNKNOWN
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.control import AgentStep

from .stand import Stand, refused, with_clients

PLAN = [
    AgentStep("planner"),
    AgentStep("coder", ("planner",), 1),
    AgentStep("tester", ("coder",), 4),
    AgentStep("coder", ("tester",), 6),
]


def register(stand: Stand, client: int, name: str, steps: list[AgentStep]) -> Any:
    return stand.ask(client, messages.RegisterWorkflow, name, steps)


def advance(stand: Stand, client: int, name: str, step: int) -> Any:
    return stand.ask(client, messages.AdvanceWorkflow, name, step)


def end(stand: Stand, client: int, name: str) -> Any:
    return stand.ask(client, messages.EndWorkflow, name)


def distance(stand: Stand, agent: str) -> float:
    return stand.governor.workflows.distance(agent)


def told(stand: Stand) -> tuple[set[str], set[str]]:
    """The agents that the store was told to have no step left, and those that have one, since the last call."""
    parts, stand.turned = stand.turned, []
    assert all(len(part.finished) + len(part.awaited) <= AGENTS_MAX for part in parts)
    return {agent for part in parts for agent in part.finished}, {agent for part in parts for agent in part.awaited}


def test_each_change_tells_which_agents_have_no_step_left_in_any_workflow() -> None:
    stand = with_clients()
    register(stand, 1, "w", PLAN)
    assert told(stand) == (set(), {"planner", "coder", "tester"})
    advance(stand, 1, "w", 2)
    assert told(stand) == ({"planner"}, {"coder"})
    register(stand, 2, "next", [AgentStep("planner", step_index=3), AgentStep("other")])
    assert told(stand) == (set(), {"planner", "other"})
    advance(stand, 1, "w", 7)
    assert told(stand) == ({"coder", "tester"}, set())
    advance(stand, 1, "w", 7)
    assert told(stand) == (set(), set())
    end(stand, 1, "w")
    assert told(stand) == ({"coder", "tester"}, {"planner"})
    stand.leave(2)
    assert told(stand) == ({"planner", "other"}, set())


def test_many_agents_are_told_in_parts() -> None:
    stand = with_clients()
    register(stand, 2, "stays", PLAN)
    for number in range(3):
        register(stand, 1, f"w{number}", [AgentStep(f"{number}-{step}", step_index=step) for step in range(1000)])
    told(stand)
    stand.leave(1)
    assert len(stand.turned) > 1 and len(told(stand)[0]) == 3000


def test_workflows_and_their_steps_together_are_limited() -> None:
    stand = with_clients(workflows_max=2, workflow_steps_max=9)
    register(stand, 1, "a", PLAN)
    register(stand, 2, "b", PLAN)
    before = stand.status()["workflows"]
    assert "2 may be (a fixed limit" in refused(register(stand, 2, "c", PLAN[:1]), "LimitReached")
    more = [*PLAN, AgentStep("x"), AgentStep("y")]
    assert "10; 9 may be (a fixed limit" in refused(register(stand, 1, "a", more), "LimitReached")
    assert stand.status()["workflows"] == before
    end(stand, 1, "a")
    assert isinstance(register(stand, 2, "c", PLAN), messages.Done)


AGENTS = ["a", "b", "c", "d"]
GRAPHS = st.lists(st.tuples(st.sampled_from(AGENTS), st.integers(0, 6)), min_size=1, max_size=6, unique=True).map(
    lambda pairs: [AgentStep(agent, step_index=index) for agent, index in pairs]
)
CLIENTS, NAMES = st.integers(1, 2), st.sampled_from("xyz")
ACTIONS = st.one_of(
    st.tuples(st.just("register"), CLIENTS, NAMES, GRAPHS),
    st.tuples(st.just("advance"), CLIENTS, NAMES, st.integers(0, 8)),
    st.tuples(st.just("end"), CLIENTS, NAMES, st.none()),
    st.tuples(st.just("leave"), CLIENTS, st.none(), st.none()),
)


@settings(max_examples=80, deadline=None)
@given(actions=st.lists(st.tuples(ACTIONS, st.booleans()), max_size=25))
def test_any_schedule_gives_the_distances_that_plain_tables_give(
    actions: list[tuple[tuple[str, int, str, Any], bool]],
) -> None:
    stand = Stand(workflows_max=2)
    stand.join(1, 2)
    ids = {1: 1, 2: 2}  # of the clients that are connected now
    known: dict[str, tuple[int, int, dict[str, list[int]]]] = {}

    for (action, which, name, what), asked in actions:
        client = ids[which]
        mine = name in known and known[name][0] == client
        step = known[name][1] if mine else 0
        if action == "leave":
            stand.leave(client)
            known = {each: workflow for each, workflow in known.items() if workflow[0] != client}
            ids[which] = max(ids.values()) + 1
            stand.join(ids[which])
        elif action == "register":
            done = isinstance(register(stand, client, name, what), messages.Done)
            assert done == (mine or (name not in known and len(known) < 2))
            if done:
                table: dict[str, list[int]] = {}
                for each in what:
                    table.setdefault(each.agent_id, []).append(each.step_index)
                known[name] = (client, step, table)
        elif action == "advance":
            done = isinstance(advance(stand, client, name, what), messages.Done)
            assert done == (mine and what >= step)
            if done:
                known[name] = (client, what, known[name][2])
        else:
            assert isinstance(end(stand, client, name), messages.Done) == mine
            if mine:
                del known[name]
        for agent in AGENTS:
            near = [i - step for _, step, table in known.values() for i in table.get(agent, []) if i >= step]
            there = any(agent in table for _, _, table in known.values())
            expected = min(near) if near else FINISHED if there else UNKNOWN
            # Several changes may come before somebody asks.
            assert not asked or distance(stand, agent) == expected
        if asked:
            stand.check()
