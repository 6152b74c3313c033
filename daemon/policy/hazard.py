"""What pays least for its bytes goes first, by what was learned of how such entries are used again.

An entry's worth is  index(class, age) * cost / bytes:  the best rate at which its next use can come (`hazards`), what
that use would save, and what keeping it takes. Cost is what computing it took in milliseconds, else its tokens at the
milliseconds a token that others told of, else the same for all (cost / bytes as in GreedyDual-Size-Frequency:
Cherkasova, HP Labs 1998; a learned index instead of its frequency).

Classes tell apart: how often an entry was used, how deep in its sequence it lies, how long it was unused before its
last use, and what is known of its agent. An agent that has finished, or waits for a tool, is just another class: what
follows from it is learned too.

What was just put is there, whatever was learned (`window`). Time is what requests make it (`clock`).

Only what may go stands in a queue (`leaves`). What was evicted is remembered for a while: its return says that it was
missed, and it is no newcomer then.

Invariants: who stands in a queue is exactly who may go; what is remembered is bounded by what is known, and
REMEMBERED_MIN.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from math import frexp
from typing import Final

from .ages import Ages
from .clock import Clock
from .explained import Explained, traits
from .hazards import NEW, Hazards, Row, bucket
from .leaves import Agent, Leaves, Rank, Span
from .newcomer import Newcomer
from .past import Past
from .window import Window

REMEMBERED_MIN: Final = 2048
REMEMBERED_SHARE: Final = 4
"""How many evicted entries are remembered: so many times those that are known."""
ROUND_USES: Final = 128
"""After so many uses the ages are counted, and LEARNED_ROWS classes go by what was learned."""
LEARNED_ROWS: Final = 2
COMPETES_SHARE: Final = 16
"""A sequence that takes more than this part of the cache by itself has to be worth what must go for it."""
JUDGES_MIN: Final = 16
"""Among fewer entries nobody is turned away: each would be a large part."""
MOVED_MAX: Final = 128
"""Leaves of an agent whose places change at once when it takes another turn; those of one that has more follow as they
are used. Anybody may say whose turn it is, as often as he likes."""
OFTEN_MAX: Final = 7
"""Of what was used more than two to the power of this, all is alike."""
FAR: Final = 8
"""Pieces deeper in a sequence than this are all alike."""
FINISHED_ODDS: Final = 0.05
"""Of what belongs to an agent that has finished to be used again, against others', before more is known."""
TOLD: Final = 0.999
"""What a new report of milliseconds leaves of those before."""

_RUNNING: Final = 2
_FINISHED: Final = 5
_STATES: Final = {"tool_call": 3, "turn_ended": 4, "finished": _FINISHED}


