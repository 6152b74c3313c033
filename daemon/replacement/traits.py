"""What is known of an entry besides its age: the traits that form the learned policy's classes, agents, and costs.

The traits are: how often the entry was used, its depth in its sequence, and the time without a use before its last use.
Together they are one number below TRAITS. The state of an agent is the last one that a client reported, or RUNNING.

The cost of an entry is the milliseconds that its put reported. Without them it is the put's tokens times the recent
milliseconds per token. Without tokens it is the mean cost of other entries.

Owns: the encoding of traits and states, their words, and the rule which agent an entry belongs to; which class of the
hazards has which of them; the recent costs. Does not own what follows from them: the hazards learn that. Invariant: the
states of NO_AGENT and SHARED never change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from .hazards import Hazards
from .known import Array, Turn

OFTEN_MAX: Final = 4
"""The highest class of uses: all entries with 2 ** (OFTEN_MAX - 1) or more uses after the put."""
FAR: Final = 8
"""The depth from which all blocks of a sequence are in one class."""
GAPS: Final = 8
"""The number of classes of times without a use."""
TRAITS: Final = (OFTEN_MAX + 1) * 3 * GAPS
"""The number of combinations."""
NO_AGENT, SHARED, RUNNING, FINISHED = 0, 1, 2, 5
"""States. The first two are also the numbers of entries without an agent, and of entries of several agents."""
CLASSES_MAX: Final = (FINISHED + 1) * (TRAITS + OFTEN_MAX + 1) + 1
"""Of all traits and states, of all numbers of uses and states, and of all rows."""
FINISHED_ODDS: Final = 0.05
"""The odds of a further use for rows of a finished agent, relative to others, before enough is learned."""
AGENTS: Final = 1 << 16
COST_DECAY: Final = 0.999
"""The weight of the earlier costs after a new one."""
_REPORTED: Final = {"tool_call": 3, "turn_ended": 4, "finished": FINISHED}
_OFTEN: Final = np.array([0, *((uses - 1).bit_length() for uses in range(1, 2 ** (OFTEN_MAX - 1) + 2))])
_AGENT: Final = (
    "",
    "used by several agents",
    "its agent runs",
    "its agent waits for a tool",
    "its agent's turn has ended",
    "its agent has finished",
)


def often(uses: Array) -> Array:
    """The classes of numbers of uses, the put included. Classes are powers of two; 0: the put only."""
    found: Array = _OFTEN[np.minimum(uses, len(_OFTEN) - 1)]
    return found


def deep(depths: Array) -> Array:
    """The classes of depths: 0 none, 1 near, 2 far."""
    return np.minimum(depths, 1).astype(np.int64) + (depths >= FAR)


def gaps(unused: Array) -> Array:
    """The classes of times without a use, in mean pauses. Classes are powers of eight."""
    bits = np.frexp(np.floor(unused * 20))[1]
    found: Array = np.minimum((bits + 2) // 3, GAPS - 1)
    return found


def traits(often: Array, deep: Array, gap: Array) -> Array:
    """Three classes as one number."""
    found: Array = (often * 3 + deep) * GAPS + gap
    return found


def words(of: int, state: int) -> tuple[str, ...]:
    """Traits and the state of the entry's agent, in words."""
    uses, depth = of // (3 * GAPS), ("", "near the start of its sequence", "far into its sequence")[of // GAPS % 3]
    low = 1 << max(uses - 1, 0)
    times = (
        ("not used since it was put", "used once")[uses]
        if uses < 2
        else f"used {low} times or more"
        if uses == OFTEN_MAX
        else f"used {low} to {2 * low - 1} times"
    )
    return tuple(word for word in (times, depth, _AGENT[state]) if word)


def joined(before: Array, agents: Array) -> Array:
    """The agents of entries that other agents use too: SHARED where they differ."""
    own = (agents == NO_AGENT) | (before == SHARED) | (before == agents)
    return np.where(own, before, np.where(before == NO_AGENT, agents, SHARED))


