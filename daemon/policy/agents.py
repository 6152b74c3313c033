"""The agents that entries belong to, as numbers with a state each.

An agent's number is a hash of its name, so that the table has a fixed size; two names may have one number. The state is
the last one that a client reported, or RUNNING.

Owns: the numbers, the states, and the rule which agent an entry belongs to. Does not own what follows from a state: the
hazards learn that. Invariant: the states of NO_AGENT and SHARED never change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from zlib import crc32

NO_AGENT, SHARED, RUNNING, FINISHED = 0, 1, 2, 5
"""States. The first two are also the numbers of entries without an agent, and of entries of several agents."""
_REPORTED: Final = {"tool_call": 3, "turn_ended": 4, "finished": FINISHED}
_NUMBERS: Final = 1 << 16
_KNOWN: Final = bytes(min(state, FINISHED) for state in range(256))
"""For `bytes.translate`: a state that no version has counts as FINISHED."""


class AgentStates:
    """`changed` is called after each change of a state."""

    def __init__(self, changed: Callable[[], object]) -> None:
        self.states = bytearray([RUNNING]) * _NUMBERS
        """The state of each number."""
        self.states[:RUNNING] = bytes((NO_AGENT, SHARED))
        self._changed = changed

    def report(self, name: str, state: str) -> None:
        """A client has reported the agent's state: "began", "tool_call", "turn_ended" or "finished".

        "began" ends the state "finished" and no other: the first uses of a turn are to count for the state in which the
        agent waited.
        """
        if state == "began":
            self._runs(number_of(name))
        else:
            self._set(number_of(name), _REPORTED[state])

    def after_use(self, number: int, name: str) -> int:
        """The agent of an entry of the agent `number` after a use by the agent `name`, which runs then.

        A put is no such use: it may have been sent before the agent was reported as finished.
        """
        found = joined(number, name)
        if name:
            self._runs(found)
        return found

    def learned(self) -> bytes:
        """All states, for `learn`."""
        return bytes(self.states)

    def learn(self, states: bytes) -> None:
        """Restores the states from `learned`.

        Raises:
            ValueError: `states` is not of this version.
        """
        if len(states) != _NUMBERS:
            raise ValueError(f"{len(states)} states of agents, and not {_NUMBERS}")
        self.states[RUNNING:] = states[RUNNING:].translate(_KNOWN)

    def _runs(self, number: int) -> None:
        if self.states[number] == FINISHED:
            self._set(number, RUNNING)

    def _set(self, number: int, state: int) -> None:
        if number > SHARED and self.states[number] != state:
            self.states[number] = state
            self._changed()


def number_of(name: str) -> int:
    """The number of the agent `name`; NO_AGENT for an empty name."""
    return RUNNING + crc32(name.encode()) % (_NUMBERS - RUNNING) if name else NO_AGENT


def joined(number: int, name: str) -> int:
    """The agent of an entry of the agent `number` that the agent `name` uses too: SHARED if they differ."""
    if not name or number == SHARED:
        return number
    agent = number_of(name)
    return agent if number in (NO_AGENT, agent) else SHARED
