"""Workflows: the steps of agents, the present step of each workflow, and so how soon an agent's entries are needed.

Owns workflows by name, each one client's, and the agents of ended workflows. Does not own what follows from a distance
(ranking), nor a step graph's properties (`ipc.steps`).

The distance of an agent in several workflows is its smallest one. An agent that a graph never runs again is FINISHED.
So is an agent of an ended workflow, while other workflows exist and until it is registered again: its entries are
evicted before those of any agent that is waited for. Without any workflow, every agent is UNKNOWN.

Workflows may share agents. Each agent therefore has a distance in each of its workflows. After a change of one
workflow, its distances are computed at the next query, in one pass over its own steps only.

Invariants: a workflow's step only rises. Every answer refers to the present steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

from ....errors import BadGraph, BadStep, LimitReached
from ....ipc.messages import control as messages
from ....ipc.messages.steps import AgentStepGraph
from ...core.events import AGENTS_MAX, AgentsTurned

FINISHED: Final = 2e9
UNKNOWN: Final = 1e9
FARTHEST: Final = UNKNOWN - 1
"""The largest distance: a step further away counts as this far."""
ENDED_AGENTS_MAX: Final = 65_536
"""Agents of ended workflows that are remembered. The earliest ended are forgotten, and are UNKNOWN then."""


@dataclass(slots=True)
class WorkflowProgress:
    """One client's step graph, and its present step."""

    client: int
    graph: AgentStepGraph
    agents: tuple[str, ...]
    """Each once, sorted."""
    step: int = 0


