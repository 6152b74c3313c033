"""Workflows: a client tells the daemon which agents run in which order. Entries of distant agents are evicted first.

Does not own: the meaning of the graph (`ipc.graphs`), nor the eviction (the daemon's).
Invariants: the step only rises. A workflow goes on without a daemon, so that an engine need not wait for one.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any, Self

from ...errors import BadGraph, BadStep, TensordError, Unavailable, shown, without_frames
from ...ipc.graphs import AgentStepGraph
from ...ipc.messages import control as messages
from ...ipc.messages.governance import WORKFLOW_CHARS_MAX
from ...ipc.messages.schema import NUMBER_MAX
from ..arguments.checks import check_count, check_name
from ..link.link import SAY_S, Connected, Link
from ..threads.of_process import OfThisProcess
from .modes import GovernorListener

_log = logging.getLogger("tensord")


class Workflow(OfThisProcess):
    """One workflow of this client, from `Client.workflow` until `end`, or until the client is closed.

    `graph`: the steps. `step`: the current one, from 0. `error`: why the daemon does not know the workflow; None if it
    does.

    Example:
        >>> graph = tensord.AgentStepGraph([tensord.AgentStep("planner"), tensord.AgentStep("coder", ("planner",), 1)])
        >>> with cache.workflow("ticket-17", graph) as workflow:
        ...     workflow.advance(1, wait=True)                      # the planner's entries are evicted first now
        ...     workflow.step
        1
    """

    _instead = "send its graph, and report the steps here"

    def __init__(
        self, link: Link, governor: GovernorListener, name: str, graph: AgentStepGraph, timeout_s: float
    ) -> None:
        check_name("name", name, WORKFLOW_CHARS_MAX)
        if not isinstance(graph, AgentStepGraph):
            raise BadGraph(f"graph is {shown(graph)}; it must be a tensord.AgentStepGraph of AgentSteps")
        graph.validate_dag()
        self.name = name
        self.step = 0
        self.error: TensordError | None = None
        self._link = link
        self._governor = governor
        self.graph = graph
        self._timeout_s = timeout_s
        self._ended = False
        governor.keep(self, self._register_again)
        try:
            self._tell(self._registration, wait=True)
        except BaseException:
            governor.keep(self, None)
            raise

    def advance(self, step: int, *, wait: bool = False) -> None:
        """Sets the current step and reports it. With `wait`, returns after the daemon has answered.

        Raises:
            UsageError: `step` is not a valid step number.
            BadStep: `step` is before the current step, or the workflow has ended; nothing changes.
        """
        step = check_count("step", step, NUMBER_MAX)
        if self._ended:
            raise BadStep(f"workflow {self.name!r} has ended; create it anew to run it again")
        if step < self.step:
            raise BadStep(f"workflow {self.name!r} is at step {self.step}; it cannot go back to step {step}")
        self.step = step
        self._tell(lambda number: messages.AdvanceWorkflow(number, self.name, step), wait=wait)

    def end(self) -> None:
        """Ends the workflow. While other workflows run, its agents that are in none of these count as finished."""
        if self._ended:
            return
        self._ended = True
        self._governor.keep(self, None)
        self._tell(lambda number: messages.EndWorkflow(number, self.name))

    def _register_again(self, connected: Connected) -> None:
        self._ask(connected, self._registration)
        if self.step:
            self._ask(connected, lambda number: messages.AdvanceWorkflow(number, self.name, self.step))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _registration(self, number: int) -> messages.RegisterWorkflow:
        return messages.RegisterWorkflow(number, self.name, list(self.graph))

    def _tell(self, make: Any, *, wait: bool = False) -> None:
        connected = self._link.attached
        if connected is None:
            self.error = self._link.unavailable()
            return
        answer = self._ask(connected, make)
        try:
            if wait:
                self._link.answers.wait(answer, self._timeout_s)
        except Unavailable as error:
            self.error = without_frames(error)

    def _ask(self, connected: Connected, make: Any) -> Future[Any]:
        return self._link.ask(make, SAY_S, connected=connected, then=self._answered)

    def _answered(self, answer: Future[Any]) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        self.error = error if isinstance(error, TensordError) else None
        if error is not None and not isinstance(error, Unavailable):
            _log.warning("the daemon refused a message of workflow %s: %s", self.name, error)
