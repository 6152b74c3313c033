"""Published slots of an earlier daemon become rows; each in a step of its own, some thousand slots.

    slots, in their order ─ published → a row, which the span id says      (`_read`)
                          └ not       → waits
    rows, as they ascend  ─ slot and header agree → columns, key           (`_enter`)
                          └ not → unpublished, waits

Owns: which slots are taken over as entries, and what is known of entries only during the recovery. Does not own: the
order of their bytes, parents, nor what waits.

Invariant: once all steps are done, a slot is published exactly if its row is LIVE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np

from ...errors import LimitReached
from ...shm.index.index import BUCKET_CELLS, LENGTH, PLACE, PLACE_OFFSET_MASK, PLACE_UNVERIFIED, SPAN, cells_of
from ...shm.ring.layout import BUCKET_SLOTS, SPAN_HEADER_BYTES
from ..store.entries import Entries, OverEntries
from ..store.slots import unpack_uses
from ..store.table import EDGE, FREE, LIVE
from .former_headers import HEADER, are_sound, expires_s, headers_at, in_agreement

CELLS_AT_ONCE: Final = BUCKET_CELLS << 13
ENTRIES_AT_ONCE: Final = 1 << 12
"""Entries of one step, which takes 5 ms."""
COST_MAX: Final = 1e12

Array = np.ndarray[Any, Any]


class FormerSlots(OverEntries):
    """The slots of one index. The arguments are those of `Recovery`."""

    def __init__(
        self, entries: Entries, now: float, missing: Iterable[tuple[int, int]], is_past: Callable[[bytes], bool]
    ) -> None:
        geometry, table = entries.memory.geometry, entries.table
        super().__init__(entries)
        self._ring = entries.ring[: entries.memory.ready_bytes]
        self._now = now
        self._missing = np.array(list(missing), np.int64).reshape(-1, 2)
        self._is_past = is_past
        self._cells = cells_of(self._slots.memory, geometry)
        self._states = np.frombuffer(table.states, np.uint8)
        self._says = np.zeros(table.row_mask + 1, np.uint32)
        self._late: list[Array] = []
        """Published slots whose span ids say no row, or one that another slot has."""
        self.waiting: list[tuple[int, int, int]] = []
        """(slot, offset, bytes) of allocated slots that are no entries: what waited for a scan, and copies of moves."""
        self.grants: list[tuple[int, int, int]] = []
        """The same of grants. Each has the bytes that were lent, also where its client has put entries since."""
        self.children: list[tuple[Array, Array, Array]] = []
        """Rows, their span ids, and the keys of their parents."""
        self.created, self.used = np.zeros(table.row_mask + 1), np.zeros(table.row_mask + 1)
        """By row: the times of its put and of its last use."""
        self.uses = np.zeros(table.row_mask + 1, np.uint16)
        """By row: how often it was used after its put."""
        self.corrupt = 0
        """Published slots that were not taken over, because of damage."""

    def steps(self) -> Iterator[None]:
        for first in range(0, len(self._cells), CELLS_AT_ONCE):
            self._read(first)
            yield
        rows = np.flatnonzero(self._states == LIVE)
        for first in range(0, len(rows), ENTRIES_AT_ONCE):
            some = rows[first : first + ENTRIES_AT_ONCE]
            self._enter(some, self._table.column("slots")[some].astype(np.int64))
            yield
        yield from self._place_late()

    def _read(self, first: int) -> None:
        """Gives rows to the published slots among some cells. What else is allocated waits."""
        cells = self._cells[first : first + CELLS_AT_ONCE]
        # Of a damaged seq only the parity is kept, so that it can be counted up.
        huge = cells[:, 0] >> np.uint64(63) != 0
        huge[::BUCKET_CELLS] = False
        cells[huge, 0] &= np.uint64(1)
        spans, even = cells[:, SPAN].copy(), cells[:, 0] & np.uint64(1) == 0
        # The first cell of a bucket has the fingerprints of the others.
        spans[::BUCKET_CELLS], even[::BUCKET_CELLS] = 0, False
        damaged = np.flatnonzero(even & (spans == 0))
        cells[damaged, 0] += np.uint64(1)
        at = np.flatnonzero(spans)
        number = (at + first) // BUCKET_CELLS * BUCKET_SLOTS + at % BUCKET_CELLS - 1
        published = even[at]
        for each in number[~published].tolist():
            self.wait(each)
        at, number = at[published], number[published]
        rows = (spans[at] & np.uint64(self._table.row_mask)).astype(np.int64)
        # One of those that say the same row has it.
        places = np.arange(1, len(rows) + 1)
        self._says[rows] = places
        own = (self._says[rows] == places) & (rows != EDGE) & (self._states[rows] == FREE)
        self._says[rows] = 0
        if not own.all():
            self._late.append(number[~own])
            rows, number = rows[own], number[own]
        self._states[rows] = LIVE
        self._table.column("slots")[rows] = number

    def _enter(self, rows: Array, number: Array) -> None:
        """Makes entries of published slots, in rows that are LIVE and not in order yet; frees the rows of damaged ones.
        Random accesses take most of the time: the rows ascend, so that only slots and headers need some."""
        table = self._table
        bucket = number // BUCKET_SLOTS
        whole = self._cells.take(number + bucket + 1, axis=0)
        place, tree = whole[:, PLACE], (whole[:, PLACE] >> np.uint64(48)).astype(np.int64)
        offset = (place & np.uint64(PLACE_OFFSET_MASK)).astype(np.int64)
        size = SPAN_HEADER_BYTES + (np.minimum(whole[:, LENGTH], np.uint64(1 << 48)).astype(np.int64) + 63 & -64)
        # A look at a page that is not in memory would make one.
        there = (tree > 0) & (offset + size <= len(self._ring)) & self._is_there(offset, size)
        head = headers_at(self._ring, offset[there])
        if not there.all():
            found, head = head, np.zeros(len(rows), HEADER)
            head[there] = found
        sound = there & in_agreement(head, whole, tree) & are_sound(head)
        sound &= _in_its_bucket(whole[:, 1:5], bucket, self._slots.mask)
        names = _numbers(whole[:, 1], self._namespace, sound)
        owners = _numbers(head["uid"], self._tenants.owner, sound)
        sound &= (names >= 0) & (owners >= 0)
        self.corrupt += len(rows) - int(np.count_nonzero(sound))
        sound &= ~self._past(whole[:, 1], head, sound)
        if not sound.all():
            for each in number[~sound].tolist():
                self._slots.unpublish(each)
                self.wait(each)
            self._states[rows[~sound]] = FREE
            rows, number, whole, offset, size = rows[sound], number[sound], whole[sound], offset[sound], size[sound]
            names, owners, head = names[sound], owners[sound], head[sound]
        self._cells[number + number // BUCKET_SLOTS + 1, PLACE] |= np.uint64(PLACE_UNVERIFIED)
        spans = whole[:, SPAN]
        created = _possible(head["created"], self._now)
        uses, used = unpack_uses(self._slots.reuse[number])
        for column, values in (
            (table.column("span_ids"), spans),
            (table.column("offsets"), offset),
            (table.column("sizes"), size),
            (table.column("payloads"), whole[:, LENGTH]),
            (table.column("digests"), whole[:, 3]),
            (table.column("costs"), _possible(head["cost"], COST_MAX)),
            (table.column("ends"), expires_s(head)),
            (table.column("tokens"), np.minimum(head["tokens"], 0xFFFF_FFFF)),
            (table.column("slots"), number),
            (table.column("records"), head["prefix"]),
            (table.column("namespaces"), names),
            (table.column("owners"), owners),
            (self.created, created),
            (self.used, np.maximum(created, np.minimum(used, self._now))),
            (self.uses, uses),
        ):
            column[rows] = values
        self._states[rows] = LIVE
        numbers = rows.tolist()
        keys: list[bytes] = whole[:, 1:5].copy().view("V32").reshape(-1).tolist()
        kept = list(map(table.by_key.setdefault, keys, numbers))
        if kept != numbers:
            # Damage has brought an entry back whose key was put again.
            for row, had, key in zip(numbers, kept, keys, strict=True):
                if row != had:
                    self.drop(row)
                    table.by_key[key] = had
        if len(has_parent := np.flatnonzero(head["has_parent"])):
            self.children.append((rows[has_parent], spans[has_parent], head["parent"][has_parent]))

    def wait(self, slot: int) -> None:
        """An unpublished slot with a span id is allocated: its bytes are free after a scan. A grant has no tree, and
        its length is that of all its bytes."""
        words, at = self._slots.words, self._slots.at(slot)
        place = words[at + PLACE]
        size = min((words[at + LENGTH] + 63 & -64) + (SPAN_HEADER_BYTES if place >> 48 else 0), len(self._ring))
        offset = place & PLACE_OFFSET_MASK
        if words[at + LENGTH] and offset + size <= len(self._ring):
            if place >> 48:
                self.waiting.append((slot, offset, size))
            else:
                # SYNC POINT: before the first scan. A client may read of its grant only now, in what the daemon before
                # has sent: it pins the span, and finds another seq.
                self._slots.revoke(slot)
                self.grants.append((slot, offset, size))
        else:
            self._slots.release(slot)

    def drop(self, row: int) -> None:
        """A row that is not in order yet is none: its slot waits."""
        table = self._table
        slot = table.slots[row]
        table.by_key.pop(self._slots.key(slot), None)
        self._slots.unpublish(slot)
        self._states[row] = FREE
        table.records[row], table.ends[row] = 0, 0.0
        self.wait(slot)

    def _namespace(self, tag: int) -> int:
        return self._tenants.add(tag.to_bytes(8, "little"))

    def _past(self, words: Array, head: Array, among: Array) -> Array:
        """Which of `among` are of a past generation. `words`: the tags of their namespaces."""
        past = np.zeros(len(head), np.bool_)
        tags = [int.from_bytes(tag, "little") for tag in self._tenants.invalidated]
        if tags:
            for at in np.flatnonzero(among & np.isin(words, np.array(tags, np.uint64))).tolist():
                past[at] = self._is_past(head["key"][at].tobytes())
        return past

    def _is_there(self, offset: Array, size: Array) -> Array:
        if not len(self._missing):
            return np.ones(len(offset), np.bool_)
        at = np.searchsorted(self._missing[:, 0], offset + size) - 1
        there: Array = (at < 0) | (self._missing[at].sum(axis=1) <= offset)
        return there

    def _place_late(self) -> Iterator[None]:
        """Of slots that say one row, the first that is sound is its entry: the others are damaged, or the other places
        of entries that moved when the daemon was killed."""
        for number in np.concatenate([np.zeros(0, np.int64), *self._late]).tolist():
            row = self._slots.words[self._slots.at(number) + SPAN] & self._table.row_mask
            if row != EDGE and self._states[row] == FREE:
                self._enter(np.array([row]), np.array([number]))
            else:
                self.corrupt += self._slots.key(number) not in self._table.by_key
                self._slots.unpublish(number)
                self.wait(number)
            yield


def _in_its_bucket(keys: Array, bucket: Array, mask: int) -> Array:
    """Which keys have this bucket as one of their two: no reader finds the others."""
    hashes = np.ascontiguousarray(keys).view("<u4")[:, 2:4] & np.uint32(mask)
    first, second = hashes[:, 0].astype(np.int64), hashes[:, 1].astype(np.int64)
    second ^= (second == first) & bool(mask)
    fits: Array = (bucket == first) | (bucket == second)
    return fits


def _numbers(words: Array, number: Callable[[int], int], among: Array) -> Array:
    """The number of each word of `among`; -1 where there are too many, and for the others."""
    found = np.full(len(words), -1)
    of = words[among]
    same = len(of) > 0 and bool((of == of[0]).all())
    some, at = (of[:1], np.zeros(len(of), np.int64)) if same else np.unique(of, return_inverse=True)
    numbers = []
    for word in some.tolist():
        try:
            numbers.append(number(word))
        except LimitReached:
            numbers.append(-1)
    found[among] = np.array(numbers, np.int64)[at]
    return found


def _possible(values: Array, most: float) -> Array:
    """The values, none of them damaged so much that sums and orders would suffer."""
    found: Array = np.clip(np.nan_to_num(values), 0.0, most)
    return found
