"""Workflows: the steps of agents, the present step of each workflow, and so how soon an agent's entries are needed.

Owns workflows by name, each one client's, and what the store's replacement policy is told of agents. The properties of
a step graph are those of `ipc.graphs`.

The distance of an agent in several workflows is its smallest one. An agent that a graph never runs again is FINISHED.
One that is in no graph, or in none any more, is UNKNOWN: its entries are evicted before those of any agent that is
waited for.

Workflows may share agents. After a change of any workflow, the distances of all agents are computed at the next query,
in one pass over the steps of all workflows, of which there are `workflow_steps_max` at most.

Invariants: a workflow's step only rises. Every answer refers to the present steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

from ...errors import BadGraph, BadStep, LimitReached
from ...ipc.graphs import AgentStepGraph
from ...ipc.messages import control as messages
from ..forms.events import AGENTS_MAX, AgentsTurned
from .forms.limits import GovernorLimits
from .forms.outbox import GovernorOutbox

FINISHED: Final = 2e9
UNKNOWN: Final = 1e9
FARTHEST: Final = UNKNOWN - 1
"""The largest distance: a step further away counts as this far."""


@dataclass(slots=True)
class WorkflowProgress:
    """One client's step graph, and its present step."""

    client: int
    graph: AgentStepGraph
    step: int = 0


class Workflows:
    """All workflows by name."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox) -> None:
        self._limits = limits
        self._outbox = outbox
        self._workflows: dict[str, WorkflowProgress] = {}
        self._distances: dict[str, float] | None = {}  # of each agent in a graph; None after a change
        self._turned: dict[str, None] = {}  # agents whose steps have changed since `report`

    def __len__(self) -> int:
        return len(self._workflows)

    def register(self, client: int, message: messages.RegisterWorkflow, now: float) -> messages.Done:
        """Registers a workflow, or replaces the steps of this client's workflow, which stays at its present step.
        Raises BadGraph if the steps are no graph that can be run, or another client has the name; LimitReached if there
        are as many workflows, or steps of all workflows, as allowed."""
        name, steps, limits = message.workflow, message.steps, self._limits
        known = self._workflows.get(name)
        if known is not None and known.client != client:
            raise BadGraph(f"client {known.client} has a workflow {name!r}: choose another name, or end that one first")
        if known is None and len(self._workflows) >= limits.workflows_max:
            raise LimitReached(
                f"{len(self._workflows)} workflows, and {limits.workflows_max} may be (a fixed limit): end one first"
            )
        total = len(steps) + sum(len(each.graph) for each in self._workflows.values() if each is not known)
        if total > limits.workflow_steps_max:
            raise LimitReached(
                f"{len(steps)} steps, and all workflows' would be {total}; "
                f"{limits.workflow_steps_max} may be (a fixed limit): end a workflow first"
            )
        graph = AgentStepGraph.checked(steps)
        step = 0 if known is None else known.step
        self._workflows[name] = WorkflowProgress(client, graph, step)
        for each in (graph, known.graph) if known is not None else (graph,):
            self._turned.update(dict.fromkeys(each.get_all_agents()))
        self._changed(client, name, "registered", step=step)
        return messages.Done(message.id)

    def advance(self, client: int, message: messages.AdvanceWorkflow, now: float) -> messages.Done:
        """Sets the workflow's present step. Raises BadStep if this client has no such workflow, or it is at a later
        step."""
        name, step = message.workflow, message.step
        workflow = self._of_client(client, name)
        if step < workflow.step:
            raise BadStep(f"workflow {name!r} is at step {workflow.step}, and step {step} is earlier: steps must rise")
        past = (each.agent_id for each in workflow.graph if workflow.step <= each.step_index < step)
        self._turned.update(dict.fromkeys(past))
        workflow.step = step
        self._changed(client, name, "advanced", step=step)
        return messages.Done(message.id)

    def end(self, client: int, message: messages.EndWorkflow, now: float) -> messages.Done:
        """Ends the workflow. Raises BadStep if this client has no such workflow."""
        self._of_client(client, message.workflow)
        self._end(message.workflow)
        return messages.Done(message.id)

    def client_left(self, client: int) -> None:
        for name in [name for name, workflow in self._workflows.items() if workflow.client == client]:
            self._end(name)

    def report(self) -> None:
        """Tells the store's replacement policy of the agents whose steps have changed since the last call: which have
        no step left in any workflow, and which have one."""
        awaited = [agent for agent in self._turned if self.distance(agent) < UNKNOWN]
        finished = [agent for agent in self._turned if self.distance(agent) >= UNKNOWN]
        self._turned.clear()
        most = AGENTS_MAX // 2
        for at in range(0, max(len(finished), len(awaited)), most):
            self._outbox.add(AgentsTurned(finished[at : at + most], awaited[at : at + most]))

    def concerns(self, clients: Collection[int], agents: AbstractSet[str]) -> bool:
        """Whether one of these clients has registered a workflow, or a workflow contains one of these agents."""
        if not agents.isdisjoint(self._known().keys()):
            return True
        return any(workflow.client in clients for workflow in self._workflows.values())

    def distance(self, agent: str) -> float:
        """Steps until the agent runs in the workflow where it runs soonest; or FINISHED, or UNKNOWN."""
        return self._known().get(agent, UNKNOWN)

    def up_next(self, lookahead: int) -> Sequence[str]:
        """The agents that run within `lookahead` steps, the nearest first, each once."""
        agents = dict.fromkeys(
            step.agent_id
            for workflow in self._workflows.values()
            for step in workflow.graph.get_prefetch_candidates(workflow.step, lookahead)
        )
        return sorted(agents, key=self.distance)

    def status(self) -> list[dict[str, Any]]:
        """One row for each workflow; `agents` and `steps` are counts."""
        return [
            {
                "workflow": name,
                "client": workflow.client,
                "step": workflow.step,
                "agents": len(workflow.graph.get_all_agents()),
                "steps": len(workflow.graph),
            }
            for name, workflow in self._workflows.items()
        ]

    def _of_client(self, client: int, name: str) -> WorkflowProgress:
        workflow = self._workflows.get(name)
        if workflow is None or workflow.client != client:
            raise BadStep(f"this client has no workflow {name!r}: register it first")
        return workflow

    def _known(self) -> dict[str, float]:
        """The smallest distance of each agent in a graph."""
        if self._distances is None:
            self._distances = {}
            for workflow in self._workflows.values():
                ahead = workflow.graph.steps_to_execution(workflow.step)
                for agent in workflow.graph.get_all_agents():
                    distance = min(ahead[agent], FARTHEST) if agent in ahead else FINISHED
                    self._distances[agent] = min(self._distances.get(agent, FINISHED), float(distance))
        return self._distances

    def _end(self, name: str) -> None:
        workflow = self._workflows.pop(name)
        self._turned.update(dict.fromkeys(workflow.graph.get_all_agents()))
        self._changed(workflow.client, name, "ended")

    def _changed(self, client: int, name: str, change: str, **more: int) -> None:
        self._distances = None
        self._outbox.announce("workflow", client=client, workflow=name, change=change, **more)
