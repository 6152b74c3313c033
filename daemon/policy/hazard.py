"""What pays least for its bytes goes first, by what was learned of how such entries are used again.

An entry's worth is  index(class, age) * cost / bytes:  the best rate at which its next use can come (`hazards`), what
that use would save, and what keeping it takes. Cost is what computing it took in milliseconds, else its tokens at the
milliseconds a token that others told of, else the same for all (cost / bytes as in GreedyDual-Size-Frequency:
Cherkasova, HP Labs 1998; a learned index instead of its frequency).

Classes tell apart: how often an entry was used, how deep in its sequence it lies, how long it was unused before its
last use, and what is known of its agent. An agent that has finished, or waits for a tool, is just another class: what
follows from it is learned too.

What was just put is there, whatever was learned: an entry belongs to the window until as many bytes were put after it
as a WINDOW_SHARE of what is stored. What follows another in a sequence does not: it has to be worth its place.

What was evicted is remembered for a while (`ghosts`): its return says that it was missed, and it is no new candidate
then. Time is what requests make it (`clock`). Worths are as of the last round, which comes every ROUND_USES uses, or
sooner.

Invariants: what is remembered is bounded by what is known, and PLACES_MIN.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final
from zlib import crc32

import msgpack
import numpy as np
from xxhash import xxh3_64_intdigest

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
"""Of the bytes that are stored: somewhat more than the tenth of the ring that is promised, which has holes."""
NEW_WORTH: Final = 1e200
"""The index of what belongs to the window: more than anything that is learned."""
REMEMBERED_SHARE: Final = 4
"""How many evicted entries are remembered: so many times those that are known."""
ROUND_USES: Final = 16
"""After so many uses the ages are counted, and a class goes by what was learned."""
ROUND_SHARE: Final = 1 / 128
"""After puts of such a share of the bytes that are stored it is seen anew what has left the window."""
COMPETES_SHARE: Final = 16
"""A sequence that takes more than this part of the cache by itself has to be worth what must go for it."""
JUDGES_MIN: Final = 16
"""Among fewer entries nobody is turned away: each would be a large part."""
FINISHED_ODDS: Final = 0.05
"""Of what belongs to an agent that has finished to be used again, against others', before more is known."""
TICK: Final = 2.0**-20
"""By so much of a mean pause at least each use is later than the one before."""
USES_MAX: Final = 65_535

_NOBODY, _SHARED, _RUNNING, _FINISHED = 0, 1, 2, 5
_STATES: Final = {"tool_call": 3, "turn_ended": 4, "finished": _FINISHED}
_AGENTS: Final = 1 << 16
"""Agents are told apart by a hash: 0 is nobody's, 1 several agents'."""
_BOUNDS: Final = np.array(BOUNDS)
_VERSION: Final = 1


