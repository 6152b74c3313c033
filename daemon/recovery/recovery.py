"""Recovery: takes over ring and index of an earlier daemon, as arrays, in steps of a few milliseconds.

    slots, a few thousand a step ─ published, in agreement with the header → LIVE, key known
                                 └ any other → waits for a scan (REVOKED), as far as no entry lies there
    then: order of offsets, holes → parents and children → sums → the policy learns of the entries → done

An even seq means a complete entry. Every other slot with a span id is allocated: a grant, or a span that waited for a
scan; readers from before may still pin it. An entry of a past generation waits too, and so does one whose parent is
missing: both were about to end. The header has to agree with the slot in key, span id and lengths. Whether its other
fields and the payload are sound is found later, by the scrub or by the first reader: recovered entries are marked as
unverified.

Until the last step the store serves no request; readers need no daemon meanwhile, and clients attach.

Owns: the order of taking over, and what is known only until it has ended. Does not own: the scrub, nor the index of
cached sequences. Parents and children are tied by `relations`.

Invariants: a slot that does not agree with its header is not published any more. Rows that overlap are never both LIVE:
of confirmed ones, the first by offset stays. No byte that an allocated slot names is in a hole before a scan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from operator import itemgetter
from typing import Any, Final

import numpy as np

from ...shm.index.index import SPAN
from ..store.entries import Entries, OverEntries
from ..store.grants import LentGrant
from ..store.table import EDGE, FREE, LIVE, REVOKED, WITHDRAWN
from .former_slots import FormerSlots
from .ordering import by_time, sort
from .relations import tie

ROWS_AT_ONCE: Final = 1 << 15
Array = np.ndarray[Any, Any]


class Recovery(OverEntries):
    """The taking over of one ring, by a store without entries.

    Args:
        now: the time, by the clock of the headers.
        missing: the stretches (offset, bytes) of the ring, whole pages in ascending order, that are not in memory.
        is_past: whether a key's generation is past; asked for namespaces in `tenants.invalidated`.
    """

    def __init__(
        self,
        entries: Entries,
        now: float,
        missing: Iterable[tuple[int, int]],
        is_past: Callable[[bytes], bool],
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
        self.done = False

    def run(self) -> Recovery:
        """All steps at once."""
        for _ in self.steps():
            pass
        return self

    def steps(self) -> Iterator[None]:
        """Takes over; a step ends at each value, none takes more than some 10 ms with a million entries."""
        yield from self._former.steps()
        yield from self._order()
        yield from self._relate()
        yield from self._sum()
        yield from self._tell_policy()
        self.corrupt = self._former.corrupt
        del self._former
        self.done = True

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
