"""Agents by number: to whom an entry belongs, what is known of its agent, and what a restart keeps of it."""

from __future__ import annotations

import pytest

from tensord.daemon.policy.agents import FINISHED, NO_AGENT, RUNNING, SHARED, AgentStates, joined, number_of


@pytest.fixture
def changes() -> list[None]:
    return []


@pytest.fixture
def agents(changes: list[None]) -> AgentStates:
    return AgentStates(lambda: changes.append(None))


def test_an_entry_belongs_to_the_one_agent_that_uses_it_and_to_several_for_good() -> None:
    coder, tester = number_of("coder"), number_of("tester")
    assert len({coder, tester, NO_AGENT, SHARED}) == 4
    assert joined(NO_AGENT, "coder") == joined(coder, "coder") == joined(coder, "") == coder
    assert joined(coder, "tester") == joined(SHARED, "coder") == SHARED
    assert joined(NO_AGENT, "") == number_of("") == NO_AGENT


def test_an_agent_that_finished_runs_again_with_its_next_use(agents: AgentStates, changes: list[None]) -> None:
    number = number_of("coder")
    assert agents.states[number] == RUNNING
    agents.report("coder", "finished")
    assert agents.states[number] == FINISHED and len(changes) == 1
    assert agents.after_use(number_of("tester"), "coder") == SHARED
    assert agents.states[number] == FINISHED, "an entry of several agents says nothing of one of them"
    assert agents.after_use(NO_AGENT, "coder") == number
    assert agents.states[number] == RUNNING and len(changes) == 2


def test_a_turn_that_begins_ends_the_state_finished_and_no_other(agents: AgentStates) -> None:
    number = number_of("coder")
    for state in ("tool_call", "turn_ended"):
        agents.report("coder", state)
        before = agents.states[number]
        agents.report("coder", "began")
        assert agents.states[number] == before, "the turn's first uses count for the state in which the agent waited"
    agents.report("coder", "finished")
    agents.report("coder", "began")
    assert agents.states[number] == RUNNING


def test_a_report_without_a_name_or_without_news_changes_nothing(agents: AgentStates, changes: list[None]) -> None:
    before = bytes(agents.states)
    agents.report("", "finished")
    assert bytes(agents.states) == before and not changes
    agents.report("coder", "tool_call")
    agents.report("coder", "tool_call")
    assert len(changes) == 1


def test_states_last_over_a_restart_and_those_of_another_version_are_refused(agents: AgentStates) -> None:
    agents.report("coder", "turn_ended")
    again = AgentStates(lambda: None)
    again.learn(agents.learned())
    assert again.states == agents.states
    again.learn(b"\xff" * len(agents.learned()))
    assert again.states[NO_AGENT] == NO_AGENT and again.states[SHARED] == SHARED and max(again.states) == FINISHED
    with pytest.raises(ValueError, match="3 states"):
        again.learn(b"abc")
