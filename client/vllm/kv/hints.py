"""Hints of a request about its agent, and the turns of agents that follow from requests.

Owns: how a request names its agent and the agent's end, and which of an agent's requests begin and end its turn. Does
not own: what the replacement policy does about turns (the daemon), nor vLLM's own hints, which vLLM's connector obeys.

A request names its agent in its kv_transfer_params, by the keys below, or else by its session_id.

Invariants: an invalid hint is logged once of its kind and ignored, because a client's request must not end the engine.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

from ....errors import UsageError
from ....ipc.messages.schema import AGENT_NAME_CHARS_MAX
from ...arguments.checks import check_name

AGENT: Final = "tensord.agent"
AGENT_ENDS: Final = "tensord.agent_ends"
PARAMS: Final = "kv_transfer_params"
Turn = Literal["began", "turn_ended", "finished"]
_log = logging.getLogger("tensord")
_warned: set[str] = set()


class AgentHints(NamedTuple):
    """`agent`: the agent that the request's blocks belong to, "" for none. `ends`: the agent ends with the request."""

    agent: str = ""
    ends: bool = False


class AgentTurns:
    """The agents with requests in this engine. A turn lasts from the first request of an agent until no request of it
    is left. `report` receives each agent's name and new state."""

    def __init__(self, report: Callable[[str, Turn], None]) -> None:
        self._report = report
        self._running: Counter[str] = Counter()
        self._ending: set[str] = set()

    def begin(self, hints: AgentHints) -> None:
        """A request begins."""
        agent = hints.agent
        if agent:
            self._running[agent] += 1
            if self._running[agent] == 1:
                self._report(agent, "began")

    def end(self, hints: AgentHints) -> None:
        """A request of `begin` has ended."""
        agent = hints.agent
        if agent:
            if hints.ends:
                self._ending.add(agent)
            self._running[agent] -= 1
            if not self._running[agent]:
                del self._running[agent]
                self._report(agent, "finished" if agent in self._ending else "turn_ended")
                self._ending.discard(agent)


def hints_of(params: Any, session_id: Any) -> AgentHints:
    """The hints of a request. `params`, `session_id`: vLLM's kv_transfer_params and session_id."""
    given = params if isinstance(params, Mapping) else {}
    for name in given:
        if isinstance(name, str) and name.startswith("tensord.") and name not in (AGENT, AGENT_ENDS):
            _warn("unknown", f"{name[:40]!r} in {PARAMS} is unknown: the keys are {AGENT} and {AGENT_ENDS}")
    agent = _checked(f"{AGENT} in {PARAMS}", given.get(AGENT, ""))
    ends = given.get(AGENT_ENDS, False)
    if not isinstance(ends, bool):
        _warn(AGENT_ENDS, f"{AGENT_ENDS} in {PARAMS} is {str(ends)[:40]!r}: give true or false")
        ends = False
    elif ends and AGENT not in given:
        _warn("alone", f"{AGENT_ENDS} in {PARAMS} needs {AGENT} beside it")
    if not agent and session_id is not None:
        return AgentHints(_checked("session_id", session_id))
    return AgentHints(agent, ends)


def _checked(what: str, name: Any) -> str:
    """A name of an agent; "" if it is not valid."""
    try:
        check_name(what, name, AGENT_NAME_CHARS_MAX, least=0)
    except UsageError as error:
        _warn(what, str(error))
        return ""
    return str(name)


def _warn(kind: str, text: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        _log.warning("tensord: %s. Ignored, and not logged again", text)
