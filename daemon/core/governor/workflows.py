"""Workflows: who runs which steps, how far each is, and so how soon an agent's entries are needed again.

Owns: workflows by name, each one client's; agents of those that ended. Does not own what follows from a distance
(ranking), nor what a step graph says of one step (`ipc.steps`).

An agent in several workflows is as near as in the nearest of them. One that is in a graph and never again needed is
FINISHED; so is one of a workflow that ended, as long as others go on, and until it is registered again: its entries
are the first that nobody waits for. With no workflow at all, nothing is known of anybody.

Invariants: a workflow's step only rises. Distances are of the current steps: they are reckoned anew after each change,
which `version` counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ....errors import BadGraph, BadStep, LimitReached
from ....ipc import messages
from ....ipc.steps import AgentStepGraph

FINISHED: Final = 2e9
UNKNOWN: Final = 1e9
FARTHEST: Final = UNKNOWN - 1
"""A step further away than this counts as this far."""
ENDED_AGENTS_MAX: Final = 65_536
"""Agents of ended workflows that are remembered; the first to have ended are forgotten, and are unknown then."""


@dataclass(slots=True)
class Workflow:
    """One client's steps, and how far it is."""

    client: int
    graph: AgentStepGraph
    agents: frozenset[str]
    step: int = 0


class Workflows:
    """All workflows by name. Also the outlook that entries are ranked by."""

    def __init__(self, workflows_max: int) -> None:
        self.version = 0
        self._workflows_max = workflows_max
        self._workflows: dict[str, Workflow] = {}
        self._of_agent: dict[str, set[str]] = {}
        self._ended: dict[str, None] = {}
        self._distances: dict[str, float] = {}
        self._up_next: dict[int, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._workflows)

    def change_limits(self, workflows_max: int) -> None:
        """For workflows registered from now on."""
        self._workflows_max = workflows_max

    def register(self, client: int, name: str, steps: Iterable[messages.Step]) -> int:
        """Steps of a new workflow, or other ones for one that this client has, which keeps its place.

        Returns:
            The step that it is at.

        Raises:
            BadGraph: the steps are no graph that can be run, or the name is another client's.
            LimitReached: there are as many workflows as there may be; workflows_max is named.
        """
        known = self._workflows.get(name)
        if known is not None and known.client != client:
            raise BadGraph(f"workflow {name!r} is client {known.client}'s: choose another name, or let that one end it")
        if known is None and len(self._workflows) >= self._workflows_max:
            raise LimitReached(
                f"{len(self._workflows)} workflows, and workflows_max is {self._workflows_max}: "
                "end one first, or raise it"
            )
        graph = AgentStepGraph.from_steps(steps)
        agents = frozenset(graph.get_all_agents())
        if known is not None:
            self._leave(name, known)
        step = 0 if known is None else known.step
        self._workflows[name] = Workflow(client, graph, agents, step)
        for agent in agents:
            self._of_agent.setdefault(agent, set()).add(name)
            self._ended.pop(agent, None)
        self._changed()
        return step

    def advance(self, client: int, name: str, step: int) -> None:
        """The workflow is at `step` now.

        Raises:
            BadStep: this client has no such workflow, or it is further already.
        """
        workflow = self._of_client(client, name)
        if step < workflow.step:
            raise BadStep(f"workflow {name!r} is at step {workflow.step}, and step {step} is before it: only go on")
        if step > workflow.step:
            workflow.step = step
            self._changed()

    def end(self, client: int, name: str) -> None:
        """The workflow is over.

        Raises:
            BadStep: this client has no such workflow.
        """
        self._of_client(client, name)
        self._end(name)

    def client_left(self, client: int) -> list[str]:
        """All of its workflows are over; their names."""
        names = [name for name, workflow in self._workflows.items() if workflow.client == client]
        for name in names:
            self._end(name)
        return names

    def distance(self, agent: str) -> float:
        """Steps until the agent runs, in the workflow where it runs soonest; or FINISHED, or UNKNOWN."""
        found = self._distances.get(agent)
        if found is None:
            found = self._reckoned(agent)
            if found != UNKNOWN:
                # Any client may name agents that are in no graph: those are not worth the room.
                self._distances[agent] = found
        return found

    def up_next(self, lookahead: int) -> Sequence[str]:
        """Agents that run within `lookahead` steps, the nearest first, each once."""
        found = self._up_next.get(lookahead)
        if found is None:
            agents = {
                step.agent_id: None
                for workflow in self._workflows.values()
                for step in workflow.graph.get_prefetch_candidates(workflow.step, lookahead)
            }
            found = self._up_next[lookahead] = tuple(sorted(agents, key=self.distance))
        return found

    def status(self) -> list[dict[str, Any]]:
        """One row a workflow; `agents` and `steps` are counts."""
        return [
            {
                "workflow": name,
                "client": workflow.client,
                "step": workflow.step,
                "agents": len(workflow.agents),
                "steps": workflow.graph.size(),
            }
            for name, workflow in self._workflows.items()
        ]

    def check_invariants(self) -> None:
        """Asserts that the tables by agent are those of the workflows."""
        of_agent: dict[str, set[str]] = {}
        for name, workflow in self._workflows.items():
            assert workflow.agents == frozenset(workflow.graph.get_all_agents())
            for agent in workflow.agents:
                of_agent.setdefault(agent, set()).add(name)
        assert of_agent == self._of_agent
        assert not (self._ended.keys() & of_agent.keys()), "an agent that ended is in a graph"
        assert len(self._ended) <= ENDED_AGENTS_MAX
        assert self._workflows or not (self._ended or self._distances or any(self._up_next.values()))
        for agent, distance in self._distances.items():
            assert distance == self._reckoned(agent), "a distance of a former step"

    def _of_client(self, client: int, name: str) -> Workflow:
        workflow = self._workflows.get(name)
        if workflow is None or workflow.client != client:
            raise BadStep(f"this client has no workflow {name!r}: register it first")
        return workflow

    def _reckoned(self, agent: str) -> float:
        names = self._of_agent.get(agent)
        if not names:
            return FINISHED if agent in self._ended else UNKNOWN
        steps = [w.graph.compute_steps_to_execution(agent, w.step) for w in map(self._workflows.__getitem__, names)]
        nearest = min((distance for distance in steps if distance is not None), default=None)
        return FINISHED if nearest is None else min(float(nearest), FARTHEST)

    def _end(self, name: str) -> None:
        self._leave(name, self._workflows.pop(name))
        if not self._workflows:
            self._ended.clear()
        self._changed()

    def _leave(self, name: str, workflow: Workflow) -> None:
        """Agents that are in no graph any more have ended."""
        for agent in sorted(workflow.agents):
            names = self._of_agent[agent]
            names.discard(name)
            if not names:
                del self._of_agent[agent]
                self._ended.pop(agent, None)
                self._ended[agent] = None
        while len(self._ended) > ENDED_AGENTS_MAX:
            del self._ended[next(iter(self._ended))]

    def _changed(self) -> None:
        self.version += 1
        self._distances.clear()
        self._up_next.clear()
