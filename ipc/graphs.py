"""Step graphs: the agents of a workflow and the steps at which they run.

The governor derives from a step graph how soon the entries of each agent are needed again.

Owns: the checks of a graph, and the order of agents as seen from a step. Does not own the current step of a workflow
(every query passes it), nor the choice of entries to evict.

An agent may run at several steps. Once all of its steps are past, the agent is finished. A further step at or after the
current one makes it needed again.

Invariants: a refused step has changed nothing; each (agent, step_index) exists once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import BadGraph, shown
from .messages.governance import STEPS_MAX, AgentStep


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
        self._agents: dict[str, int] = {}  # numbered in the order of their first addition
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
        return graph

    def __iter__(self) -> Iterator[AgentStep]:
        return iter(self._steps.values())

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, agent_id: object) -> bool:
        """True if the agent runs at any step, past steps included."""
        return agent_id in self._agents

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
            over = f"a step of agent {step.agent_id!r} would be over {STEPS_MAX} steps"
            raise BadGraph(f"{over}: register several workflows")
        self._steps[at] = step
        self._agents.setdefault(step.agent_id, len(self._agents))

    def validate_dag(self) -> None:
        """Checks the graph as a whole.

        Raises BadGraph, naming the agents, if the graph has no step, if a dependency has no step in the graph, or if a
        dependency first runs no earlier than a step that depends on it, as in each cycle.
        """
        if not self._steps:
            raise BadGraph("a workflow without steps: add one")
        first = {agent: step.step_index for agent, step in self._next_steps(0).items()}
        for step in self._steps.values():
            for agent in step.depends_on:
                begins = first.get(agent)
                if begins is not None and begins < step.step_index:
                    continue
                depends = f"depends_on: agent {step.agent_id!r} at step {step.step_index} depends on {agent!r}"
                if begins is None:
                    raise BadGraph(f"{depends}, which has no step: add one")
                raise BadGraph(f"{depends}, which first runs at step {begins}: a dependency must run earlier")

    def compute_steps_to_execution(self, agent_id: str, current_step: int) -> int | None:
        """How many steps after `current_step` the agent runs next. 0: it runs now.

        None: all of its steps are past, or the agent is not in the graph (`in` tells these two apart).
        """
        return self.steps_to_execution(current_step).get(agent_id)

    def steps_to_execution(self, current_step: int) -> dict[str, int]:
        """`compute_steps_to_execution` of every agent that runs now or later."""
        return {agent: step.step_index - current_step for agent, step in self._next_steps(current_step).items()}

    def get_prefetch_candidates(self, current_step: int, lookahead: int) -> list[AgentStep]:
        """The next step of every agent that does not run now and runs within `lookahead` steps.

        The nearest steps come first. At equal distance, required steps come before optional ones, then the order of
        addition decides.
        """
        ahead = [
            step
            for step in self._next_steps(current_step).values()
            if current_step < step.step_index <= current_step + lookahead
        ]
        return sorted(ahead, key=lambda step: (step.step_index, step.is_optional, self._agents[step.agent_id]))

    def get_all_agents(self) -> list[str]:
        """Every agent once, in the order of first addition."""
        return list(self._agents)

    def _next_steps(self, current_step: int) -> dict[str, AgentStep]:
        """The next step of every agent that runs at `current_step` or later."""
        found: dict[str, AgentStep] = {}
        for (agent, index), step in self._steps.items():
            if index >= current_step and (agent not in found or index < found[agent].step_index):
                found[agent] = step
        return found
