"""A workflow: which agents run when, so that what is needed next stays, and what is far goes first.

Owns: one workflow's place, and saying it again to a new daemon. Does not own what the graph means (`ipc.steps`), nor
what follows from it. Without a daemon it goes on, and is told when there is one: an engine does not stand still for it.

Invariant: the step only rises.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any, Self

from ...errors import BadStep, TensordError, Unavailable
from ...ipc import messages
from ...ipc.governance import WORKFLOW_CHARS_MAX
from ...ipc.schema import NUMBER_MAX
from ...ipc.steps import AgentStepGraph
from .fields import check_count, check_name
from .governor import GovernorListener
from .link import SAY_S, Connected, Link

_log = logging.getLogger("tensord")


class Workflow:
    """One workflow of this client, from `Client.workflow` until `end`, or the end of its client.

    `step` is where it is, from 0. `error`: why the daemon does not know it, where that is so: None while it does.

    Example:
        >>> graph = tensord.AgentStepGraph([tensord.AgentStep("planner"), tensord.AgentStep("coder", ("planner",), 1)])
        >>> with cache.workflow("ticket-17", graph) as workflow:
        ...     workflow.advance(1, wait=True)                      # the planner's entries go first now
        ...     workflow.step
        1
    """

    def __init__(
        self, link: Link, governor: GovernorListener, name: str, graph: AgentStepGraph, timeout_s: float
    ) -> None:
        check_name("name", name, WORKFLOW_CHARS_MAX)
        graph.validate_dag()
        self.name = name
        self.step = 0
        self.error: TensordError | None = None
        self._link = link
        self._governor = governor
        self._graph = graph
        self._timeout_s = timeout_s
        self._ended = False
        governor.restore(self)
        try:
            self._register()
        except Unavailable as error:
            self.error = error
        except BaseException:
            governor.drop(self)
            raise

    @property
    def graph(self) -> AgentStepGraph:
        """Its steps."""
        return self._graph

    def advance(self, step: int, *, wait: bool = False) -> None:
        """The workflow is at `step` now. Says so and goes on; with `wait` only once the daemon has taken it in.

        Raises:
            UsageError: `step` is no step.
            BadStep: it is before the step that the workflow is at, or the workflow has ended; nothing has changed.
        """
        step = check_count("step", step, NUMBER_MAX)
        if self._ended:
            raise BadStep(f"workflow {self.name!r} has ended; make it again to run it again")
        if step < self.step:
            raise BadStep(f"workflow {self.name!r} is at step {self.step}, and step {step} is before it: only go on")
        self.step = step
        connected = self._link.connection
        if connected is None:
            return
        answer = self._say(connected, lambda number: messages.AdvanceWorkflow(number, self.name, step))
        if wait:
            try:
                self._link.answer(answer, self._timeout_s)
            except Unavailable as error:
                self.error = error

    def replace(self, graph: AgentStepGraph) -> None:
        """Other steps from now on, at the same place.

        Raises:
            BadGraph: they are no graph that can be run; the workflow goes on with those it has.
        """
        graph.validate_dag()
        before, self._graph = self._graph, graph
        try:
            self._register()
        except Unavailable as error:
            self.error = error
        except BaseException:
            self._graph = before
            raise

    def end(self) -> None:
        """The workflow is over. As long as others go on, those of its agents that are in none of them have finished."""
        if self._ended:
            return
        self._ended = True
        self._governor.drop(self)
        connected = self._link.connection
        if connected is not None:
            self._say(connected, lambda number: messages.EndWorkflow(number, self.name))

    def say_again(self, connected: Connected) -> None:
        """To a daemon that knows nothing of it."""
        self._say(connected, self._registration)
        if self.step:
            self._say(connected, lambda number: messages.AdvanceWorkflow(number, self.name, self.step))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _registration(self, number: int) -> messages.RegisterWorkflow:
        return messages.RegisterWorkflow(number, self.name, self._graph.to_messages())

    def _register(self) -> None:
        connected = self._link.connection
        if connected is None:
            raise self._link.unavailable()
        self._link.answer(self._say(connected, self._registration), self._timeout_s)

    def _say(self, connected: Connected, make: Any) -> Future[Any]:
        return self._link.ask(make, SAY_S, connected=connected, then=self._heard)

    def _heard(self, answer: Future[Any]) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        self.error = error if isinstance(error, TensordError) else None
        if error is not None and not isinstance(error, Unavailable):
            _log.warning("workflow %s: %s", self.name, error)
