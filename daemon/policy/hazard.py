"""The learned policy: evicts the entries with the lowest expected benefit per byte.

An entry's worth is  index(class, age) * cost / bytes.  The index is the best rate at which the entry's next use can
come (`hazards`). The cost is the time that this use would save (`costs`). The bytes are the price of keeping the entry.
(cost / bytes is as in GreedyDual-Size-Frequency: Cherkasova, HP Labs 1998. The index replaces its frequency.)

An entry's class is made of four traits: how often it was used, its depth in its sequence, the time without a use before
its last use, and the state of its agent. The states of an agent (it runs, waits for a tool, has finished) are ordinary
traits: their effect on reuse is learned too. Only entries of a finished agent are worth less than all others: what was
learned about the time before its end says nothing of the time after it.

The window: a new entry is in the window until a WINDOW_SHARE of the stored bytes was put after it. Entries in the
window are worth more than all others. A block with a parent is never in the window; it must be worth its place from the
start.

Evicted entries are remembered for a while (`ghosts`), so that an entry that is put again keeps its history. The unit of
time is the mean pause between requests (`clock`). Worths are computed as of the start of the round. A new round begins
after some uses, after some puts, and when the index of a class has changed.

Owns: the records of spans, the ghosts, the states of agents, and the choice of victims from them. Does not own which
spans may be evicted (the store).

Invariant: the table of ghosts does not grow beyond REMEMBERED_SHARE places for each known entry, or PLACES_MIN if that
is more. It never shrinks.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import msgpack
import numpy as np
from xxhash import xxh3_64_intdigest

from .agents import FINISHED, NO_AGENT, AgentStates, joined, number_of
from .ages import Ages
from .candidate import Candidate
from .clock import Clock
from .costs import Costs
from .explained import Explained, traits
from .ghosts import GHOST_COLUMNS, PLACES_MIN, Ghost, Ghosts
from .hazards import BOUNDS, Hazards, Row, bucket
from .records import Records, Slots
from .replacement import Replacement
from .traits import GAPS, OFTEN_MAX, TRAITS, gap_of, often, traits_of
from .victim_pool import Floats, Rank, VictimPool

WINDOW_SHARE: Final = 1 / 8
"""The window's share of the stored bytes: more than the promised tenth of the ring, because the ring has holes."""
NEW_WORTH: Final = 1e200
"""The index of entries in the window: above every learned index."""
REMEMBERED_SHARE: Final = 4
"""The most ghosts for each known entry."""
ROUND_USES: Final = 16
"""After every ROUND_USES uses the ages are swept, and the index of one class is refreshed if enough was counted."""
ROUND_ENTRIES: Final = 4096
"""A round lasts ROUND_USES uses, or one use for every ROUND_ENTRIES entries if that is more. In a store of fewer than
16 * ROUND_USES entries it lasts only one use for every 16 entries, and one more."""
ROUND_SHARE: Final = 1 / 128
"""After puts of this share of the stored bytes, a new round begins, in which entries leave the window."""
COMPETES_SHARE: Final = 16
"""A sequence with more than 1/COMPETES_SHARE of the stored bytes must be worth as much as its blocks' victims."""
JUDGES_MIN: Final = 16
"""With fewer entries than this, no block is refused: each entry is a large part of the store."""
FINISHED_ODDS: Final = 0.05
"""The odds of a further use for entries of a finished agent, relative to others, before enough is learned."""
FINISHED_RANK: Final = -1e-300
"""The worth of a finished agent's entries outside of the window: below every learned worth, and nothing in a sum."""
TICK: Final = 2.0**-20
"""The least difference between the times of two uses, in mean pauses."""
USES_MAX: Final = 65_535
"""A larger number of uses counts as this."""

_BOUNDS: Final = np.array(BOUNDS)
_VERSION: Final = 2


