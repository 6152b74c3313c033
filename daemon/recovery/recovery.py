"""Recovery: takes over ring and index of an earlier daemon, as arrays, in steps of a few milliseconds.

    slots, a few thousand a step ─ published, in agreement with the header → LIVE, key known
                                 └ any other → waits for a scan (REVOKED), as far as no entry lies there
    then: order of offsets, holes → parents and children → sums → the policy learns of the entries → done

An even seq means a complete entry. Every other slot with a span id is allocated, and readers from before may still pin
it. An entry of a past generation waits too, and so does one whose parent is missing: both were about to end. The header
has to agree with the slot in key, span id and lengths. Whether all else is sound is found later, by the scrub or by the
first reader: recovered entries are marked as unverified.

Owns: the order of taking over, the columns of families until it has ended, and what is known only until then. Does not
own: the scrub, nor the index of cached sequences.

Invariants: a slot that does not agree with its header is not published any more. Rows that overlap are never both LIVE:
of confirmed ones, the first by offset stays. No byte that an allocated slot names is in a hole before a scan. Whoever
is tied to a parent has all its ancestors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import repeat
from operator import itemgetter
from typing import Any, Final

import numpy as np

from ...shm.index.index import SPAN
from ..store.entries import Entries, OverEntries
from ..store.families import DEPTH_MAX, Families
from ..store.grants import LentGrant
from ..store.table import EDGE, FREE, LIVE, REVOKED, WITHDRAWN, RowTable
from .former_slots import FormerSlots

ROWS_AT_ONCE: Final = 1 << 15
SORTED_AT_ONCE: Final = 1 << 17
STEP_ROWS: Final = 1 << 14
STEP_LEVELS: Final = 128
Array = np.ndarray[Any, Any]


class Recovery(OverEntries):
    """The taking over of one ring, by a store without entries. `now`: the time, by the clock of the headers. `missing`:
    the stretches (offset, bytes) of the ring, whole pages in ascending order, that are not in memory. `is_past`:
    whether a key's generation is past; asked for namespaces in `tenants.invalidated`."""

    def __init__(
        self, entries: Entries, now: float, missing: Iterable[tuple[int, int]], is_past: Callable[[bytes], bool]
    ) -> None:
        assert entries.table.count == 0
        super().__init__(entries)
        self._now = now
        self._missing = list(missing)
        self._former = FormerSlots(entries, now, self._missing, is_past)
        self._states = np.frombuffer(self._table.states, np.uint8)
        self.rows = np.zeros(0, np.int64)
        """Once done: the entries in the order of their last uses."""
        self.corrupt = 0
        """Once done: published slots that were not taken over, because of damage."""

    def steps(self) -> Iterator[None]:
        """Takes over; a step ends at each value, none takes more than some 10 ms with a million entries."""
        yield from self._former.steps()
        yield from self._order()
        yield from self._relate()
        yield from self._sum()
        yield from self._tell_policy()
        self.corrupt = self._former.corrupt
        del self._former

    # ---- rows, their order, and holes

    def _order(self) -> Iterator[None]:
        """Puts the rows into the order of their offsets; adds those that wait, and those without pages; finds holes."""
        table, bits = self._table, self._table.row_bits
        rows = np.flatnonzero(self._states == LIVE)
        # Numbers are sorted several times as fast as they are ranked.
        packed = table.column("offsets")[rows] >> np.uint64(6) << np.uint64(bits) | rows.astype(np.uint64)
        yield
        yield from sort(packed)
        rows = (packed & np.uint64(table.row_mask)).astype(np.int64)
        starts = (packed >> np.uint64(bits) << np.uint64(6)).astype(np.int64)
        ends = starts + table.column("sizes")[rows].astype(np.int64)
        yield
        if (starts[1:] < np.maximum.accumulate(ends)[:-1]).any():
            rows, starts, ends = self._apart(rows, starts, ends)
        used = self._states != FREE
        used[EDGE] = True
        table.reserve(used)
        table.count = len(rows)
        yield
        around = np.concatenate([[EDGE], rows, [EDGE]])
        table.column("nexts")[around[:-1]] = around[1:]
        table.column("prevs")[around[1:]] = around[:-1]
        yield
        added: list[int] = []

        def row_before(offset: int, rows: Array = rows, starts: Array = starts) -> int:
            """Among those in order now; walks from there."""
            at = int(np.searchsorted(starts, offset)) - 1
            before = int(rows[at]) if at >= 0 else EDGE
            while before != EDGE and table.end(before) > offset:
                before = table.prevs[before]
            return before

        for offset, size in self._missing:
            for low, high, before in table.gaps(offset, offset + size, row_before(offset)):
                added.append(table.add(WITHDRAWN, low, high - low, before))
        former, last, last_end = self._former, None, 0
        for count, (slot, offset, size) in enumerate((*former.waiting, *sorted(former.grants, key=itemgetter(1)))):
            pieces = self._pieces(offset, size, row_before(offset))
            added += pieces
            if count <= len(former.waiting) or last is None or offset >= last_end:
                last, last_end = self._wait(slot, pieces), offset + size
            else:
                last.pieces += pieces
                last.also.append((self._slots.words[self._slots.at(slot) + SPAN], slot))
                last_end = max(last_end, offset + size)
            if count % 1024 == 1023:
                yield
        new = np.array(added, np.int64)
        new = new[np.argsort(table.column("offsets")[new], kind="stable")]
        begin = table.column("offsets")[new].astype(np.int64)
        at = np.searchsorted(starts, begin)
        end = begin + table.column("sizes")[new].astype(np.int64)
        yield
        rows, starts, ends = np.insert(rows, at, new), np.insert(starts, at, begin), np.insert(ends, at, end)
        yield
        self._holes.found(rows, starts, ends)
        yield

    def _apart(self, rows: Array, starts: Array, ends: Array) -> tuple[Array, Array, Array]:
        """Damage: drops the rows that overlap with one before them."""
        fits, end = np.ones(len(rows), np.bool_), 0
        for at, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
            if start < end:
                self._former.corrupt += 1
                self._former.drop(row)
                fits[at] = False
            else:
                end = int(ends[at])
        return rows[fits], starts[fits], ends[fits]

    def _pieces(self, offset: int, size: int, before: int) -> list[int]:
        """Rows of the parts of [offset, offset + size) that no row has. They wait for a scan."""
        table, pieces = self._table, []
        owner = self._tenants.owner(0)
        for low, high, behind in table.gaps(offset, offset + size, before):
            row = table.add(REVOKED, low, high - low, behind)
            assert row != EDGE, "fewer rows than an index of these slots needs"
            table.owners[row] = owner
            self._tenants.owned_bytes[owner] += high - low
            pieces.append(row)
        return pieces

    def _wait(self, slot: int, pieces: list[int]) -> LentGrant | None:
        """The pieces wait for a scan of the slot's span id. None if there are none: then nothing waits."""
        if not pieces:
            self._slots.release(slot)
            return None
        return self._revoked(self._slots.words[self._slots.at(slot) + SPAN], self._tenants.owner(0), slot, pieces)

    def _end(self, row: int) -> None:
        """An entry without its parent waits for a scan."""
        table = self._table
        slot, owner = table.slots[row], table.owners[row]
        del table.by_key[self._slots.key(slot)]
        self._slots.unpublish(slot)
        self._states[row] = REVOKED
        table.records[row], table.ends[row] = 0, 0.0
        self._tenants.owned_bytes[owner] += table.sizes[row]
        self._revoked(table.span_ids[row], owner, slot, [row])

    def _revoked(self, span_id: int, owner: int, slot: int, pieces: list[int]) -> LentGrant:
        revoked = self._grants.revoked
        if span_id in revoked:
            # Two slots with one id, of which one is damaged: their bytes wait together.
            revoked[span_id].pieces.extend(pieces)
            self._slots.release(slot)
        else:
            revoked[span_id] = LentGrant(0, owner, span_id, slot, self._slots.words[self._slots.at(slot)], pieces)
            self._grants.fresh[span_id] = None
        return revoked[span_id]

    # ---- what follows from the rows

    def _relate(self) -> Iterator[None]:
        """Ties the entries to their parents. Those whose parents are missing wait for a scan."""
        children, parents = [], []
        for rows, spans, keys in self._former.children:
            still = (self._table.column("span_ids")[rows] == spans) & (self._states[rows] == LIVE)
            children.append(rows[still])
            parents.append(np.array(list(map(self._table.by_key.get, keys.tolist(), repeat(EDGE))), np.int64)[still])
            yield
        if children:
            lost = yield from tie(self._table, self._families, np.concatenate(children), np.concatenate(parents))
            for row in lost.tolist():
                self._end(row)

    def _sum(self) -> Iterator[None]:
        table, tenants = self._table, self._tenants
        self.rows = np.flatnonzero(self._states == LIVE)
        for first in range(0, len(self.rows), ROWS_AT_ONCE):
            rows = self.rows[first : first + ROWS_AT_ONCE]
            sizes, tokens = table.column("sizes")[rows], table.column("tokens")[rows]
            for sums, which, amounts in (
                (tenants.entries, "namespaces", None),
                (tenants.bytes, "namespaces", sizes),
                (tenants.owned_entries, "owners", None),
                (tenants.owned_bytes, "owners", sizes),
                (tenants.owned_tokens, "owners", tokens),
            ):
                # Sums of doubles are exact here: a chunk has less than 2 ** 53 bytes.
                counted = np.bincount(table.column(which)[rows], amounts)
                for number in np.flatnonzero(counted).tolist():
                    sums[number] += int(counted[number])
            tenants.total_entries += len(rows)
            tenants.total_tokens += int(tokens.sum())
            yield
        tenants.counted()

    def _tell_policy(self) -> Iterator[None]:
        depths = self._table.column("depths")
        by_put = yield from by_time(self._former.created, depths, self.rows, self._table.row_bits)
        yield
        self.rows = yield from by_time(self._former.used, depths, self.rows, self._table.row_bits)
        yield
        yield from self._policy.recovering(self.rows, by_put, self._former.uses, self._now)