class Workflows:
    """All workflows by name. They are also the outlook by which entries are ranked."""

    def __init__(self, workflows_max: int, workflow_steps_max: int) -> None:
        self._workflows_max = workflows_max
        self._workflow_steps_max = workflow_steps_max
        self._workflows: dict[str, WorkflowProgress] = {}
        self._steps = 0  # of all workflows together
        self._of_agent: dict[str, dict[str, float]] = {}  # an agent's distance in each of its workflows
        self._outdated: dict[str, None] = {}  # workflows whose distances are outdated
        self._ended: dict[str, None] = {}
        self._distances: dict[str, float] = {}  # the smallest distance of each agent that was asked for
        self._up_next: dict[int, tuple[str, ...]] = {}
        self._turned: dict[str, None] = {}  # agents whose steps have changed since `take_turned`

    def __len__(self) -> int:
        return len(self._workflows)

    def register(self, client: int, name: str, steps: Sequence[messages.Step]) -> int:
        """Registers a workflow, or replaces the steps of this client's workflow, which stays at its present step.

        Returns:
            The present step.

        Raises:
            BadGraph: the steps are no graph that can be run, or another client has the name.
            LimitReached: there are as many workflows, or steps of all workflows, as allowed; the text names the limit.
        """
        known = self._workflows.get(name)
        if known is not None and known.client != client:
            raise BadGraph(f"client {known.client} has a workflow {name!r}: choose another name, or end that one first")
        if known is None and len(self._workflows) >= self._workflows_max:
            raise LimitReached(
                f"{len(self._workflows)} workflows, and {self._workflows_max} may be (a fixed limit): end one first"
            )
        more = len(steps) - (0 if known is None else known.graph.size())
        if more > 0 and self._steps + more > self._workflow_steps_max:
            raise LimitReached(
                f"{len(steps)} steps, and all workflows' would be {self._steps + more}; "
                f"{self._workflow_steps_max} may be (a fixed limit): end a workflow first"
            )
        graph = AgentStepGraph.from_steps(steps)
        agents = tuple(sorted(graph.get_all_agents()))
        if known is not None:
            self._leave(name, known)
        step = 0 if known is None else known.step
        self._workflows[name] = WorkflowProgress(client, graph, agents, step)
        self._steps += graph.size()
        for agent in agents:
            self._of_agent.setdefault(agent, {})[name] = FINISHED
            self._ended.pop(agent, None)
            self._turned[agent] = None
        self._outdated[name] = None
        self._changed()
        return step

    def advance(self, client: int, name: str, step: int) -> None:
        """Sets the workflow's present step.

        Raises:
            BadStep: this client has no such workflow, or it is at a later step.
        """
        workflow = self._of_client(client, name)
        if step < workflow.step:
            raise BadStep(f"workflow {name!r} is at step {workflow.step}, and step {step} is earlier: steps must rise")
        if step > workflow.step:
            past = (each.agent_id for each in workflow.graph if workflow.step <= each.step_index < step)
            self._turned.update(dict.fromkeys(past))
            workflow.step = step
            self._outdated[name] = None
            self._changed()

    def end(self, client: int, name: str) -> None:
        """Ends the workflow.

        Raises:
            BadStep: this client has no such workflow.
        """
        self._of_client(client, name)
        self._end(name)

    def client_left(self, client: int) -> list[str]:
        """Ends all workflows of the client; their names."""
        names = [name for name, workflow in self._workflows.items() if workflow.client == client]
        for name in names:
            self._end(name)
        return names

    def concerns(self, clients: Collection[int], agents: AbstractSet[str]) -> bool:
        """Whether one of these clients has registered a workflow, or a workflow contains one of these agents."""
        if not agents.isdisjoint(self._of_agent.keys()):
            return True
        return any(workflow.client in clients for workflow in self._workflows.values())

    def distance(self, agent: str) -> float:
        """Steps until the agent runs in the workflow where it runs soonest; or FINISHED, or UNKNOWN."""
        if self._outdated:
            self._update_distances()
        found = self._distances.get(agent)
        if found is not None:
            return found
        distances = self._of_agent.get(agent)
        if distances:
            found = self._distances[agent] = min(distances.values())
            return found
        return FINISHED if agent in self._ended else UNKNOWN

    def up_next(self, lookahead: int) -> Sequence[str]:
        """The agents that run within `lookahead` steps, the nearest first, each once."""
        found = self._up_next.get(lookahead)
        if found is None:
            agents = {
                step.agent_id: None
                for workflow in self._workflows.values()
                for step in workflow.graph.get_prefetch_candidates(workflow.step, lookahead)
            }
            found = self._up_next[lookahead] = tuple(sorted(agents, key=self.distance))
        return found

    def take_turned(self) -> list[AgentsTurned]:
        """The agents whose steps have changed since the last call, by whether a step of them is left in any workflow.
        Agents that no workflow knows any more are left out."""
        finished: list[str] = []
        awaited: list[str] = []
        for agent in self._turned:
            distance = self.distance(agent)
            if distance != UNKNOWN:
                (finished if distance == FINISHED else awaited).append(agent)
        self._turned.clear()
        parts = [AgentsTurned(finished[at : at + AGENTS_MAX]) for at in range(0, len(finished), AGENTS_MAX)]
        return parts + [AgentsTurned((), awaited[at : at + AGENTS_MAX]) for at in range(0, len(awaited), AGENTS_MAX)]

    def status(self) -> list[dict[str, Any]]:
        """One row for each workflow; `agents` and `steps` are counts."""
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
        self._update_distances()
        of_agent: dict[str, dict[str, float]] = {}
        for name, workflow in self._workflows.items():
            workflow.graph.check_invariants()
            assert list(workflow.agents) == sorted(workflow.graph.get_all_agents())
            for agent in workflow.agents:
                steps = workflow.graph.compute_steps_to_execution(agent, workflow.step)
                of_agent.setdefault(agent, {})[name] = FINISHED if steps is None else min(float(steps), FARTHEST)
        assert of_agent == self._of_agent, "a distance of a former step"
        assert self._steps == sum(workflow.graph.size() for workflow in self._workflows.values())
        assert not (self._ended.keys() & of_agent.keys()), "an agent that ended is in a graph"
        assert len(self._ended) <= ENDED_AGENTS_MAX
        assert self._workflows or not (self._ended or self._distances or any(self._up_next.values()))
        for agent, distance in self._distances.items():
            assert distance == min(of_agent[agent].values()), "not the nearest"

    def _of_client(self, client: int, name: str) -> WorkflowProgress:
        workflow = self._workflows.get(name)
        if workflow is None or workflow.client != client:
            raise BadStep(f"this client has no workflow {name!r}: register it first")
        return workflow

    def _update_distances(self) -> None:
        """Computes the distances of changed workflows."""
        for name in self._outdated:
            workflow = self._workflows[name]
            ahead = workflow.graph.steps_to_execution(workflow.step)
            for agent in workflow.agents:
                steps = ahead.get(agent)
                distance = FINISHED if steps is None else FARTHEST if steps > FARTHEST else float(steps)
                distances = self._of_agent[agent]
                former, distances[name] = distances[name], distance
                nearest = self._distances.get(agent)
                if nearest is None:
                    continue
                if distance <= nearest:
                    self._distances[agent] = distance
                elif former == nearest:
                    del self._distances[agent]  # its distance grew: another workflow may be the nearest now
        self._outdated.clear()

    def _end(self, name: str) -> None:
        self._leave(name, self._workflows.pop(name))
        if not self._workflows:
            self._ended.clear()
        self._changed()

    def _leave(self, name: str, workflow: WorkflowProgress) -> None:
        """Removes a workflow from the tables by agent. Agents that are in no other graph have ended."""
        self._steps -= workflow.graph.size()
        self._outdated.pop(name, None)
        for agent in workflow.agents:
            self._turned[agent] = None
            distances = self._of_agent[agent]
            if distances.pop(name) == self._distances.get(agent):
                del self._distances[agent]
            if not distances:
                del self._of_agent[agent]
                self._ended[agent] = None
        while len(self._ended) > ENDED_AGENTS_MAX:
            del self._ended[next(iter(self._ended))]

    def _changed(self) -> None:
        self._up_next.clear()
