"""Step graphs: which agent of a workflow runs at which step, and so how soon each one's entries are needed again.

Owns: what a step may be, the graph's checks, and the order of agents from any step of the workflow.
Does not own where a workflow is (every question names its step), nor whose entries go.

An agent may run at several steps. Once they are all past it is never needed again: only another step of its own, at
or after the current one, says otherwise.

Invariants: a step that was refused has changed nothing; (agent, step_index) is there once; an agent's step indices
are sorted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from ..errors import BadGraph
from .governance import AGENT_CHARS_MAX, DEPENDENCIES_MAX, STEPS_MAX, Step
from .schema import NUMBER_MAX


@dataclass(frozen=True, slots=True)
class AgentStep:
    """`agent_id` runs at `step_index`, after the agents in `depends_on`.

    `estimated_tokens`: what it will hold then; 0: not known. `is_optional`: the workflow can go on without it.

    Raises BadGraph, which names the field, its value and what is wanted.

    Example:
        >>> step = tensord.AgentStep("coder", depends_on=("planner",), step_index=1, estimated_tokens=4000)
        >>> step.step_index
        1
    """

    agent_id: str
    depends_on: tuple[str, ...] = ()
    step_index: int = 0
    estimated_tokens: int = 0
    is_optional: bool = False

    def __post_init__(self) -> None:
        _check_agent("agent_id", self.agent_id)
        if not isinstance(self.depends_on, tuple | list):
            raise BadGraph(f"depends_on = {self.depends_on!r}: give a tuple of agents")
        if len(self.depends_on) > DEPENDENCIES_MAX:
            raise BadGraph(f"depends_on of {len(self.depends_on)} agents; at most {DEPENDENCIES_MAX} may be named")
        _check_agents("depends_on", self.depends_on)
        object.__setattr__(self, "depends_on", tuple(self.depends_on))
        _check_number("step_index", self.step_index)
        _check_number("estimated_tokens", self.estimated_tokens)
        if not isinstance(self.is_optional, bool):
            raise BadGraph(f"is_optional = {self.is_optional!r}: give True or False")


class AgentStepGraph:
    """The steps of one workflow. Steps may be added in any order; `validate_dag` says whether they are a workflow.

    Example:
        >>> graph = tensord.AgentStepGraph()
        >>> graph.add_step(tensord.AgentStep("planner"))
        >>> graph.add_step(tensord.AgentStep("coder", depends_on=("planner",), step_index=1))
        >>> graph.validate_dag()                                  # raises BadGraph if the steps cannot be run
        >>> graph.compute_steps_to_execution("coder", current_step=0)
        1
    """

    def __init__(self, steps: Iterable[AgentStep] = ()) -> None:
        self._steps: dict[tuple[str, int], AgentStep] = {}
        self._indices: dict[str, list[int]] = {}  # in order of the agents' first addition
        self._sorted: list[AgentStep] | None = None
        for step in steps:
            self.add_step(step)

    @classmethod
    def from_steps(cls, steps: Iterable[Step]) -> AgentStepGraph:
        """The graph that a message says, checked as a whole.

        Raises BadGraph.
        """
        graph = cls(
            AgentStep(each.agent_id, tuple(each.depends_on), each.step_index, each.estimated_tokens, each.is_optional)
            for each in steps
        )
        graph.validate_dag()
        graph._in_order()  # now, and not for many graphs at once, when somebody asks
        return graph

    def to_messages(self) -> list[Step]:
        """The steps as a message says them, in the order in which they were added."""
        return [
            Step(each.agent_id, each.step_index, list(each.depends_on), each.estimated_tokens, each.is_optional)
            for each in self._steps.values()
        ]

    def __iter__(self) -> Iterator[AgentStep]:
        return iter(self._steps.values())

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, agent_id: object) -> bool:
        """Whether the agent runs at any step, past ones too."""
        return agent_id in self._indices

    def size(self) -> int:
        """How many steps there are."""
        return len(self._steps)

    def add_step(self, step: AgentStep) -> None:
        """One step more.

        Raises BadGraph if the agent has a step of that index, or there are STEPS_MAX steps.
        """
        at = (step.agent_id, step.step_index)
        if at in self._steps:
            raise BadGraph(f"step_index = {step.step_index}: agent {step.agent_id!r} has that step already")
        if len(self._steps) >= STEPS_MAX:
            raise BadGraph(f"a step of agent {step.agent_id!r} over {STEPS_MAX} steps: register several workflows")
        self._steps[at] = step
        self._sorted = None
        insort(self._indices.setdefault(step.agent_id, []), step.step_index)

    def validate_dag(self) -> None:
        """Checks what no single step shows.

        Raises BadGraph, naming the agents, if there is no step at all, a dependency has no step in the graph, steps
        wait for each other in a circle, or a dependency first runs no earlier than a step that waits for it.
        """
        if not self._steps:
            raise BadGraph("a workflow without steps: add one")
        first = {agent: indices[0] for agent, indices in self._indices.items()}
        try:
            if all(
                max(map(first.__getitem__, step.depends_on), default=-1) < step.step_index
                for step in self._steps.values()
            ):
                return  # each waits for an earlier step only: there is no circle
        except KeyError:
            pass  # one has no step
        raise self._what_is_wrong()

    def _what_is_wrong(self) -> BadGraph:
        """With the dependencies, of which at least one has no step, or none that is early enough."""
        waits: dict[tuple[str, int], list[tuple[str, int]]] = {}
        late: BadGraph | None = None
        for at, step in self._steps.items():
            for agent in step.depends_on:
                indices = self._indices.get(agent)
                if indices is None:
                    return BadGraph(
                        f"depends_on: agent {step.agent_id!r} at step {step.step_index} depends on {agent!r}, "
                        "which has no step: add one"
                    )
                before = bisect_left(indices, step.step_index)
                if before == 0 and late is None:
                    late = BadGraph(
                        f"depends_on: agent {step.agent_id!r} at step {step.step_index} depends on {agent!r}, "
                        f"which first runs at step {indices[0]}: a dependency must run earlier"
                    )
                # It waits for the run just before its own, or for one that comes too late.
                waits.setdefault(at, []).append((agent, indices[max(before - 1, 0)]))
        assert late is not None
        # A circle has a late dependency too, but says more of what is wrong.
        try:
            TopologicalSorter(waits).prepare()
        except CycleError as error:
            circle = " waits for ".join(f"{agent!r} (step {index})" for agent, index in reversed(error.args[1]))
            return BadGraph(f"depends_on: a cycle: {circle}")
        return late

    def compute_steps_to_execution(self, agent_id: str, current_step: int) -> int | None:
        """How many steps after `current_step` the agent runs next; 0: it is running.

        None: never again, all its steps are past; also for an agent that is not in the graph (`in` tells them apart).
        """
        index = self._next_index(agent_id, current_step)
        return None if index is None else index - current_step

    def steps_to_execution(self, current_step: int) -> dict[str, int]:
        """`compute_steps_to_execution` of every agent that runs again, in one pass over the steps that are left."""
        steps = self._in_order()
        left = steps[bisect_left(steps, current_step, key=_step_index) :]
        return {step.agent_id: step.step_index - current_step for step in reversed(left)}  # the last one said stays

    def get_prefetch_candidates(self, current_step: int, lookahead: int) -> list[AgentStep]:
        """The next step of every agent that runs within `lookahead` steps and not now.

        Nearest first; of one distance, required ones before optional ones, then in order of addition.
        """
        steps = self._in_order()
        begin = bisect_left(steps, current_step + 1, key=_step_index)
        end = bisect_left(steps, current_step + lookahead + 1, begin, key=_step_index)
        return [step for step in steps[begin:end] if self._next_index(step.agent_id, current_step) == step.step_index]

    def get_eviction_priority_order(self, current_step: int) -> list[str]:
        """Every agent once; who can be spared most comes first.

        Finished agents, those longest finished first; then from the farthest to those that run now. Of one distance,
        optional ones before required ones, then in order of addition.
        """
        ranks: dict[str, tuple[bool, int, bool]] = {}
        for agent, indices in self._indices.items():
            index = self._next_index(agent, current_step)
            if index is None:
                step = self._steps[agent, indices[-1]]
                ranks[agent] = (False, step.step_index, not step.is_optional)
            else:
                ranks[agent] = (True, -index, not self._steps[agent, index].is_optional)
        return sorted(ranks, key=ranks.__getitem__)

    def get_step(self, agent_id: str, step_index: int | None = None) -> AgentStep | None:
        """The agent's step of that index, or its first one; None if there is none."""
        indices = self._indices.get(agent_id)
        if indices is None:
            return None
        return self._steps.get((agent_id, indices[0] if step_index is None else step_index))

    def get_all_agents(self) -> list[str]:
        """Every agent once, in order of first addition."""
        return list(self._indices)

    def check_invariants(self) -> None:
        """Asserts what the structures promise each other."""
        assert all(at == (step.agent_id, step.step_index) for at, step in self._steps.items())
        assert {(agent, index) for agent, indices in self._indices.items() for index in indices} == self._steps.keys()
        assert all(first < second for indices in self._indices.values() for first, second in pairwise(indices))
        assert len(self._steps) <= STEPS_MAX

    def _in_order(self) -> list[AgentStep]:
        """All steps by index; of one index, required ones first, then in order of the agents' addition."""
        if self._sorted is None:
            added = {agent: at for at, agent in enumerate(self._indices)}
            self._sorted = sorted(
                self._steps.values(), key=lambda step: (step.step_index, step.is_optional, added[step.agent_id])
            )
        return self._sorted

    def _next_index(self, agent_id: str, current_step: int) -> int | None:
        indices = self._indices.get(agent_id, ())
        at = bisect_left(indices, current_step)
        return indices[at] if at < len(indices) else None


