"""Step graphs: the agents of a workflow and the steps at which they run.

The governor derives from a step graph how soon the entries of each agent are needed again.

Owns: a step and its form in a message, the checks of a step and of a graph, and the order of agents as seen from a
step. Does not own the current step of a workflow (every query passes it), nor the choice of entries to evict.

An agent may run at several steps. Once all of its steps are past, the agent is finished. A further step at or after the
current one makes it needed again.

Invariants: a refused step has changed nothing; each (agent, step_index) exists once; the step indices of an agent are
sorted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from ...errors import BadGraph, shown
from .schema import AGENT_NAME_CHARS_MAX, NUMBER_MAX, Count, Name

STEPS_MAX: Final = 1024
DEPENDENCIES_MAX: Final = 64

_FIELDS_ON_THE_WIRE: Final = {
    "agent_id": "agent",
    "step_index": "step",
    "depends_on": "after",
    "estimated_tokens": "tokens",
    "is_optional": "optional",
}
"""Short, because a message may have STEPS_MAX steps."""


class AgentStep(Struct, frozen=True, omit_defaults=True, rename=_FIELDS_ON_THE_WIRE):
    """One step of a workflow: the agent `agent_id` runs at `step_index`, after the agents in `depends_on`.

    `estimated_tokens`: the number of tokens that the agent will hold at this step; 0 if not known. `is_optional`: the
    workflow can continue without this step.

    Raises BadGraph, which names the field, its value and the accepted values.

    Example:
        >>> step = tensord.AgentStep("coder", depends_on=("planner",), step_index=1, estimated_tokens=4000)
        >>> step.step_index
        1
    """

    agent_id: Annotated[str, Meta(min_length=1, max_length=AGENT_NAME_CHARS_MAX)]
    depends_on: Annotated[tuple[Name, ...], Meta(max_length=DEPENDENCIES_MAX)] = ()
    step_index: Count = 0
    estimated_tokens: Count = 0
    is_optional: bool = False

    def __post_init__(self) -> None:
        _check_agent("agent_id", self.agent_id)
        if not isinstance(self.depends_on, tuple | list):
            raise BadGraph(f"depends_on = {shown(self.depends_on)}: give a tuple of agents")
        if len(self.depends_on) > DEPENDENCIES_MAX:
            raise BadGraph(f"depends_on of {len(self.depends_on)} agents; at most {DEPENDENCIES_MAX} may be named")
        _check_agents("depends_on", self.depends_on)
        force_setattr(self, "depends_on", tuple(self.depends_on))
        _check_number("step_index", self.step_index)
        _check_number("estimated_tokens", self.estimated_tokens)
        if not isinstance(self.is_optional, bool):
            raise BadGraph(f"is_optional = {shown(self.is_optional)}: give True or False")


class AgentStepGraph:
    """The steps of one workflow. Steps may be added in any order; `validate_dag` checks the whole graph.

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
        if not isinstance(steps, Iterable):
            raise BadGraph(f"steps is {shown(steps)}: give AgentSteps")
        for step in steps:
            self.add_step(step)

    @classmethod
    def checked(cls, steps: Iterable[AgentStep]) -> AgentStepGraph:
        """The graph of these steps, checked as a whole.

        Raises BadGraph.
        """
        graph = cls(steps)
        graph.validate_dag()
        graph._in_order()  # sort now: a later query may need the order of many graphs at once
        return graph

    def __iter__(self) -> Iterator[AgentStep]:
        return iter(self._steps.values())

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, agent_id: object) -> bool:
        """True if the agent runs at any step, past steps included."""
        return agent_id in self._indices

    def add_step(self, step: AgentStep) -> None:
        """Adds a step.

        Raises BadGraph if it is no AgentStep, if the agent already has a step with that index, or if the graph has
        STEPS_MAX steps.
        """
        if not isinstance(step, AgentStep):
            raise BadGraph(f"a step is {shown(step)}: give an AgentStep")
        at = (step.agent_id, step.step_index)
        if at in self._steps:
            raise BadGraph(f"step_index = {step.step_index}: agent {step.agent_id!r} has that step already")
        if len(self._steps) >= STEPS_MAX:
            raise BadGraph(
                f"a step of agent {step.agent_id!r} would be over {STEPS_MAX} steps: register several workflows"
            )
        self._steps[at] = step
        self._sorted = None
        insort(self._indices.setdefault(step.agent_id, []), step.step_index)

    def validate_dag(self) -> None:
        """Checks the graph as a whole.

        Raises BadGraph, naming the agents, if the graph has no step, if a dependency has no step in the graph, if the
        dependencies form a cycle, or if a dependency first runs no earlier than a step that depends on it.
        """
        if not self._steps:
            raise BadGraph("a workflow without steps: add one")
        first = {agent: indices[0] for agent, indices in self._indices.items()}
        try:
            if all(
                max(map(first.__getitem__, step.depends_on), default=-1) < step.step_index
                for step in self._steps.values()
            ):
                return  # every dependency runs earlier: there is no cycle
        except KeyError:
            pass  # a dependency has no step
        raise self._dependency_error()

    def _dependency_error(self) -> BadGraph:
        """The error of a graph in which some dependency has no step, or no step that is early enough."""
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
                # The step waits for the latest earlier run of the dependency, or for its first run, which is too late.
                waits.setdefault(at, []).append((agent, indices[max(before - 1, 0)]))
        assert late is not None
        # A cycle has a late dependency too. Naming the whole cycle helps more.
        try:
            TopologicalSorter(waits).prepare()
        except CycleError as error:
            cycle = " waits for ".join(f"{agent!r} (step {index})" for agent, index in reversed(error.args[1]))
            return BadGraph(f"depends_on: a cycle: {cycle}")
        return late

    def compute_steps_to_execution(self, agent_id: str, current_step: int) -> int | None:
        """How many steps after `current_step` the agent runs next. 0: it runs now.

        None: all of its steps are past, or the agent is not in the graph (`in` tells these two apart).
        """
        index = self._next_index(agent_id, current_step)
        return None if index is None else index - current_step

    def steps_to_execution(self, current_step: int) -> dict[str, int]:
        """`compute_steps_to_execution` of every agent that runs now or later, in one pass over the remaining steps."""
        steps = self._in_order()
        left = steps[bisect_left(steps, current_step, key=_step_index) :]
        # In reverse order: an agent's nearest step is written last, and overwrites the later ones.
        return {step.agent_id: step.step_index - current_step for step in reversed(left)}

    def get_prefetch_candidates(self, current_step: int, lookahead: int) -> list[AgentStep]:
        """The next step of every agent that does not run now and runs within `lookahead` steps.

        The nearest steps come first. At equal distance, required steps come before optional ones, then the order of
        addition decides.
        """
        steps = self._in_order()
        begin = bisect_left(steps, current_step + 1, key=_step_index)
        end = bisect_left(steps, current_step + lookahead + 1, begin, key=_step_index)
        return [step for step in steps[begin:end] if self._next_index(step.agent_id, current_step) == step.step_index]

    def get_all_agents(self) -> list[str]:
        """Every agent once, in the order of first addition."""
        return list(self._indices)

    def check_invariants(self) -> None:
        """Asserts that the internal structures agree with each other."""
        assert all(at == (step.agent_id, step.step_index) for at, step in self._steps.items())
        assert {(agent, index) for agent, indices in self._indices.items() for index in indices} == self._steps.keys()
        assert all(first < second for indices in self._indices.values() for first, second in pairwise(indices))
        assert len(self._steps) <= STEPS_MAX

    def _in_order(self) -> list[AgentStep]:
        """All steps by index. At equal index, required steps first, then in the order of the agents' addition."""
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
    # All at once, because a graph may name 64 agents per step. One by one only to find the wrong one.
    if given:
        try:
            "".join(given).encode()  # type: ignore[arg-type]
            lengths = set(map(len, given))  # type: ignore[arg-type]
            if min(lengths) >= 1 and max(lengths) <= AGENT_NAME_CHARS_MAX:
                return
        except (TypeError, UnicodeEncodeError):
            pass
    for agent in given:
        _check_agent(field, agent)


def _check_agent(field: str, given: object) -> None:
    if not isinstance(given, str):
        raise BadGraph(f"{field}: {shown(given)} is not an agent's name: give a string")
    if not 1 <= len(given) <= AGENT_NAME_CHARS_MAX:
        raise BadGraph(f"{field}: {given[:40]!r} has {len(given)} characters: give 1 to {AGENT_NAME_CHARS_MAX}")
    try:
        given.encode()
    except UnicodeEncodeError:
        raise BadGraph(f"{field}: {shown(given)} has lone surrogates, which cannot be sent: leave them out") from None


def _check_number(field: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int):
        raise BadGraph(f"{field} = {shown(given)}: give a whole number")
    if not 0 <= given <= NUMBER_MAX:
        raise BadGraph(f"{field} = {shown(given)}: give a number from 0 to {NUMBER_MAX}")
