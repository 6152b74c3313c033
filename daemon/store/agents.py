"""Agents by small numbers, as the columns have them.

    name ─ shm.lanes.records.agent_number → what records say ─ `number` → 0, 2 … 65,535

Owns: the numbers. Does not own: what policies make of agents.

Invariant: a number stands for one agent, as long as fewer than AGENTS_MAX are known; later ones have number 0. 0 is no
agent, and 1 is never given out (daemon/replacement).
"""

from __future__ import annotations

from typing import Final

from ...shm.lanes.records import agent_number

AGENTS_MAX: Final = 1 << 16


class AgentNumbers:
    """The agents of one store. `numbers`: by what records say of them; 0 is there too."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {0: 0}
        self._names: dict[int, str] = {}
        self._next = 2

    def number(self, said: int) -> int:
        """The number of an agent, which is new or known; 0 once there are AGENTS_MAX."""
        number = self.numbers.get(said)
        if number is None:
            if self._next == AGENTS_MAX:
                return 0
            number = self.numbers[said] = self._next
            self._next += 1
        return number

    def named(self, name: str) -> int:
        """The number of the agent with this name, which is known by its name from now on."""
        number = self.number(agent_number(name))
        if number:
            self._names[number] = name
        return number

    def name(self, number: int) -> str:
        """The name of an agent; empty if none is known."""
        return self._names.get(number, "")
