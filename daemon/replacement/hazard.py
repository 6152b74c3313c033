"""The learned policy: evicts the rows with the lowest expected benefit per byte.

A row's worth is  index(class, age) * cost / bytes.  The index is the best rate at which the row's next use can come
(`hazards`). The cost is the time that this use would save. The bytes are the price of keeping the row. (cost / bytes is
as in GreedyDual-Size-Frequency: Cherkasova, HP Labs 1998. The index replaces its frequency.) A row's class is made of
its traits and the state of its agent (`traits`), whose effect on reuse is learned. Only rows of a finished agent are
worth less than all others: what was learned about the time before its end says nothing of the time after it.

Evicted rows are remembered for a while (`ghosts`), so that an entry that is put again keeps its history. Worths are
computed as of the start of the round. A new round begins after some uses, after some puts, and when the index of a
class has changed. In a round a sample of rows is ranked at once, and the coldest are kept in a pool (`replacement`).

Owns: the columns of what is known of each row (19 bytes), the rounds, and the filling of pools. Does not own which rows
may be evicted (`known`). Invariant: the table of ghosts does not grow beyond REMEMBERED_SHARE places for each known
row, or PLACES_MIN if that is more. It never shrinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgpack
import numpy as np
from msgspec.structs import replace

from .ages import Ages, Clock
from .ghosts import PLACES_MIN, Ghosts
from .hazards import Hazards, buckets
from .known import KNOWN, Array, Batches, Explained, Facts, Turn, parts
from .replacement import SAMPLE, Pool, Replacement
from .traits import CLASSES_MAX, FINISHED, GAPS, TRAITS, Classes, Costs, deep, gaps, joined, often, traits, words

REMEMBERED_SHARE: Final = 4
"""The most ghosts for each known row."""
ROUND_USES: Final = 16
LEARNS_SHARE: Final = 32
LEARNS_MAX: Final = 1024
"""After one use for every LEARNS_SHARE rows, from ROUND_USES to LEARNS_MAX uses, the ages are swept, and the index of
the class that has changed most is refreshed if enough was counted: 0.3 ms together."""
ROUND_ROWS: Final = 4096
"""A round lasts ROUND_USES uses, or one use for every ROUND_ROWS rows if that is more. In a store of fewer than
16 * ROUND_USES rows it lasts only one use for every 16 rows, and one more."""
ROUND_SHARE: Final = 1 / 128
"""After puts of this share of the stored bytes, a new round begins."""
POOL: Final = 32
RANKED_EACH: Final = 16
"""Rows that are ranked for each victim of a batch, up to RANKED_MAX, in a large store."""
KEPT_EACH: Final = 2
"""Of the coldest rows of a sample that were not evicted, so many for each victim are ranked again with the next one, as
in Redis' pool of candidates: a sample need not be large then."""
RANKED_MAX: Final = 16_384
COMPETES_SHARE: Final = 16
"""A sequence with more than 1/COMPETES_SHARE of the stored bytes must be worth as much as its blocks' victims."""
JUDGES_MIN: Final = 16
"""With fewer rows than this, no block is refused: each row is a large part of the store."""
FINISHED_RANK: Final = -1e-300
"""The worth of a finished agent's rows outside of the window: below every learned worth, and nothing in a sum."""
TICK: Final = 2.0**-20
"""The least difference between the times of two uses, in mean pauses."""
_VERSION: Final = 3
_GHOST_COLUMNS: Final = 5


