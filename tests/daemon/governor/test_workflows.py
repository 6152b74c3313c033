"""Workflows: how soon an agent's entries are needed, through every step, replacement and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.core.events import AGENTS_MAX
from tensord.daemon.governor.workflows import ENDED_AGENTS_MAX, FINISHED, UNKNOWN, Workflows
from tensord.errors import BadGraph, BadStep, LimitReached, TensordError
from tensord.ipc.messages.control import AgentStep

PLAN = [
    AgentStep("planner"),
    AgentStep("coder", ("planner",), 1),
    AgentStep("tester", ("coder",), 4),
    AgentStep("coder", ("tester",), 6),
]


@pytest.fixture
def make() -> Iterator[Callable[..., Workflows]]:
    made: list[Workflows] = []

    def make(workflows_max: int = 8, workflow_steps_max: int = 1 << 20) -> Workflows:
        made.append(Workflows(workflows_max, workflow_steps_max))
        return made[-1]

    yield make
    for workflows in made:
        workflows.check_invariants()


def told(workflows: Workflows) -> tuple[set[str], set[str]]:
    """The agents that are told to have no step left, and those that have one."""
    parts = workflows.take_turned()
    assert all(len(part.finished) + len(part.awaited) <= AGENTS_MAX for part in parts)
    assert not workflows.take_turned(), "told twice"
    return {agent for part in parts for agent in part.finished}, {agent for part in parts for agent in part.awaited}


def test_each_change_tells_which_agents_have_no_step_left_in_any_workflow(make: Callable[..., Workflows]) -> None:
    workflows = make()
    workflows.register(1, "w", PLAN)
    assert told(workflows) == (set(), {"planner", "coder", "tester"})
    workflows.advance(1, "w", 2)
    assert told(workflows) == ({"planner"}, {"coder"})
    workflows.register(2, "next", [AgentStep("planner", step_index=3), AgentStep("other")])
    assert told(workflows) == (set(), {"planner", "other"})
    workflows.advance(1, "w", 7)
    assert told(workflows) == ({"coder", "tester"}, set())
    workflows.advance(1, "w", 7)
    assert told(workflows) == (set(), set())
    workflows.end(1, "w")
    assert told(workflows) == ({"coder", "tester"}, {"planner"})
    workflows.client_left(2)
    assert told(workflows) == (set(), set()), "without a workflow nothing is known of any agent"


def test_many_agents_are_told_in_parts(make: Callable[..., Workflows]) -> None:
    workflows = make(workflows_max=5)
    for number in range(3):
        workflows.register(1, f"w{number}", [AgentStep(f"{number}-{step}", step_index=step) for step in range(1000)])
    assert len(told(workflows)[1]) == 3000


def test_a_step_that_is_very_far_is_still_nearer_than_none(make: Callable[..., Workflows]) -> None:
    workflows = make()
    workflows.register(1, "w", [AgentStep("late", step_index=(1 << 63) - 1)])
    assert workflows.distance("late") < UNKNOWN


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ([AgentStep("a", ("b",), 1), AgentStep("b", ("a",), 1)], "must run earlier"),
        ([AgentStep("a", ("nobody",), 1)], "nobody"),
    ],
)
def test_a_graph_that_cannot_be_run_is_refused_and_nothing_changes(
    make: Callable[..., Workflows], steps: list[AgentStep], named: str
) -> None:
    workflows = make()
    workflows.register(1, "w", PLAN)
    before = workflows.status()
    for name in ("w", "new"):
        with pytest.raises(BadGraph, match=named):
            workflows.register(1, name, steps)
    assert workflows.status() == before
    assert workflows.distance("tester") == 4


def test_a_workflow_goes_on_and_never_back(make: Callable[..., Workflows]) -> None:
    workflows = make()
    workflows.register(1, "w", PLAN)
    workflows.advance(1, "w", 3)
    workflows.advance(1, "w", 3)
    with pytest.raises(BadStep, match=r"step 3.*step 2"):
        workflows.advance(1, "w", 2)
    assert workflows.distance("tester") == 1


def test_there_are_no_more_workflows_than_workflows_max(make: Callable[..., Workflows]) -> None:
    workflows = make(2)
    workflows.register(1, "a", PLAN)
    workflows.register(1, "b", PLAN)
    with pytest.raises(LimitReached, match=r"2 may be \(a fixed limit"):
        workflows.register(2, "c", PLAN)
    workflows.register(1, "b", PLAN[:1])
    workflows.end(1, "a")
    workflows.register(2, "c", PLAN)


def test_all_workflows_together_have_no_more_steps_than_workflow_steps_max(make: Callable[..., Workflows]) -> None:
    workflows = make(8, 9)
    workflows.register(1, "a", PLAN)
    workflows.register(2, "b", PLAN)
    before = workflows.status()
    for client, name, steps in (
        (2, "c", PLAN[:2]),
        (1, "a", [*PLAN, AgentStep("x"), AgentStep("y")]),
    ):
        with pytest.raises(LimitReached, match=r"10; 9 may be \(a fixed limit"):
            workflows.register(client, name, steps)
    assert workflows.status() == before
    workflows.register(2, "c", PLAN[:1])
    workflows.end(1, "a")
    workflows.register(2, "c", PLAN)


def test_agents_that_ended_are_remembered_up_to_a_limit(make: Callable[..., Workflows]) -> None:
    workflows = make()
    workflows.register(1, "stays", [AgentStep("stays")])
    for number in range(0, ENDED_AGENTS_MAX + 2000, 1000):
        workflows.register(1, "w", [AgentStep(f"agent {number + n}", step_index=n) for n in range(1000)])
        workflows.end(1, "w")
    assert workflows.distance("agent 0") == UNKNOWN
    assert workflows.distance(f"agent {ENDED_AGENTS_MAX}") == FINISHED


def test_agents_up_next_are_those_within_the_lookahead_nearest_first(make: Callable[..., Workflows]) -> None:
    workflows = make()
    assert list(workflows.up_next(1)) == []
    workflows.register(1, "w", [*PLAN, AgentStep("reviewer", step_index=2)])
    workflows.register(2, "other", [AgentStep("other", step_index=1), AgentStep("reviewer", step_index=1)])
    assert list(workflows.up_next(0)) == []
    assert set(workflows.up_next(1)) == {"coder", "other", "reviewer"}
    workflows.advance(1, "w", 2)
    workflows.end(2, "other")
    assert list(workflows.up_next(1)) == []
    assert list(workflows.up_next(4)) == ["tester", "coder"]


AGENTS = ["a", "b", "c", "d"]
GRAPHS = st.lists(st.tuples(st.sampled_from(AGENTS), st.integers(0, 6)), min_size=1, max_size=6, unique=True).map(
    lambda pairs: [AgentStep(agent, step_index=index) for agent, index in pairs]
)
ACTIONS = st.one_of(
    st.tuples(st.just("register"), st.integers(1, 2), st.sampled_from("xyz"), GRAPHS),
    st.tuples(st.just("advance"), st.integers(1, 2), st.sampled_from("xyz"), st.integers(0, 8)),
    st.tuples(st.just("end"), st.integers(1, 2), st.sampled_from("xyz"), st.none()),
    st.tuples(st.just("leave"), st.integers(1, 2), st.none(), st.none()),
)


@settings(max_examples=80, deadline=None)
@given(actions=st.lists(st.tuples(ACTIONS, st.booleans()), max_size=25))
def test_any_schedule_gives_the_distances_that_plain_tables_give(
    actions: list[tuple[tuple[str, int, str, object], bool]],
) -> None:
    workflows = Workflows(2, 100)
    known: dict[str, tuple[int, int, dict[str, list[int]]]] = {}
    ended: set[str] = set()

    def over(names: list[str]) -> None:
        for name in names:
            ended.update(known.pop(name)[2])
        if not known:
            ended.clear()

    for (action, client, name, what), asked in actions:
        mine = name in known and known[name][0] == client
        try:
            if action == "register":
                assert isinstance(what, list)
                workflows.register(client, name, what)
                assert mine or (name not in known and len(known) < 2)
                table: dict[str, list[int]] = {}
                for step in what:
                    table.setdefault(step.agent_id, []).append(step.step_index)
                if mine:
                    ended.update(known[name][2])
                known[name] = (client, known[name][1] if mine else 0, table)
            elif action == "advance":
                assert isinstance(what, int)
                workflows.advance(client, name, what)
                assert mine and what >= known[name][1]
                known[name] = (client, what, known[name][2])
            elif action == "end":
                workflows.end(client, name)
                assert mine
                over([name])
            else:
                names = [each for each, workflow in known.items() if workflow[0] == client]
                assert workflows.client_left(client) == names
                over(names)
        except TensordError:
            assert not mine or (action == "advance" and what < known[name][1])  # type: ignore[operator]
        for agent in AGENTS:
            near = [i - step for _, step, table in known.values() for i in table.get(agent, []) if i >= step]
            there = any(agent in table for _, _, table in known.values())
            ended -= {agent} if there else set()
            expected = min(near) if near else FINISHED if there or agent in ended else UNKNOWN
            # Several changes may come before somebody asks.
            assert not asked or workflows.distance(agent) == expected
        if asked:
            workflows.check_invariants()