class Hazard(Replacement, name="hazard"):
    """The learned policy. An operation takes O(1), a round O(CHUNK)."""

    ranks_by_worth = True

    def __init__(self) -> None:
        self._records = Records()
        self._ghosts = Ghosts()
        self._hazards = Hazards()
        self._rows = np.full((FINISHED + 1, TRAITS), -1, np.int64)
        self._ages = Ages(self._reached, self._used)
        self._victims = VictimPool(self._records, self._ranks)
        self._agents = AgentStates(self._victims.forget)
        self._clock = Clock()
        self._used_at = 0.0
        self._uses = 0
        # The start of the current round, the start of the window in it, and the uses and put bytes at which it ends.
        self._as_of, self._window_from, self._due, self._due_bytes = 0.0, 0.0, 0, 0
        self._bytes, self._put_bytes = 0, 0
        self._costs = Costs()
        # The gap class of the last use. A new block of a sequence takes it, because its parent was used just before.
        self._last_gap = 0

    def __len__(self) -> int:
        return len(self._records)

    def inserted(self, new: Candidate, now: float) -> None:
        self._clock.pass_to(now)
        known, digest = self._records, _digest(new.key)
        slot = known.add(new.span_id)
        known.digest[slot], known.size[slot], known.owner[slot] = digest, new.size_bytes, new.owner
        self._bytes += new.size_bytes
        self._put_bytes += new.size_bytes
        known.put_at[slot] = 0 if new.depth else self._put_bytes
        known.set_remembered(slot, self._put(new, digest, self._ghosts.pop(digest)))
        known.may_go[slot] = 1
        self._victims.changed(slot, self._rank)

    def accessed(self, span_id: int, now: float, agent: str = "") -> None:
        self._clock.pass_to(now)
        known, slot = self._records, self._records.slot(span_id)
        before = known.remembered(slot)
        number = self._agents.after_use(before.agent, agent)
        known.set_remembered(slot, self._use(known.digest[slot], before, number))
        self._victims.changed(slot, self._rank)

    def put_again(self, span_id: int) -> None:
        """The span belongs to the window again, unless it is a later block of a sequence."""
        known, slot = self._records, self._records.slot(span_id)
        if known.put_at[slot]:
            known.put_at[slot] = self._put_bytes
            self._victims.changed(slot, self._rank)

    def recovered(self, by_put: Iterable[int]) -> None:
        """The window has the spans that were put last, whichever were used since."""
        known, put_bytes = self._records, 0
        for slot in map(known.slot, by_put):
            put_bytes += known.size[slot]
            known.put_at[slot] = known.put_at[slot] and put_bytes
        self._due = 0

    def may_go(self, span_id: int, it_may: bool) -> None:
        slot = self._records.slot(span_id)
        self._records.may_go[slot] = it_may
        self._victims.changed(slot, self._rank)

    def removed(self, span_id: int, *, evicted: bool) -> None:
        known, slot = self._records, self._records.slot(span_id)
        self._bytes -= known.size[slot]
        if evicted:
            self._remember(known.digest[slot], known.remembered(slot))
        else:
            self._ages.forget(known.digest[slot])
        known.remove(span_id)

    def turn(self, agent: str, state: str, now: float) -> None:
        self._clock.pass_to(now)
        self._agents.report(agent, state)

    def admits(self, new: Candidate, victim: int) -> bool:
        """False if `new` is in the tail of a long sequence and is worth less than `victim`. It is remembered then."""
        if not new.depth or len(self) < JUDGES_MIN:
            return True
        if COMPETES_SHARE * (new.before_bytes + new.size_bytes) <= self._bytes:
            return True
        digest = _digest(new.key)
        ghost = self._ghosts.get(digest)
        if ghost is None:
            of, agent = traits_of(1, new.depth, self._last_gap), number_of(new.agent)
        else:
            of = traits_of(ghost.uses + 1, new.depth, gap_of(self._clock.now - ghost.used_at))
            agent = joined(ghost.agent, new.agent)
        worth = self._row(of, agent).index[0] * self._costs.weight(new)
        if worth >= self.rank(victim)[0]:
            return True
        self._remember(digest, self._put(new, digest, ghost))
        return False

    def coldest(self, owners: Collection[int] | None = None) -> Iterator[int]:
        self._begin_round()
        return map(self._records.span.__getitem__, self._victims.coldest(owners))

    def rank(self, span_id: int) -> Rank:
        self._begin_round()
        return self._rank(self._records.slot(span_id))

    @property
    def window_bytes(self) -> int:
        self._begin_round()
        slots = self._records.slots()
        return int(self._records.column(self._records.size, slots)[self._in_window(slots)].sum())

    def worth(self, span_id: int) -> float:
        known, slot = self._records, self._records.slot(span_id)
        return self._standing(known.remembered(slot), in_window=known.put_at[slot] > self._window_from)

    def explain(self, span_id: int) -> Explained:
        self._begin_round()
        known, slot = self._records, self._records.slot(span_id)
        return self._explained(known.remembered(slot), in_window=known.put_at[slot] > self._window_from)

    def recall(self, key: bytes) -> Explained | None:
        ghost = self._ghosts.get(_digest(key))
        return None if ghost is None else self._explained(ghost, in_window=False)

    # Restarts

    def learned(self) -> Iterator[bytes]:
        """The learned state, the record of each span and the ghosts, for `learn`. About 35 bytes for each span, and 25
        for each ghost."""
        ghosts = self._ghosts.packed()
        yield from ghosts
        known = self._records
        slots = known.slots()
        columns = (known.span, known.used_at, known.put_at, known.agent, known.uses, known.traits)
        state = {
            "version": _VERSION,
            "clock": self._clock.learned(),
            "used_at": self._used_at,
            "put_bytes": self._put_bytes,
            "costs": self._costs.learned(),
            "states": self._agents.learned(),
            "uses": self._hazards.uses,
            "classes": self._hazards.counts(),
        }
        spans = [known.column(column, slots).tobytes() for column in columns]
        yield msgpack.packb(state)
        yield from spans

    def learn(self, data: Sequence[bytes]) -> None:
        """Restores the state from `learned`. Call it after the existing spans were inserted and before the first use.

        Raises:
            ValueError: `data` is not a state of `learned`. The parts restored until then stay.
        """
        try:
            ghosts, packed, spans = data[:GHOST_COLUMNS], data[GHOST_COLUMNS], data[GHOST_COLUMNS + 1 :]
            state = msgpack.unpackb(packed, strict_map_key=False)
            if state["version"] != _VERSION:
                raise ValueError("the state has another version")
            self._agents.learn(state["states"])
            self._costs.learn(state["costs"])
            self._put_bytes = int(state["put_bytes"])
            self._clock.learn(state["clock"])
            self._learn_classes(state["uses"], state["classes"])
            self._ghosts.unpack(ghosts, self._remembered_max())
            self._learn_spans(float(state["used_at"]), spans)
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, msgpack.UnpackException) as error:
            raise ValueError(f"not a learned state of this policy: {error!r}") from error
        self._due = 0

    def check_invariants(self) -> None:
        self._begin_round()
        self._records.check_invariants()
        self._ghosts.check_invariants()
        self._victims.check_invariants()
        assert self._bytes == sum(self._records.size)
        assert len(self._ghosts) <= max(self._remembered_max(), len(self._ghosts._digest))

    # Uses

    def _put(self, new: Candidate, digest: int, ghost: Ghost | None) -> Ghost:
        """The record of a candidate after its first use. `ghost`: its remembered record, if any."""
        gap = (self._last_gap if new.depth else 0) if ghost is None else ghost.traits % GAPS
        before = ghost or Ghost(0.0, 0, 0, NO_AGENT, 0.0)
        of = traits_of(1, new.depth, gap)
        before = before._replace(traits=of, weight=self._costs.weight(new))
        return self._use(digest, before, joined(before.agent, new.agent), new.uses)

    def _use(self, digest: int, before: Ghost, agent: int, earlier: int = 0) -> Ghost:
        """The record after a use (or the put), from the record before it. Updates the ages, and ends a round if due.
        `agent`: the number of the entry's agent from now on. `earlier`: the number of uses under earlier daemons that
        no record tells of."""
        unused = self._clock.now - before.used_at if before.uses else 0.0
        uses = min(before.uses + 1 + earlier, USES_MAX)
        gap = gap_of(unused) if unused > 0 else before.traits % GAPS
        of = often(uses) * 3 * GAPS + before.traits // GAPS % 3 * GAPS + gap
        self._used_at = max(self._clock.now, self._used_at + TICK)
        self._ages.use(digest, of, agent, self._used_at, again=unused > 0)
        self._last_gap = gap
        self._uses += 1
        self._hazards.uses += 1
        if self._uses % ROUND_USES == 0:
            self._ages.sweep(self._clock.now)
            if self._hazards.refresh_one():
                self._due = 0
        return Ghost(self._used_at, uses, of, agent, before.weight)

    def _reached(self, of: int, agent: int, at: int, count: int) -> None:
        self._hazards.reached(self._row(of, agent), at, count)

    def _used(self, of: int, agent: int, at: int) -> None:
        self._hazards.used(self._row(of, agent), at)

    # Worth

    def _begin_round(self) -> None:
        """Begins a new round if one is due: worths are then computed as of now."""
        if self._uses < self._due and self._put_bytes < self._due_bytes:
            return
        self._due = self._uses + min(max(ROUND_USES, len(self) // ROUND_ENTRIES), 1 + len(self) // 16)
        self._due_bytes = self._put_bytes + 1 + int(ROUND_SHARE * self._bytes)
        self._as_of = self._clock.now
        self._window_from = max(self._put_bytes - WINDOW_SHARE * self._bytes, 0.0)
        self._victims.forget()

    def _rank(self, slot: int) -> Rank:
        known = self._records
        used_at, weight = known.used_at[slot], known.weight[slot]
        if known.put_at[slot] > self._window_from:
            return (NEW_WORTH * weight, used_at)
        if self._agents.states[known.agent[slot]] == FINISHED:
            return (FINISHED_RANK, used_at)
        row, at = self._row(known.traits[slot], known.agent[slot]), bucket(self._as_of - used_at)
        return (row.index[at] * weight, used_at if at >= row.peak else -used_at)

    def _ranks(self, slots: Slots) -> tuple[Floats, Floats]:
        """`_rank` of many slots at once."""
        known = self._records
        used_at = known.column(known.used_at, slots)
        states = np.frombuffer(self._agents.states, np.uint8)[known.column(known.agent, slots)]
        of = known.column(known.traits, slots)
        rows = self._rows[states, of]
        if rows.size and rows.min() < 0:
            for trait, state in {*zip(of[rows < 0].tolist(), states[rows < 0].tolist(), strict=True)}:
                self._row_in(trait, state)
            rows = self._rows[states, of]
        at = np.searchsorted(_BOUNDS, self._as_of - used_at, "right")
        new = self._in_window(slots)
        worths = np.where(new, NEW_WORTH, self._hazards.index[rows, at])
        worths *= known.column(known.weight, slots)
        finished = (states == FINISHED) & ~new
        worths[finished] = FINISHED_RANK
        return worths, np.where(new | finished | (at >= self._hazards.peak[rows]), used_at, -used_at)

    def _in_window(self, slots: Slots) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        return self._records.column(self._records.put_at, slots) > self._window_from

    def _worth(self, ghost: Ghost) -> float:
        return self._row(ghost.traits, ghost.agent).index[bucket(self._as_of - ghost.used_at)] * ghost.weight

    def _standing(self, ghost: Ghost, *, in_window: bool) -> float:
        """The worth by which an entry is ranked outside of the window; in it, the worth that it will have."""
        finished = not in_window and self._agents.states[ghost.agent] == FINISHED
        return FINISHED_RANK if finished else self._worth(ghost)

    def _explained(self, ghost: Ghost, *, in_window: bool) -> Explained:
        row, at = self._row(ghost.traits, ghost.agent), bucket(self._as_of - ghost.used_at)
        deep, state = ghost.traits // GAPS % 3, self._agents.states[ghost.agent]
        worth = self._standing(ghost, in_window=in_window)
        like = traits(often(ghost.uses), OFTEN_MAX, deep, state)
        return Explained(worth, ghost.uses, like, row.comes_back(at), in_window)

    def _remember(self, digest: int, ghost: Ghost) -> None:
        forgotten = self._ghosts.add(digest, ghost, self._remembered_max())
        if forgotten:
            self._ages.forget(forgotten)

    def _remembered_max(self) -> int:
        return max(PLACES_MIN, REMEMBERED_SHARE * len(self._records))

    # Classes

    def _row(self, of: int, agent: int) -> Row:
        state = self._agents.states[agent]
        number = self._rows[state, of]
        return self._row_in(of, state) if number < 0 else self._hazards.by_number[number]

    def _row_in(self, of: int, state: int) -> Row:
        """The class of the traits `of` and the agent's state. The gap is part of the class only for entries with an
        agent: there it tells a loop from a single visit."""
        more = of % (3 * GAPS) if state else of % (3 * GAPS) // GAPS * GAPS
        row = self._hazards.row(of // (3 * GAPS), state, more, FINISHED_ODDS if state == FINISHED else 1.0)
        self._rows[state, of] = row.number
        return row

    def _learn_classes(self, uses: int, classes: list[list[Any]]) -> None:
        self._hazards.uses = int(uses)
        for name, _ in classes:
            if len(name) == 3:
                uses_class, state, more = name
                if not (0 <= uses_class <= OFTEN_MAX and 0 <= state <= FINISHED and 0 <= more < 3 * GAPS):
                    raise ValueError("an impossible class")
                self._row_in(uses_class * 3 * GAPS + more, state)
        for name, counts in classes:
            self._hazards.learn(tuple(name), counts)

    def _learn_spans(self, used_at: float, columns: Sequence[bytes]) -> None:
        known, clock = self._records, self._clock.now
        typed: tuple[array[Any], ...] = (known.span, known.used_at, known.put_at, known.agent, known.uses, known.traits)
        packed = [array(column.typecode, data) for column, data in zip(typed, columns, strict=True)]
        if len({len(column) for column in packed}) > 1 or not 0 <= used_at <= clock + 1:
            raise ValueError("columns of unequal lengths, or an impossible time")
        saved = {span: rest for span, *rest in zip(*packed, strict=True) if rest[0] <= used_at and rest[4] < TRAITS}
        self._used_at = used_at
        for slot in known.slots().tolist():
            rest = saved.get(known.span[slot])
            if rest is not None:
                known.used_at[slot], known.put_at[slot], known.agent[slot], known.uses[slot], known.traits[slot] = rest
            else:
                self._used_at += TICK
                known.used_at[slot] = self._used_at
                known.put_at[slot] = known.put_at[slot] and self._put_bytes


def _digest(key: bytes) -> int:
    return xxh3_64_intdigest(key) or 1
