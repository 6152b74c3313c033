"""Hints of a request about its agent.

Owns: how a request names its agent and the agent's end. Does not own: what follows from it (scheduler.py), nor vLLM's
own hints, which vLLM's connector obeys.

A request names its agent in its kv_transfer_params, by the keys below, or else by its session_id.

Invariants: an invalid hint is logged once of its kind and ignored, because a client's request must not end the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ....errors import UsageError
from ....ipc.messages.schema import AGENT_NAME_CHARS_MAX
from ...arguments.checks import check_name

AGENT: Final = "tensord.agent"
AGENT_ENDS: Final = "tensord.agent_ends"
PARAMS: Final = "kv_transfer_params"
_log = logging.getLogger("tensord")
_warned: set[str] = set()


class AgentHints(NamedTuple):
    """`agent`: the agent that the request's blocks belong to, "" for none. `ends`: the agent ends with the request."""

    agent: str = ""
    ends: bool = False


def hints_of(params: Any, session_id: Any) -> AgentHints:
    """The hints of a request. `params`, `session_id`: vLLM's kv_transfer_params and session_id."""
    given = params if isinstance(params, Mapping) else {}
    for name in given:
        if isinstance(name, str) and name.startswith("tensord.") and name not in (AGENT, AGENT_ENDS):
            _warn("unknown", f"{name[:40]!r} in {PARAMS} is unknown: the keys are {AGENT} and {AGENT_ENDS}")
    agent = _checked(f"{AGENT} in {PARAMS}", given.get(AGENT, ""))
    ends = given.get(AGENT_ENDS, False)
    if not isinstance(ends, bool) or (ends and AGENT not in given):
        _warn(AGENT_ENDS, f"{AGENT_ENDS} in {PARAMS} is {str(ends)[:40]!r}: give true or false, beside {AGENT}")
        ends = False
    if not agent and session_id is not None:
        agent, ends = _checked("session_id", session_id), False
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