def _step_index(step: AgentStep) -> int:
    return step.step_index


def _check_agents(field: str, given: Sequence[object]) -> None:
    # All at once, since a graph may name 64 times as many as it has steps; one by one only to say which is wrong.
    if given:
        try:
            "".join(given).encode()  # type: ignore[arg-type]
            lengths = set(map(len, given))  # type: ignore[arg-type]
            if min(lengths) >= 1 and max(lengths) <= AGENT_CHARS_MAX:
                return
        except (TypeError, UnicodeEncodeError):
            pass
    for agent in given:
        _check_agent(field, agent)


def _check_agent(field: str, given: object) -> None:
    if not isinstance(given, str):
        raise BadGraph(f"{field}: {given!r} is no agent; give its name, a text")
    if not 1 <= len(given) <= AGENT_CHARS_MAX:
        raise BadGraph(f"{field}: {given[:40]!r} has {len(given)} characters; 1 to {AGENT_CHARS_MAX} may be")
    try:
        given.encode()
    except UnicodeEncodeError:
        raise BadGraph(f"{field}: {given!r} is no text that can be sent: leave lone surrogates out") from None


def _check_number(field: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int):
        raise BadGraph(f"{field} = {given!r}: give a whole number")
    if not 0 <= given <= NUMBER_MAX:
        raise BadGraph(f"{field} = {given}: from 0 to {NUMBER_MAX} may be")