def tie(table: RowTable, families: Families, children: Array, parents: Array) -> Generator[None, None, Array]:
    """Makes each of `children` a child of its parent; EDGE: its parent is not stored. Returns the rows that were not
    tied, since their parent or another ancestor is missing."""
    if not len(children):
        return children
    bits, depths, befores = table.row_bits, table.column("depths"), table.column("befores")
    # Sorted by parents, so that the children of one are neighbours; among them the order is that of rows.
    packed = parents.astype(np.uint64) << np.uint64(bits) | children.astype(np.uint64)
    yield
    yield from sort(packed)
    children = (packed & np.uint64(table.row_mask)).astype(np.int64)
    parents = (packed >> np.uint64(bits)).astype(np.int64)
    begins = np.flatnonzero(np.concatenate([[True], parents[1:] != parents[:-1]]))
    counts = np.diff(np.append(begins, len(parents)))
    first, count = np.zeros(table.row_mask + 1, np.int64), np.zeros(table.row_mask + 1, np.int64)
    first[parents[begins]], count[parents[begins]] = begins, counts
    is_child = np.zeros(table.row_mask + 1, np.bool_)
    is_child[children] = True
    yield
    tied = np.zeros(len(children), np.bool_)
    level = parents[begins][~is_child[parents[begins]] & (parents[begins] != EDGE)]
    yield
    levels = rows = 0
    while len(level):
        many = count[level]
        ends = np.cumsum(many)
        at = np.repeat(first[level] - ends + many, many) + np.arange(int(ends[-1]))
        tied[at] = True
        above, level = np.repeat(level, many), children[at]
        depths[level] = np.minimum(depths[above].astype(np.int64) + 1, DEPTH_MAX)
        befores[level] = befores[above] + table.column("sizes")[above]
        level = level[count[level] > 0]
        levels, rows = levels + 1, rows + len(at)
        if rows >= STEP_ROWS or levels >= STEP_LEVELS:
            levels = rows = 0
            yield
    lost, children, parents = children[~tied], children[tied], parents[tied]
    yield
    table.column("parents")[children] = parents
    yield
    same = np.flatnonzero(parents[1:] == parents[:-1])
    table.column("olders")[children[same + 1]] = children[same]
    table.column("newers")[children[same]] = children[same + 1]
    yield
    begins = np.flatnonzero(np.concatenate([np.ones(min(len(parents), 1), np.bool_), parents[1:] != parents[:-1]]))
    ends = np.append(begins[1:], len(parents))[: len(begins)]
    table.column("firsts")[parents[begins]] = children[ends - 1]
    table.column("children")[parents[begins]] = ends - begins
    families.linked += len(children)
    return lost


def sort(numbers: Array) -> Iterator[None]:
    if len(numbers) <= SORTED_AT_ONCE:
        numbers.sort()
    else:
        half = len(numbers) // 2
        numbers.partition(half)
        yield
        yield from sort(numbers[:half])
        yield from sort(numbers[half:])
    yield


def by_time(times: Array, depths: Array, rows: Array, row_bits: int) -> Generator[None, None, Array]:
    """Rows in the order of their times, to a millionth of a second or of 2 ** 20 seconds; of equal ones, parents before
    their children."""
    if not len(rows):
        return rows
    of = times[rows]
    of -= of.min()
    scale = min(1e6, (1 << 62 - row_bits) / max(float(of.max()), 1.0))
    packed = ((of * scale).astype(np.uint64) + depths[rows]) << np.uint64(row_bits) | rows.astype(np.uint64)
    yield
    yield from sort(packed)
    found: Array = (packed & np.uint64((1 << row_bits) - 1)).astype(np.int64)
    return found