class Hazard(Replacement, name="hazard"):
    """An operation is O(1), a round O(CHUNK)."""

    def __init__(self) -> None:
        self._records = Records()
        self._ghosts = Ghosts()
        self._hazards = Hazards()
        self._rows = np.full((_FINISHED + 1, TRAITS), -1, np.int64)
        self._states = bytearray([_RUNNING]) * _AGENTS
        self._states[0], self._states[1] = _NOBODY, _SHARED
        self._ages = Ages(self._reached, self._used)
        self._victims = VictimPool(self._records, self._ranks)
        self._clock = Clock()
        self._used_at = 0.0
        self._uses = 0
        # Worths are as of then; after so many uses, or bytes put, they are as of another time.
        self._as_of, self._window_from, self._due, self._due_bytes = 0.0, 0.0, 0, 0
        self._bytes, self._put_bytes = 0, 0
        self._costs = Costs()
        # The gap of what was used last: a block that is added to a sequence has that of its parent.
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
        known.tell(slot, self._put(new, digest, self._ghosts.pop(digest)))
        known.may_go[slot] = 1
        self._victims.changed(slot, self._rank)

    def accessed(self, span_id: int, now: float, agent: str = "") -> None:
        self._clock.pass_to(now)
        known, slot = self._records, self._records.slot(span_id)
        known.tell(slot, self._use(known.digest[slot], known.of(slot), agent))
        self._victims.changed(slot, self._rank)

    def may_go(self, span_id: int, it_may: bool) -> None:
        slot = self._records.slot(span_id)
        self._records.may_go[slot] = it_may
        self._victims.changed(slot, self._rank)

    def removed(self, span_id: int, *, evicted: bool) -> None:
        known, slot = self._records, self._records.slot(span_id)
        self._bytes -= known.size[slot]
        if evicted:
            self._remember(known.digest[slot], known.of(slot))
        else:
            self._ages.forget(known.digest[slot])
        known.remove(span_id)

    def turn(self, agent: str, state: str, now: float) -> None:
        self._clock.pass_to(now)
        self._becomes(_agent(agent), _STATES[state])

    def admits(self, new: Candidate, victim: int) -> bool:
        """Only the tail of a long sequence has to be worth what goes for it; one that is not is remembered."""
        if not new.depth or len(self) < JUDGES_MIN:
            return True
        if COMPETES_SHARE * (new.before_bytes + new.size_bytes) <= self._bytes:
            return True
        digest = _digest(new.key)
        ghost = self._ghosts.get(digest)
        agent = _agent(new.agent)
        if ghost is None:
            of = traits_of(1, new.depth, self._last_gap)
        else:
            of = traits_of(ghost.uses + 1, new.depth, gap_of(self._clock.now - ghost.used_at))
            agent = agent if ghost.agent in (_NOBODY, agent) else _SHARED
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
        self._begin_round()
        return self._worth(self._records.of(self._records.slot(span_id)))

    def explain(self, span_id: int) -> Explained:
        self._begin_round()
        known, slot = self._records, self._records.slot(span_id)
        return self._explained(known.of(slot), in_window=known.put_at[slot] > self._window_from)

    def recall(self, key: bytes) -> Explained | None:
        ghost = self._ghosts.get(_digest(key))
        return None if ghost is None else self._explained(ghost, in_window=False)

    # What is learned, over a restart

    def learned(self) -> Iterator[bytes]:
        """All that was learned, and what is known of each span; for `learn`. Some 35 bytes a span, and 25 for each that
        is remembered, REMEMBERED_SHARE as many at most."""
        ghosts = self._ghosts.packed()
        yield from ghosts
        known = self._records
        slots = known.slots()
        columns = (known.span, known.used_at, known.put_at, known.agent, known.uses, known.traits)
        told = {
            "version": _VERSION,
            "clock": self._clock.learned(),
            "used_at": self._used_at,
            "put_bytes": self._put_bytes,
            "costs": self._costs.learned(),
            "states": bytes(self._states),
            "uses": self._hazards.uses,
            "classes": self._hazards.counts(),
        }
        spans = [known.column(column, slots).tobytes() for column in columns]
        yield msgpack.packb(told)
        yield from spans

    def learn(self, data: Sequence[bytes]) -> None:
        """Goes on from what `learned` told. To be called before the first use, once the spans that there are were
        inserted.

        Raises:
            ValueError: the data is not what `learned` gives. What was taken from it until then stays.
        """
        try:
            ghosts, told, spans = data[:GHOST_COLUMNS], data[GHOST_COLUMNS], data[GHOST_COLUMNS + 1 :]
            told = msgpack.unpackb(told, strict_map_key=False)
            if told["version"] != _VERSION or len(told["states"]) != _AGENTS:
                raise ValueError("of another version")
            self._states[2:] = bytes(min(state, _FINISHED) for state in told["states"][2:])
            self._costs.learn(told["costs"])
            self._put_bytes = int(told["put_bytes"])
            self._clock.learn(told["clock"])
            self._learn_classes(told["uses"], told["classes"])
            self._ghosts.unpack(ghosts, self._remembered_max())
            self._learn_spans(float(told["used_at"]), spans)
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, msgpack.UnpackException) as error:
            raise ValueError(f"not what a policy has learned: {error!r}") from error
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
        """What is known of a candidate, which was remembered as `ghost`, after its first use."""
        gap = (self._last_gap if new.depth else 0) if ghost is None else ghost.traits % GAPS
        before = ghost or Ghost(0.0, 0, 0, _NOBODY, 0.0)
        of = traits_of(1, new.depth, gap)
        return self._use(digest, before._replace(traits=of, weight=self._costs.weight(new)), new.agent)

    def _use(self, digest: int, before: Ghost, agent: str) -> Ghost:
        """What is known after a use, also the first, of something of which that was known before it."""
        unused = self._clock.now - before.used_at if before.uses else 0.0
        uses = min(before.uses + 1, USES_MAX)
        gap = gap_of(unused) if unused > 0 else before.traits % GAPS
        of = often(uses) * 3 * GAPS + before.traits // GAPS % 3 * GAPS + gap
        number = self._owned(before.agent, agent)
        self._used_at = max(self._clock.now, self._used_at + TICK)
        self._ages.use(digest, of, number, self._used_at, again=unused > 0)
        self._last_gap = gap
        self._uses += 1
        self._hazards.uses += 1
        if self._uses % ROUND_USES == 0:
            self._ages.sweep(self._clock.now)
            self._hazards.refresh_one()
            self._due = 0
        return Ghost(self._used_at, uses, of, number, before.weight)

    def _owned(self, number: int, name: str) -> int:
        """Whose something is that was that agent's, and which `name` uses."""
        if not name or number == _SHARED:
            return number
        agent = _agent(name)
        if number not in (_NOBODY, agent):
            return _SHARED
        if self._states[agent] == _FINISHED:
            self._becomes(agent, _RUNNING)
        return agent

    def _becomes(self, agent: int, state: int) -> None:
        if agent > _SHARED and self._states[agent] != state:
            self._states[agent] = state
            self._victims.forget()

    def _reached(self, of: int, agent: int, at: int) -> None:
        self._hazards.reached(self._row(of, agent), at)

    def _used(self, of: int, agent: int, at: int) -> None:
        self._hazards.used(self._row(of, agent), at)

    # What it is worth

    def _begin_round(self) -> None:
        """Worths are as of now, if that was not so long ago."""
        if self._uses < self._due and self._put_bytes < self._due_bytes:
            return
        self._due = self._uses + min(ROUND_USES, 1 + len(self) // 16)
        self._due_bytes = self._put_bytes + 1 + int(ROUND_SHARE * self._bytes)
        self._as_of = self._clock.now
        self._window_from = max(self._put_bytes - WINDOW_SHARE * self._bytes, 0.0)
        self._victims.forget()

    def _rank(self, slot: int) -> Rank:
        known = self._records
        used_at, weight = known.used_at[slot], known.weight[slot]
        if known.put_at[slot] > self._window_from:
            return (NEW_WORTH * weight, used_at)
        row, at = self._row(known.traits[slot], known.agent[slot]), bucket(self._as_of - used_at)
        return (row.index[at] * weight, used_at if at >= row.peak else -used_at)

    def _ranks(self, slots: Slots) -> tuple[Floats, Floats]:
        """The same, of many slots."""
        known = self._records
        used_at = known.column(known.used_at, slots)
        states = np.frombuffer(self._states, np.uint8)[known.column(known.agent, slots)]
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
        return worths, np.where(new | (at >= self._hazards.peak[rows]), used_at, -used_at)

    def _in_window(self, slots: Slots) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        return self._records.column(self._records.put_at, slots) > self._window_from

    def _worth(self, ghost: Ghost) -> float:
        return self._row(ghost.traits, ghost.agent).index[bucket(self._as_of - ghost.used_at)] * ghost.weight

    def _explained(self, ghost: Ghost, *, in_window: bool) -> Explained:
        row, at = self._row(ghost.traits, ghost.agent), bucket(self._as_of - ghost.used_at)
        worth = self._worth(ghost)
        deep, state = ghost.traits // GAPS % 3, self._states[ghost.agent]
        like = traits(often(ghost.uses), OFTEN_MAX, deep, state)
        return Explained(worth, ghost.uses, like, row.comes_back(at), in_window)

    def _remember(self, digest: int, ghost: Ghost) -> None:
        forgotten = self._ghosts.add(digest, ghost, self._remembered_max())
        if forgotten:
            self._ages.forget(forgotten)

    def _remembered_max(self) -> int:
        return max(PLACES_MIN, REMEMBERED_SHARE * len(self._records))

    # What it is

    def _row(self, of: int, agent: int) -> Row:
        state = self._states[agent]
        number = self._rows[state, of]
        return self._row_in(of, state) if number < 0 else self._hazards.by_number[number]

    def _row_in(self, of: int, state: int) -> Row:
        """The class of those traits and that state. The gap, which tells a loop from a visit, counts for agents'
        alone."""
        more = of % (3 * GAPS) if state else of % (3 * GAPS) // GAPS * GAPS
        row = self._hazards.row(of // (3 * GAPS), state, more, FINISHED_ODDS if state == _FINISHED else 1.0)
        self._rows[state, of] = row.number
        return row

    def _learn_classes(self, uses: int, classes: list[list[Any]]) -> None:
        self._hazards.uses = int(uses)
        for name, _ in classes:
            if len(name) == 3:
                uses_class, state, more = name
                if not (0 <= uses_class <= OFTEN_MAX and 0 <= state <= _FINISHED and 0 <= more < 3 * GAPS):
                    raise ValueError("no class")
                self._row_in(uses_class * 3 * GAPS + more, state)
        for name, counts in classes:
            self._hazards.learn(tuple(name), counts)

    def _learn_spans(self, used_at: float, columns: Sequence[bytes]) -> None:
        known, clock = self._records, self._clock.now
        typed: tuple[array[Any], ...] = (known.span, known.used_at, known.put_at, known.agent, known.uses, known.traits)
        packed = [array(column.typecode, data) for column, data in zip(typed, columns, strict=True)]
        if len({len(column) for column in packed}) > 1 or not 0 <= used_at <= clock + 1:
            raise ValueError("columns of unequal lengths, or another time")
        told = {span: rest for span, *rest in zip(*packed, strict=True) if rest[0] <= used_at and rest[4] < TRAITS}
        self._used_at = used_at
        for slot in known.slots().tolist():
            rest = told.get(known.span[slot])
            if rest is not None:
                known.used_at[slot], known.put_at[slot], known.agent[slot], known.uses[slot], known.traits[slot] = rest
            else:
                self._used_at += TICK
                known.used_at[slot] = self._used_at
                known.put_at[slot] = known.put_at[slot] and self._put_bytes


def _digest(key: bytes) -> int:
    return xxh3_64_intdigest(key) or 1


def _agent(name: str) -> int:
    """The number of the agent of that name; 0 for nobody."""
    return 2 + crc32(name.encode()) % (_AGENTS - 2) if name else _NOBODY