class Hazard(Replacement):
    """The learned policy."""

    name = "hazard"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        rows = len(facts.sizes)
        self._used_at = np.zeros(rows)
        """The time of the last use by the policy's clock; no two are equal."""
        self._uses = np.zeros(rows, np.uint32)
        self._traits = np.zeros(rows, np.uint8)
        self._agents = np.zeros(rows, np.uint16)
        self._weights = np.zeros(rows, np.float32)
        """Cost per byte."""
        self._ghosts = Ghosts(REMEMBERED_SHARE * rows)
        self._hazards = Hazards(CLASSES_MAX)
        self._classes = Classes(self._hazards)
        self._ages = Ages(self._classes)
        self._clock = Clock()
        self._costs = Costs()
        self._last = 0.0
        """The time of the last use of all."""
        self._learns_at = ROUND_USES
        # The start of the current round, and the uses and put bytes at which it ends.
        self._as_of, self._due, self._due_bytes = 0.0, 0, 0
        self._near = np.zeros(0, np.int64)
        """The coldest rows of the last sample of all owners' rows."""

    # ---- what the store says

    def turn(self, agent: int, state: Turn, now: float) -> None:
        self.take_in()
        self._clock.pass_to(now)
        if self._classes.report(agent, state):
            self._pools.clear()

    def _put(self, rows: Array, batches: Batches) -> None:
        facts = self._facts
        now = np.repeat([self._clock.pass_to(at) for _, at in batches], [count for count, _ in batches])
        tags = tags_of(facts.digests[rows])
        ghost = self._ghosts.find(tags, now, take=True)
        depths = facts.depths[rows]
        gap = np.where(ghost.unused > 0, gaps(ghost.unused), ghost.gaps)
        if depths.any():
            gap = self._inherited(gap, ghost.there | (depths == 0), facts.parents[rows])
        self._uses[rows] = uses = ghost.uses + 1
        self._weights[rows] = self._costs.weights(facts.sizes[rows], facts.costs[rows], facts.tokens[rows])
        agents = joined(ghost.agents, facts.agents[rows].astype(np.int64))
        of = traits(often(uses), deep(depths), gap)
        self._use(rows, tags, of, agents, now, ghost.unused > 0)

    def _recovering(self, rows: Array, by_use: Array, uses: Array, now: float) -> Iterator[None]:
        """Only their uses are remembered. Nothing is learned of their times, since a restart lies between."""
        facts, last = self._facts, max(self._clock.pass_to(now), self._last)
        for part in parts(by_use):
            self._used_at[part] = last + TICK * np.arange(1, len(part) + 1)
            last += TICK * len(part)
            yield
        self._last = last
        self._ages.expect(len(rows))
        for part in parts(rows):
            deeper = deep(facts.depths[part])
            self._uses[part], self._agents[part] = uses[part] + np.uint32(1), 0
            self._weights[part] = self._costs.weights(facts.sizes[part], facts.costs[part], facts.tokens[part])
            self._traits[part] = of = traits(often(self._uses[part]), deeper, np.zeros_like(deeper))
            never = np.zeros(len(part), np.bool_)
            self._ages.use(tags_of(facts.digests[part]), of, np.zeros_like(of), self._used_at[part], never)
            yield

    def _inherited(self, gap: Array, is_known: Array, parents: Array) -> Array:
        """The gap classes of new rows: one that is no block, or is remembered, has its own; any other has its parent's,
        which was used or put just before."""
        is_old = ~is_known & (self._uses[parents] > 0)
        gap = np.where(is_old, self._traits[parents] % GAPS, gap)
        # A parent that is new too stands before its child.
        from_row = np.maximum.accumulate(np.where(is_known | is_old, np.arange(len(gap)), 0))
        inherited: Array = gap[from_row]
        return inherited

    def _used(self, rows: Array, now: float, agents: Sequence[int] | Array | int) -> None:
        at = self._clock.pass_to(now)
        unused = at - self._used_at[rows]
        np.add.at(self._uses, rows, 1)
        before = self._traits[rows].astype(np.int64)
        gap = np.where(unused > 0, gaps(np.maximum(unused, 0)), before % GAPS)
        of = traits(often(self._uses[rows]), before // GAPS % 3, gap)
        numbers = self._agents[rows].astype(np.int64)
        if not isinstance(agents, int) or agents:
            by = np.broadcast_to(np.asarray(agents, np.int64), len(rows))
            numbers = joined(numbers, by)
            if self._classes.run(numbers[by != 0]):
                self._pools.clear()
        times = np.full(len(rows), at)
        self._use(rows, tags_of(self._facts.digests[rows]), of, numbers, times, unused > 0)

    def _use(self, rows: Array, tags: Array, of: Array, agents: Array, now: Array, again: Array) -> None:
        """The rows were used (or put), and have these traits and agents from now on. `again`: after a time without a
        use, which is counted."""
        ticks = TICK * np.arange(1, len(rows) + 1)
        times = np.maximum.accumulate(np.maximum(now - ticks, self._last)) + ticks
        self._last = float(times[-1])
        self._used_at[rows], self._traits[rows], self._agents[rows] = times, of, agents
        self._ages.use(tags, of, agents, times, again)
        self._hazards.uses += len(rows)
        if self._hazards.uses >= self._learns_at:
            self._learns_at = self._hazards.uses + min(max(self._count // LEARNS_SHARE, ROUND_USES), LEARNS_MAX)
            self._ages.sweep(self._clock.now)
            if self._hazards.refresh_one():
                self._due = 0
        if self._round_is_over:
            self._pools.clear()
        else:
            self._may_go_again(rows)

    def _forget(self, rows: Array, evicted: bool) -> None:
        tags = tags_of(self._facts.digests[rows])
        if evicted:
            self._remember(tags, self._used_at[rows], self._uses[rows], self._traits[rows] % GAPS, self._agents[rows])
        else:
            self._ages.forget(tags)
        self._uses[rows] = 0

    def _remember(self, tags: Array, used_at: Array, uses: Array, gap: Array, agents: Array) -> None:
        dropped = self._ghosts.add(tags, used_at, uses, gap, agents, self._remembered_max())
        if len(dropped):
            self._ages.forget(dropped)

    def _remembered_max(self) -> int:
        return max(PLACES_MIN, REMEMBERED_SHARE * self._count)

    # ---- what the store asks

    def admits(self, digest: int, size: int, parent: int, cost: float = 0.0, tokens: int = 0, agent: int = 0) -> bool:
        """False if the block is in the tail of a long sequence and is worth less than the coldest row. It is remembered
        then."""
        self.take_in()
        facts = self._facts
        before = int(facts.befores[parent]) + int(facts.sizes[parent])
        if self._count < JUDGES_MIN or COMPETES_SHARE * (before + size) <= self._bytes:
            return True
        coldest = self._coldest_item()
        if coldest is None:
            return True
        tags, now = tags_of(np.array([digest], np.uint64)), np.array([self._clock.now])
        ghost = self._ghosts.find(tags, now)
        gap = np.where(
            ghost.there, np.where(ghost.unused > 0, gaps(ghost.unused), ghost.gaps), self._traits[parent] % GAPS
        )
        agents = joined(ghost.agents, np.array([agent]))
        of = traits(often(ghost.uses + 1), deep(facts.depths[[parent]].astype(np.int64) + 1), gap)
        (weight,) = self._costs.weights(np.array([size]), np.array([cost]), np.array([tokens]))
        (number,) = self._classes.of(of, agents)
        if self._hazards.index[number, 0] * weight >= coldest[0]:
            return True
        self._ages.use(tags, of, agents, now, ghost.unused > 0)
        self._remember(tags, now, ghost.uses + 1, gap, agents)
        return False

    def explain(self, row: int) -> Explained:
        self.take_in()
        self._begin_round()
        at = np.array([row])
        told = self._explained(self._uses[at], self._traits[at], self._agents[at], self._as_of - self._used_at[at])
        return replace(told, worth=float(self._ranks(at)[0][0]), in_window=self.in_window(row))

    def recall(self, digest: int) -> Explained | None:
        self.take_in()
        self._begin_round()
        ghost = self._ghosts.find(tags_of(np.array([digest], np.uint64)), self._as_of)
        if not ghost.there[0]:
            return None
        return self._explained(
            ghost.uses, traits(often(ghost.uses), np.array([0]), ghost.gaps), ghost.agents, ghost.unused
        )

    def _explained(self, uses: Array, of: Array, agents: Array, unused: Array) -> Explained:
        """What is known of one entry with these uses, traits and agent, unused for so long."""
        (number,), (at,) = self._classes.of(of, agents), buckets(unused)
        like = words(int(of[0]), int(self._classes.states[agents[0]]))
        comes_back = self._hazards.comes_back(number, at)
        return Explained(float(self._hazards.index[number, at]), int(uses[0]), like, comes_back)

    # ---- rounds and ranks

    @property
    def _round_is_over(self) -> bool:
        return self._hazards.uses >= self._due or self._put_bytes >= self._due_bytes

    def _begin_round(self) -> None:
        if not self._round_is_over:
            return
        count, put_bytes = self._count, self._put_bytes
        self._due = self._hazards.uses + min(max(ROUND_USES, count // ROUND_ROWS), 1 + count // 16)
        self._due_bytes = put_bytes + 1 + int(ROUND_SHARE * self._bytes)
        self._as_of = self._clock.now
        self._pools.clear()

    def _ranks(self, rows: Array) -> tuple[Array, Array]:
        used_at = self._used_at[rows]
        agents = self._agents[rows]
        states, classes = self._classes.states[agents], self._classes.of(self._traits[rows], agents)
        at = buckets(self._as_of - used_at)
        worths = self._hazards.index[classes, at] * self._weights[rows]
        finished = states == FINISHED
        worths[finished] = FINISHED_RANK
        return worths, np.where(finished | (at >= self._hazards.peak[classes]), used_at, -used_at)

    def _are_current(self, rows: Array, worths: Array, orders: Array) -> Array:
        current: Array = self._used_at[rows] == np.abs(orders)
        return current

    def _filled(self, most: int, owners: Array | None) -> Pool:
        sample, share = self._sample(min(max(RANKED_EACH * most, SAMPLE), RANKED_MAX), owners)
        if share < 1 and len(sample) < most:
            sample, share = self._sample(self._top, owners)
        if share < 1 and owners is None:
            sample = self._with_near(sample)
        pool = self._pool(sample, min(max(POOL, (1 + KEPT_EACH) * most), len(sample)))
        if owners is None:
            self._near = pool.rows
        return pool

    def _with_near(self, sample: Array) -> Array:
        """A sample, and those of the last one's coldest rows that may still go."""
        near = self._outside(self._near[self._flags[self._near] == KNOWN], None)
        is_near = np.zeros(self._top, np.bool_)
        is_near[near] = True
        return np.concatenate([near, sample[~is_near[sample]]])

    # ---- restarts

    def learned(self) -> Iterator[bytes]:
        """The learned state; by digest the record of each row, 25 bytes; and the ghosts, 13 bytes each."""
        self.take_in()
        yield from self._ghosts.saved()
        rows = np.flatnonzero(self._flags[: self._top] & KNOWN)
        yield msgpack.packb(
            {
                "version": _VERSION,
                "clock": self._clock.learned(),
                "last": self._last,
                "costs": self._costs.learned(),
                "states": self._classes.states.tobytes(),
                "uses": self._hazards.uses,
                "classes": self._hazards.counts(),
            }
        )
        for column in (self._facts.digests, self._used_at, self._agents, self._uses, self._traits):
            yield column[rows].tobytes()

    def learn(self, data: Sequence[bytes]) -> None:
        """As `Replacement.learn`. The parts that were restored until an error stay."""
        try:
            ghosts, packed, columns = data[:_GHOST_COLUMNS], data[_GHOST_COLUMNS], data[_GHOST_COLUMNS + 1 :]
            state = msgpack.unpackb(packed, strict_map_key=False)
            if state["version"] != _VERSION:
                raise ValueError("the state has another version")
            self._classes.restore(state["states"])
            self._costs.learn(state["costs"])
            self._clock.learn(state["clock"])
            self._hazards.uses = int(state["uses"])
            self._learns_at = self._hazards.uses + ROUND_USES
            self._classes.learn(state["classes"])
            self._learn_rows(float(state["last"]), columns)
            self._ghosts.restore(ghosts, self._remembered_max())
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, msgpack.UnpackException) as error:
            raise ValueError(f"not a learned state of this policy: {error!r}") from error
        self._due = 0

    def _learn_rows(self, last: float, columns: Sequence[bytes]) -> None:
        """Rows that no saved record tells of count as used last, in their order."""
        kinds = ("u8", "f8", "u2", "u4", "u1")
        digests, *values = (np.frombuffer(part, kind) for part, kind in zip(columns, kinds, strict=True))
        if any(len(value) != len(digests) for value in values) or not 0 <= last <= self._clock.now + 1:
            raise ValueError("columns of unequal lengths, or an impossible time")
        fits = (values[0] >= 0) & (values[0] <= last) & (values[3] < TRAITS) & (values[2] > 0)
        known = np.flatnonzero(self._flags[: self._top] & KNOWN)
        known = known[np.argsort(self._used_at[known], kind="stable")]
        rows, found = matched(digests[fits], [value[fits] for value in values], self._facts.digests, known)
        self._used_at[rows], self._agents[rows], self._uses[rows], self._traits[rows] = found
        is_old = np.zeros(self._top, np.bool_)
        is_old[rows] = True
        others = known[~is_old[known]]
        self._used_at[others] = last + TICK * np.arange(1, len(others) + 1)
        self._last = last + TICK * len(others)

    def check_invariants(self) -> None:
        super().check_invariants()
        self._ghosts.check_invariants()
        known = np.flatnonzero(self._flags & KNOWN)
        assert len(np.unique(self._used_at[known])) == len(known)
        assert ((self._uses > 0) == (self._flags > 0)).all()


def tags_of(digests: Array) -> Array:
    """Tags for ghosts and ages: the lower half of the digest, and never 0."""
    tags: Array = np.maximum(digests.astype(np.uint32), 1)
    return tags


def matched(saved: Array, values: Sequence[Array], digests: Array, rows: Array) -> tuple[Array, list[Array]]:
    """Those of `rows` whose digests are among the saved ones, and the saved values for each."""
    order = np.argsort(saved, kind="stable")
    if not len(order):
        return rows[:0], [value[:0] for value in values]
    wanted = digests[rows]
    at = order[np.minimum(np.searchsorted(saved[order], wanted), len(order) - 1)]
    found = saved[at] == wanted
    return rows[found], [value[at[found]] for value in values]
