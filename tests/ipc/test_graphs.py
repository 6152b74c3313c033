"""A workflow's steps: what is a graph, and who is needed how soon."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.errors import BadGraph
from tensord.ipc.graphs import AgentStepGraph
from tensord.ipc.messages.governance import DEPENDENCIES_MAX, STEPS_MAX, AgentStep


def chain(*agents: str) -> AgentStepGraph:
    """Each agent runs one step after the one before, and waits for it."""
    return AgentStepGraph(AgentStep(name, tuple(agents[max(at - 1, 0) : at]), at) for at, name in enumerate(agents))


def names(steps: list[AgentStep]) -> list[str]:
    return [step.agent_id for step in steps]


# ---- how soon


agents = st.sampled_from("abcdef")
some_steps = st.lists(
    st.builds(AgentStep, agents, st.just(()), st.integers(0, 12), st.just(0), st.booleans()),
    max_size=20,
    unique_by=lambda step: (step.agent_id, step.step_index),
)


@given(some_steps, st.integers(0, 14), st.integers(-1, 5))
def test_every_question_is_answered_as_by_a_look_at_all_the_steps(
    steps: list[AgentStep], current: int, lookahead: int
) -> None:
    graph = AgentStepGraph(steps)
    known = list(dict.fromkeys(names(steps)))
    assert graph.get_all_agents() == known
    assert len(graph) == len(steps)
    nearest = {
        agent: min(
            (step for step in steps if step.agent_id == agent and step.step_index >= current),
            key=lambda step: step.step_index,
            default=None,
        )
        for agent in known
    }
    for agent, step in nearest.items():
        wanted = None if step is None else step.step_index - current
        assert graph.compute_steps_to_execution(agent, current) == wanted
    ahead = {agent: step.step_index - current for agent, step in nearest.items() if step}
    assert graph.steps_to_execution(current) == ahead

    candidates = graph.get_prefetch_candidates(current, lookahead)
    expected = [step for step in nearest.values() if step and 0 < step.step_index - current <= lookahead]
    assert sorted(names(candidates)) == sorted(names(expected))
    places = [(step.step_index, step.is_optional, known.index(step.agent_id)) for step in candidates]
    assert places == sorted(places)


# ---- what is no graph


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([], "a workflow without steps: add one"),
        ([AgentStep("a", ("ghost",), 1)], "depends_on: agent 'a' at step 1 depends on 'ghost', which has no step"),
        ([AgentStep("a", ("b",), 1), AgentStep("b", (), 4)], "'b', which first runs at step 4: a dependency must run"),
    ],
)
def test_an_invalid_graph_is_refused_and_its_agents_are_named(steps: list[AgentStep], said: str) -> None:
    graph = AgentStepGraph(steps)
    with pytest.raises(BadGraph, match=said):
        graph.validate_dag()
    assert list(graph) == steps
    with pytest.raises(BadGraph, match=said):
        AgentStepGraph.checked(graph)


@given(
    st.lists(
        st.builds(AgentStep, agents, st.lists(agents, max_size=3).map(tuple), st.integers(0, 4)),
        min_size=1,
        max_size=10,
        unique_by=lambda step: (step.agent_id, step.step_index),
    )
)
def test_a_graph_is_valid_if_every_dependency_first_runs_earlier(steps: list[AgentStep]) -> None:
    first = {step.agent_id: step.step_index for step in sorted(steps, key=lambda step: -step.step_index)}
    good = all(agent in first and first[agent] < step.step_index for step in steps for agent in step.depends_on)
    graph = AgentStepGraph(steps)
    if good:
        graph.validate_dag()
    else:
        with pytest.raises(BadGraph, match="depends_on: "):
            graph.validate_dag()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"agent_id": ""}, "agent_id = '': Expected `str` of length >= 1"),
        ({"agent_id": "\ud800"}, "surrogates, which cannot be sent"),
        ({"depends_on": ("a", "")}, r"depends_on = .*length >= 1 - at `\$\[1\]`"),
        ({"depends_on": ("a", "\ud83d", "\ude00")}, "surrogates"),  # each is half of a letter, that both together are
        ({"depends_on": ("a",) * (DEPENDENCIES_MAX + 1)}, "depends_on = .* of length <= 64"),
        ({"step_index": -1}, "step_index = -1: Expected `int` >= 0"),
        ({"is_optional": 1}, "is_optional = 1: Expected `bool`"),
        ({"agent_id": "b", "step_index": 1}, "step_index = 1: agent 'b' has that step already"),
    ],
)
def test_a_step_that_cannot_be_added_is_named_and_nothing_changes(fields: dict[str, Any], said: str) -> None:
    graph = chain("a", "b")
    before = list(graph)
    with pytest.raises(BadGraph, match=said):
        graph.add_step(AgentStep(**({"agent_id": "c"} | fields)))
    assert list(graph) == before


def test_a_graph_has_as_many_steps_as_a_message_may() -> None:
    graph = AgentStepGraph(AgentStep("a", (), at) for at in range(STEPS_MAX))
    with pytest.raises(BadGraph, match=f"over {STEPS_MAX} steps"):
        graph.add_step(AgentStep("a", (), STEPS_MAX))
    with pytest.raises(BadGraph, match=f"'new' would be over {STEPS_MAX} steps"):
        graph.add_step(AgentStep("new", (), 0))
    assert len(graph) == STEPS_MAX
    assert graph.get_all_agents() == ["a"]