class Classes:
    """The states of all agents, by their numbers, and the classes of the hazards, by traits and state."""

    def __init__(self, hazards: Hazards) -> None:
        self.hazards = hazards
        self._numbers = np.full((FINISHED + 1, TRAITS), -1, np.int64)
        self.states = np.full(AGENTS, RUNNING, np.uint8)
        self.states[:RUNNING] = NO_AGENT, SHARED

    def of(self, of: Array, agents: Array) -> Array:
        """The numbers of the classes of some traits and agents."""
        states = self.states[agents]
        numbers = self._numbers[states, of]
        if len(numbers) and numbers.min() < 0:
            for trait, state in {*zip(of[numbers < 0].tolist(), states[numbers < 0].tolist(), strict=True)}:
                self.number(trait, state)
            numbers = self._numbers[states, of]
        return numbers

    def number(self, of: int, state: int) -> None:
        """Numbers the class of the traits `of` and the agent's state. The gap is part of the class only for entries
        with an agent: there it tells a loop from a single visit."""
        more = of % (3 * GAPS) if state else of % (3 * GAPS) // GAPS * GAPS
        odds = FINISHED_ODDS if state == FINISHED else 1.0
        self._numbers[state, of] = self.hazards.number(of // (3 * GAPS), state, more, odds)

    def learn(self, classes: Sequence[tuple[Sequence[int], bytes]]) -> None:
        """Restores what the hazards have counted (`Hazards.counts`). Raises ValueError or TypeError."""
        for name, _ in classes:
            if len(name) == 3:
                uses, state, more = name
                if not (0 <= uses <= OFTEN_MAX and 0 <= state <= FINISHED and 0 <= more < 3 * GAPS):
                    raise ValueError("an impossible class")
                self.number(uses * 3 * GAPS + more, state)
        for name, counts in classes:
            self.hazards.learn(tuple(name), counts)

    def report(self, agent: int, state: Turn) -> bool:
        """A client has reported the agent's state. Returns whether it changed.

        "began" ends the state "finished" and no other: the first uses of a turn are to count for the state in which the
        agent waited.
        """
        before = int(self.states[agent])
        now = _REPORTED.get(state, RUNNING if before == FINISHED else before)
        if agent <= SHARED or now == before:
            return False
        self.states[agent] = now
        return True

    def run(self, agents: Array) -> bool:
        """These agents used something: those that have finished run again. Returns whether one had."""
        finished = agents[self.states[agents] == FINISHED]
        self.states[finished] = RUNNING
        return bool(len(finished))

    def restore(self, states: bytes) -> None:
        """Restores the states of an earlier daemon. Raises ValueError if they are not of this version."""
        if len(states) != AGENTS:
            raise ValueError(f"{len(states)} states of agents, and not {AGENTS}")
        # A state that no version has counts as FINISHED.
        self.states[RUNNING:] = np.minimum(np.frombuffer(states, np.uint8)[RUNNING:], FINISHED)


class Costs:
    """The costs of entries, per byte."""

    def __init__(self) -> None:
        self._reported_ms, self._reported_tokens, self._mean_cost = 0.0, 0.0, 0.0

    def learned(self) -> list[float]:
        """The state, for `learn`."""
        return [self._reported_ms, self._reported_tokens, self._mean_cost]

    def learn(self, state: Iterable[float]) -> None:
        """Restores the state from `learned`. Raises ValueError or TypeError."""
        self._reported_ms, self._reported_tokens, self._mean_cost = map(float, state)

    def weights(self, sizes: Array, costs: Array, tokens: Array) -> Array:
        """The costs of entries divided by their bytes, as estimated before these; reported costs update the
        estimates."""
        found = costs.astype(np.float64)
        counted = tokens > 0
        if counted.any():
            rate = self._reported_ms / self._reported_tokens if self._reported_tokens else 1.0
            reported = np.flatnonzero((found > 0) & counted)
            found = np.where((found <= 0) & counted, tokens * rate, found)
            if len(reported):
                shares = COST_DECAY ** np.arange(len(reported) - 1, -1, -1)
                kept = COST_DECAY ** len(reported)
                self._reported_ms = kept * self._reported_ms + float(shares @ found[reported])
                self._reported_tokens = kept * self._reported_tokens + float(shares @ tokens[reported])
        known = found[found > 0]
        if len(known):
            if not self._mean_cost:
                self._mean_cost = float(known[0])
            shares = COST_DECAY ** np.arange(len(known) - 1, -1, -1)
            kept = COST_DECAY ** len(known)
            self._mean_cost = kept * self._mean_cost + (1 - COST_DECAY) * float(shares @ known)
        if len(known) < len(found):
            found = np.where(found > 0, found, self._mean_cost or 1.0)
        return found / np.maximum(sizes, 1)