class Hazard:
    """An operation is O(log n), and a decision O(number of queues), which is bounded."""

    name = "hazard"

    def __init__(self) -> None:
        self._spans: dict[int, Span] = {}
        self._past = Past()
        self._agents: dict[str, Agent] = {}
        self._leaves = Leaves()
        self._hazards = Hazards()
        self._ages: Ages[Span] = Ages(self._reached)
        self._serial = 0
        self._clock = Clock()
        self._window = Window()
        self._bytes = 0
        self._told_ms, self._told_tokens, self._mean_cost = 0.0, 0.0, 0.0
        # The gap of what was used last: a piece that is added to a sequence has that of the one before.
        self._last_gap = 0.0

    def __len__(self) -> int:
        return len(self._spans)

    def inserted(self, new: Newcomer, now: float) -> None:
        assert new.span_id not in self._spans, new.span_id
        self._clock.pass_to(now)
        span = self._recalled(new)
        self._spans[new.span_id] = span
        self._bytes += span.size_bytes
        self._use(span, new.agent)
        self._window.put(span)
        for older in self._window.past(self._bytes):
            self._leave_window(older)
        self._leaves.add(span, self._place(span))

    def accessed(self, span_id: int, now: float, agent: str = "") -> None:
        self._clock.pass_to(now)
        span = self._spans[span_id]
        stood = span.queue is not None
        self._leaves.leave(span)
        self._used_again(span)
        self._use(span, agent)
        if stood:
            self._leaves.add(span, self._place(span))

    def may_go(self, span_id: int, it_may: bool) -> None:
        span = self._spans[span_id]
        if it_may:
            self._leaves.add(span, self._place(span))
        else:
            self._leaves.leave(span)

    def removed(self, span_id: int, *, evicted: bool) -> None:
        span = self._spans.pop(span_id)
        self._leaves.leave(span)
        self._window.leave(span)
        self._bytes -= span.size_bytes
        if evicted:
            self._remember(span)
        else:
            self._forget(span)

    def turn(self, agent: str, state: str, now: float) -> None:
        self._clock.pass_to(now)
        known = self._agents.get(agent)
        if known is not None:
            self._becomes(known, _STATES[state])

    def admits(self, new: Newcomer, victim: int) -> bool:
        """Only the tail of a long sequence has to be worth what goes for it; one that is not is remembered."""
        if not new.depth or len(self._spans) < JUDGES_MIN:
            return True
        if COMPETES_SHARE * (new.before_bytes + new.size_bytes) <= self._bytes:
            return True
        row = self._class_of(new)
        if self._leaves.rank(row, self._weight(new), self._clock.now, 0)[0] >= self.rank(victim)[0]:
            return True
        span = self._recalled(new)
        self._use(span, new.agent)
        self._remember(span)
        return False

    def coldest(self, owners: Collection[int] | None = None) -> Iterator[int]:
        return self._leaves.coldest(owners)

    def rank(self, span_id: int) -> Rank:
        span = self._spans[span_id]
        row = self._place(span) if span.queue is None else span.queue.row
        return self._leaves.rank(row, span.weight, span.used_at, span.serial)

    @property
    def window_bytes(self) -> int:
        return self._window.size_bytes

    def worth(self, span_id: int) -> float:
        span = self._spans[span_id]
        return self._leaves.rank(self._row(span), span.weight, span.used_at, 0)[0]

    def explain(self, span_id: int) -> Explained:
        return self._explained(self._spans[span_id])

    def recall(self, key: bytes) -> Explained | None:
        span = self._past.get(key)
        return None if span is None else self._explained(span)

    def check_invariants(self) -> None:
        self._leaves.check_invariants({span.number for span in self._spans.values() if span.queue is not None})
        self._window.check_invariants(self._spans.values())
        assert self._bytes == sum(span.size_bytes for span in self._spans.values())
        self._past.check_invariants()
        owned = [span.agent for span in (*self._spans.values(), *self._past) if span.agent is not None]
        assert {agent.name: agent for agent in owned} == self._agents
        for agent in self._agents.values():
            assert agent.spans == owned.count(agent)
            assert all(span.agent is agent and span.queue is not None for span in agent.leaves.values())

    # Uses

    def _use(self, span: Span, agent: str) -> None:
        """A use, also the first, of a span that stands nowhere."""
        self._serial += 1
        self._last_gap = span.gap
        span.uses += 1
        span.row = None
        span.used_at = self._clock.now
        span.serial = self._serial
        if agent:
            self._owned(span, agent)
        span.age = self._ages.begin(span, span.key, self._clock.now)
        self._hazards.uses += 1
        if self._serial % ROUND_USES == 0:
            self._ages.sweep(self._clock.now)
            for _ in range(LEARNED_ROWS):
                self._hazards.refresh_one()
            self._leaves.set_clock(self._clock.now)
        else:
            self._leaves.pass_clock(self._clock.now)

    def _reached(self, span: Span, at: int) -> None:
        self._hazards.reached(self._row(span), at)

    def _used_again(self, span: Span) -> None:
        """The age that ends with a use is known now. One at the same moment is part of the same use."""
        unused = self._clock.now - span.used_at
        age = span.age
        if unused > 0:
            if age is not None and not age.ended:
                row, at = self._row(span), bucket(unused)
                self._ages.pass_to(age, at)
                self._hazards.used(row, at)
            span.gap = unused
        if age is not None:
            self._ages.end(age)

    def _owned(self, span: Span, name: str) -> None:
        """`name` uses the span: its own, unless others did before."""
        if span.agent is not None and span.agent.name != name:
            self._disown(span)
            span.shared = True
        if span.shared:
            return
        agent = self._agents.get(name)
        if agent is None:
            agent = self._agents[name] = Agent(name, _RUNNING)
        if agent.state == _FINISHED:
            self._becomes(agent, _RUNNING)
        if span.agent is None:
            span.agent = agent
            agent.spans += 1

    def _disown(self, span: Span) -> None:
        agent, span.agent = span.agent, None
        if agent is not None:
            agent.spans -= 1
            if not agent.spans:
                del self._agents[agent.name]

    def _becomes(self, agent: Agent, state: int) -> None:
        if agent.state != state:
            agent.state = state
            for span in list(islice(agent.leaves.values(), MOVED_MAX)):
                self._leaves.leave(span)
                self._leaves.add(span, self._place(span))

    def _place(self, span: Span) -> Row:
        """The class that the span stands for while it is known."""
        return NEW if span.put_at else self._row(span)

    def _leave_window(self, span: Span) -> None:
        stood = span.queue is not None
        self._leaves.leave(span)
        self._window.leave(span)
        if stood:
            self._leaves.add(span, self._row(span))

    # What is remembered

    def _recalled(self, new: Newcomer) -> Span:
        """The newcomer, or who it was before."""
        weight = self._weight(new)
        span = self._past.pop(new.key)
        if span is None:
            gap = self._last_gap if new.depth else 0.0
            return Span(new.span_id, new.key, new.depth, new.size_bytes, weight, gap=gap, owner=new.owner)
        self._used_again(span)
        span.number, span.depth, span.size_bytes, span.weight = new.span_id, new.depth, new.size_bytes, weight
        span.row, span.owner = None, new.owner
        return span

    def _remember(self, span: Span) -> None:
        known = self._past.pop(span.key)
        if known is not None:
            self._forget(known)
        for oldest in self._past.add(span, self._remembered_max()):
            self._forget(oldest)

    def _forget(self, span: Span) -> None:
        if span.age is not None:
            self._ages.end(span.age)
            # An age and its span refer to each other. The daemon collects cycles seldom, so they would pile up.
            span.age = None
        self._disown(span)

    def _remembered_max(self) -> int:
        return max(REMEMBERED_MIN, REMEMBERED_SHARE * len(self._spans))

    # What it is

    def _weight(self, new: Newcomer) -> int:
        """cost / bytes, as a power of two."""
        cost = new.cost_ms
        if cost > 0 and new.tokens:
            self._told_ms = TOLD * self._told_ms + cost
            self._told_tokens = TOLD * self._told_tokens + new.tokens
        elif cost <= 0 and new.tokens:
            cost = new.tokens * (self._told_ms / self._told_tokens if self._told_tokens else 1.0)
        if cost > 0:
            self._mean_cost = cost if not self._mean_cost else TOLD * self._mean_cost + (1 - TOLD) * cost
        return frexp((cost or self._mean_cost or 1.0) / max(new.size_bytes, 1))[1]

    def _row(self, span: Span) -> Row:
        agent = span.agent
        state = 1 if span.shared else 0 if agent is None else agent.state
        row = span.row
        if row is None or span.state != state:
            row = span.row = self._class(span.uses, span.depth, span.gap, state)
            span.state = state
        return row

    def _explained(self, span: Span) -> Explained:
        row = self._row(span)
        worth = self._leaves.rank(row, span.weight, span.used_at, 0)[0]
        like = traits(_often(span.uses), OFTEN_MAX, _deep(span.depth), span.state)
        comes_back = row.comes_back(bucket(self._clock.now - span.used_at))
        return Explained(worth, span.uses, like, comes_back, span.put_at != 0)

    def _class_of(self, new: Newcomer) -> Row:
        """The class that the newcomer would be of."""
        past = self._past.get(new.key)
        agent = self._agents.get(new.agent)
        state = 0 if not new.agent else _RUNNING if agent is None else agent.state
        if past is None:
            return self._class(1, new.depth, self._last_gap if new.depth else 0.0, state)
        if past.shared or (past.agent is not None and past.agent is not agent):
            state = 1
        return self._class(past.uses + 1, new.depth, self._clock.now - past.used_at, state)

    def _class(self, uses: int, depth: int, gap: float, state: int) -> Row:
        """Its class. Uses count by powers of two, depth as first, near and far, the gap (of agents' alone, whose loops
        it tells) by powers of eight."""
        gap = min((int(gap * 20).bit_length() + 2) // 3, 7) if state else 0
        odds = FINISHED_ODDS if state == _FINISHED else 1.0
        return self._hazards.row(_often(uses), state, (_deep(depth), gap), odds)


def _often(uses: int) -> int:
    return min((uses - 1).bit_length(), OFTEN_MAX)


def _deep(depth: int) -> int:
    return 0 if not depth else 1 if depth < FAR else 2
