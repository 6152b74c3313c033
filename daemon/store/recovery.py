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
from typing import Any, Final

import numpy as np

from ...errors import LimitReached
from ...shm.layout import BUCKET_SLOTS, PLACE_OFFSET_MASK, PLACE_UNVERIFIED, SPAN_HEADER_BYTES, IndexGeometry
from ...shm.slots import BUCKET_CELLS, LENGTH, PLACE, SPAN, cells_of
from ..replacement import Replacement
from .families import Families
from .former_headers import are_sound, expires_s, headers_at, in_agreement
from .grants import Grants, LentGrant
from .holes import Holes
from .relations import tie
from .slots import Slots
from .table import EDGE, FREE, LIVE, REVOKED, WITHDRAWN, RowTable
from .tenants import Tenants

CELLS_AT_ONCE: Final = 9 << 13
ENTRIES_AT_ONCE: Final = 1 << 12
"""Entries of one step, which takes 5 ms."""
ROWS_AT_ONCE: Final = 1 << 15
COST_MAX: Final = 1e12
SECONDS_MAX: Final = 1e12

Array = np.ndarray[Any, Any]


class Recovery:
    """The taking over of one ring, into the empty parts of a store.

    Args:
        ring: the ring's bytes, as many as its capacity.
        now: the time, by the clock of the headers.
        missing: the stretches (offset, bytes) of the ring, whole pages in ascending order, that are not in memory.
        is_past: whether a key's generation is past; asked for namespaces in `tenants.invalidated`.
    """

    def __init__(
        self,
        table: RowTable,
        holes: Holes,
        slots: Slots,
        grants: Grants,
        tenants: Tenants,
        families: Families,
        policy: Replacement,
        geometry: IndexGeometry,
        ring: memoryview,
        now: float,
        missing: Iterable[tuple[int, int]] = (),
        is_past: Callable[[bytes], bool] = lambda key: False,
    ) -> None:
        assert table.count == 0
        self._table = table
        self._holes = holes
        self._slots = slots
        self._grants = grants
        self._tenants = tenants
        self._families = families
        self._policy = policy
        self._ring = ring
        self._now = now
        self._missing = np.array(list(missing), np.int64).reshape(-1, 2)
        self._is_past = is_past
        self._cells = cells_of(slots.memory, geometry)
        self._reuse = np.frombuffer(slots.memory, "u8", geometry.slot_count, geometry.uses_at)
        self._states = np.frombuffer(table.states, np.uint8)
        self._waiting: list[tuple[int, int, int]] = []
        """(slot, offset, bytes) of allocated slots that are no entries."""
        self._late: list[Array] = []
        """Published slots whose span ids do not say a row that is free."""
        self._created = np.zeros(table.row_mask + 1)
        self._used = np.zeros(table.row_mask + 1)
        self._children: list[tuple[Array, Array, list[bytes]]] = []
        """Rows, their span ids, and the keys of their parents."""
        self._timed: list[tuple[Array, Array, Array]] = []
        self._says = np.zeros(table.row_mask + 1, np.uint32)
        self.corrupt = 0
        """Published slots that were not taken over, because of damage."""
        self.rows = np.zeros(0, np.int64)
        """Once done: the entries in the order of their last uses."""
        self.timed: tuple[Array, Array, Array] = (np.zeros(0), self.rows, self.rows)
        """Once done: when entries expire, the soonest first; their rows; and their span ids."""
        self.done = False

    def run(self) -> Recovery:
        """All steps at once."""
        for _ in self.steps():
            pass
        return self

    def steps(self) -> Iterator[None]:
        """Takes over; a step ends at each value, none takes more than some 10 ms with a million entries."""
        for first in range(0, len(self._cells), CELLS_AT_ONCE):
            self._read(first)
            yield
        rows = np.flatnonzero(self._states == LIVE)
        for first in range(0, len(rows), ENTRIES_AT_ONCE):
            some = rows[first : first + ENTRIES_AT_ONCE]
            self._enter(some, self._table.column("slots")[some].astype(np.int64))
            yield
        yield from self._place_late()
        yield from self._order()
        yield from self._relate()
        yield from self._sum()
        yield from self._tell_policy()
        del self._created, self._used, self._cells, self._says, self._children, self._timed, self._late
        self.done = True

    # ---- slots and headers

    def _read(self, first: int) -> None:
        """Gives rows to the published slots among some cells. What else is allocated waits."""
        cells = self._cells[first : first + CELLS_AT_ONCE]
        spans = cells[:, SPAN].copy()
        at = np.flatnonzero(spans)
        # The first cell of a bucket has the fingerprints of the others.
        at = at[at % BUCKET_CELLS > 0]
        number = (at + first) // BUCKET_CELLS * BUCKET_SLOTS + at % BUCKET_CELLS - 1
        published = cells[at, 0] & np.uint64(1) == 0
        for each in number[~published].tolist():
            self._waits(each)
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
        size = SPAN_HEADER_BYTES + _aligned(whole[:, LENGTH])
        inside = (tree > 0) & (offset + size <= len(self._ring))
        head = headers_at(self._ring, np.where(inside, offset, 0))
        sound = inside & in_agreement(head, whole, tree) & are_sound(head)
        sound &= _in_its_bucket(whole[:, 1:5], bucket, self._slots.mask) & self._is_there(offset, size)
        names = _numbers(whole[:, 1], self._namespace, sound)
        owners = _numbers(head["uid"], self._tenants.owner, sound)
        sound &= (names >= 0) & (owners >= 0)
        self.corrupt += len(rows) - int(np.count_nonzero(sound))
        sound &= ~self._past(whole[:, 1], head, sound)
        if not sound.all():
            for each in number[~sound].tolist():
                self._slots.unpublish(each)
                self._waits(each)
            self._states[rows[~sound]] = FREE
            rows, number, whole, offset, size = rows[sound], number[sound], whole[sound], offset[sound], size[sound]
            names, owners, head = names[sound], owners[sound], head[sound]
        self._cells[number + number // BUCKET_SLOTS + 1, PLACE] |= np.uint64(PLACE_UNVERIFIED)
        spans = whole[:, SPAN]
        created = _possible(head["created"], self._now)
        ticks = self._reuse[number] >> np.uint64(16) & np.uint64((1 << 32) - 1)
        for column, values in (
            (table.column("span_ids"), spans),
            (table.column("offsets"), offset),
            (table.column("sizes"), size),
            (table.column("payloads"), whole[:, LENGTH]),
            (table.column("digests"), whole[:, 3]),
            (table.column("costs"), _possible(head["cost"], COST_MAX)),
            (table.column("ends"), _possible(head["ttl"], SECONDS_MAX)),
            (table.column("tokens"), np.minimum(head["tokens"], 0xFFFF_FFFF)),
            (table.column("slots"), number),
            (table.column("records"), head["prefix"]),
            (table.column("namespaces"), names),
            (table.column("owners"), owners),
            (self._created, created),
            (self._used, np.maximum(created, np.minimum(ticks / 64, self._now))),
        ):
            column[rows] = values
        self._states[rows] = LIVE
        numbers = rows.tolist()
        keys: list[bytes] = whole[:, 1:5].copy().view("V32").reshape(-1).tolist()
        kept = list(map(table.by_key.setdefault, keys, numbers))
        if kept != numbers:
            # A move was killed between its copy's publication and the end of the old place.
            for row, had, key in zip(numbers, kept, keys, strict=True):
                if row != had:
                    self._drop(row)
                    table.by_key[key] = had
        expires = expires_s(head)
        if len(ends := np.flatnonzero(expires)):
            self._timed.append((expires[ends], rows[ends], spans[ends]))
        if len(has_parent := np.flatnonzero(head["has_parent"])):
            parents = head["parent"][has_parent].tolist()
            self._children.append((rows[has_parent], spans[has_parent], parents))

    def _waits(self, slot: int) -> None:
        """An unpublished slot with a span id is allocated: its bytes are free after a scan. A grant has no tree, and
        its length is that of all its bytes."""
        words, at = self._slots.words, self._slots.at(slot)
        place = words[at + PLACE]
        size = min((words[at + LENGTH] + 63 & -64) + (SPAN_HEADER_BYTES if place >> 48 else 0), len(self._ring))
        offset = place & PLACE_OFFSET_MASK
        if words[at + LENGTH] and offset + size <= len(self._ring):
            self._waiting.append((slot, offset, size))
        else:
            self._slots.release(slot)

    def _drop(self, row: int) -> None:
        """A row that is not in order yet is none: its slot waits."""
        table = self._table
        slot = table.slots[row]
        table.by_key.pop(self._slots.key(slot), None)
        self._slots.unpublish(slot)
        self._states[row] = FREE
        table.records[row], table.ends[row] = 0, 0.0
        self._waits(slot)

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
        """Which stretches have all their pages."""
        if not len(self._missing):
            return np.ones(len(offset), np.bool_)
        at = np.searchsorted(self._missing[:, 0], offset + size) - 1
        there: Array = (at < 0) | (self._missing[at].sum(axis=1) <= offset)
        return there

    # ---- rows, their order, and holes

    def _place_late(self) -> Iterator[None]:
        """Gives rows to entries whose span ids do not say them: of a daemon with another number of rows."""
        table, late = self._table, np.concatenate([np.zeros(0, np.int64), *self._late])
        free = np.flatnonzero(self._states[1:] == FREE)[: len(late)] + 1
        for first in range(0, len(late), ENTRIES_AT_ONCE):
            numbers, rows = [], []
            for number in late[first : first + ENTRIES_AT_ONCE].tolist():
                span_id = self._slots.words[self._slots.at(number) + SPAN]
                if len(free) <= first + len(rows) or self._states[table.row_of(span_id)] != FREE:
                    # Its span id is another entry's; or it has no row, in an index with too many slots.
                    self.corrupt += 1
                    self._slots.unpublish(number)
                    self._waits(number)
                    continue
                row = int(free[first + len(rows)])
                table.strangers[span_id] = row
                table.span_ids[row], self._states[row] = span_id, LIVE
                numbers.append(number)
                rows.append(row)
            self._enter(np.array(rows, np.int64), np.array(numbers, np.int64))
            yield
        for span_id, row in list(table.strangers.items()):
            if self._states[row] == FREE:
                del table.strangers[span_id]

    def _order(self) -> Iterator[None]:
        """Puts the rows into the order of their offsets; adds those that wait, and those without pages; finds holes."""
        table, bits = self._table, self._table.row_bits
        rows = np.flatnonzero(self._states == LIVE)
        # Numbers are sorted several times as fast as they are ranked.
        packed = table.column("offsets")[rows] >> np.uint64(6) << np.uint64(bits) | rows.astype(np.uint64)
        yield
        packed.sort()
        yield
        rows = (packed & np.uint64(table.row_mask)).astype(np.int64)
        starts = (packed >> np.uint64(bits) << np.uint64(6)).astype(np.int64)
        ends = starts + table.column("sizes")[rows].astype(np.int64)
        yield
        if (starts[1:] < np.maximum.accumulate(ends)[:-1]).any():
            rows, starts = self._apart(rows, starts, ends)
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
        before_of = _Before(rows, starts)
        for offset, size in self._missing.tolist():
            for low, high, before in table.gaps(offset, offset + size, before_of(table, offset)):
                added.append(table.add(WITHDRAWN, low, high - low, before))
        for at, (slot, offset, size) in enumerate(self._waiting):
            added += self._wait(slot, offset, size, before_of(table, offset))
            if at % 1024 == 1023:
                yield
        new = np.array(added, np.int64)
        new = new[np.argsort(table.column("offsets")[new], kind="stable")]
        at = np.searchsorted(starts, table.column("offsets")[new].astype(np.int64))
        self._holes.found(np.insert(rows, at, new))
        yield

    def _apart(self, rows: Array, starts: Array, ends: Array) -> tuple[Array, Array]:
        """Damage: drops the rows that overlap with one before them."""
        fits, end = np.ones(len(rows), np.bool_), 0
        for at, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
            if start < end:
                self.corrupt += 1
                self._drop(row)
                fits[at] = False
            else:
                end = int(ends[at])
        return rows[fits], starts[fits]

    def _wait(self, slot: int, offset: int, size: int, before: int) -> list[int]:
        """The parts of [offset, offset + size) that no row has wait for a scan of the slot's span id."""
        table, grants, owner = self._table, self._grants, self._tenants.owner(0)
        pieces = []
        for low, high, behind in table.gaps(offset, offset + size, before):
            row = table.add(REVOKED, low, high - low, behind)
            assert row != EDGE, "fewer rows than an index of these slots needs"
            table.owners[row] = owner
            self._tenants.lent(owner, high - low)
            pieces.append(row)
        span_id: int = self._slots.words[self._slots.at(slot) + SPAN]
        if pieces and span_id in grants.revoked:
            # Two damaged slots with one id: the bytes wait together.
            grants.revoked[span_id].pieces.extend(pieces)
            self._slots.release(slot)
        elif pieces:
            self._revoked(LentGrant(0, owner, span_id, slot, self._slots.seq(slot), pieces))
        else:
            self._slots.release(slot)
        return pieces

    def _end(self, row: int) -> None:
        """An entry without its parent waits for a scan."""
        table = self._table
        slot, owner = table.slots[row], table.owners[row]
        del table.by_key[self._slots.key(slot)]
        self._slots.unpublish(slot)
        self._states[row] = REVOKED
        table.records[row] = 0
        self._tenants.lent(owner, table.sizes[row])
        self._revoked(LentGrant(0, owner, table.span_ids[row], slot, self._slots.seq(slot), [row]))

    def _revoked(self, grant: LentGrant) -> None:
        self._grants.revoked[grant.span_id] = grant
        self._grants.fresh[grant.span_id] = None

    # ---- what follows from the rows

    def _relate(self) -> Iterator[None]:
        """Ties the entries to their parents. Those whose parents are missing wait for a scan."""
        children, parents = [], []
        for rows, spans, keys in self._children:
            still = (self._table.column("span_ids")[rows] == spans) & (self._states[rows] == LIVE)
            children.append(rows[still])
            parents.append(np.array(list(map(self._table.by_key.get, keys, repeat(EDGE))), np.int64)[still])
            yield
        if children:
            lost = yield from tie(self._table, self._families, np.concatenate(children), np.concatenate(parents))
            for row in lost.tolist():
                self._end(row)

    def _sum(self) -> Iterator[None]:
        """The sums of namespaces and owners."""
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
        if self._timed:
            when, rows, spans = (np.concatenate(each) for each in zip(*self._timed, strict=True))
            still = np.flatnonzero((self._states[rows] == LIVE) & (table.column("span_ids")[rows] == spans))
            still = still[np.argsort(when[still])]
            self.timed = when[still], rows[still], spans[still]
            yield

    def _tell_policy(self) -> Iterator[None]:
        depths = self._table.column("depths")
        by_put = _by_time(self._created, depths, self.rows, self._table.row_bits)
        yield
        self.rows = _by_time(self._used, depths, self.rows, self._table.row_bits)
        yield
        yield from self._policy.recovering(self.rows, by_put, self._now)


class _Before:
    """Finds the row before an offset, among those in order when this was made, and walks from there."""

    def __init__(self, rows: Array, starts: Array) -> None:
        self._rows, self._starts = rows, starts

    def __call__(self, table: RowTable, offset: int) -> int:
        at = int(np.searchsorted(self._starts, offset)) - 1
        before = int(self._rows[at]) if at >= 0 else EDGE
        while before != EDGE and table.end(before) > offset:
            before = table.prevs[before]
        return before


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


def _aligned(lengths: Array) -> Array:
    found: Array = np.minimum(lengths, np.uint64(1 << 48)).astype(np.int64) + 63 & -64
    return found


def _possible(values: Array, most: float) -> Array:
    """The values, none of them damaged so much that sums and orders would suffer."""
    found: Array = np.clip(np.nan_to_num(values), 0.0, most)
    return found


def _by_time(times: Array, depths: Array, rows: Array, row_bits: int) -> Array:
    """Rows in the order of their times, to a millionth of a second or of 2 ** 20 seconds; of equal ones, parents before
    their children."""
    if not len(rows):
        return rows
    of = times[rows]
    of -= of.min()
    scale = min(1e6, (1 << 62 - row_bits) / max(float(of.max()), 1.0))
    packed = ((of * scale).astype(np.uint64) + depths[rows]) << np.uint64(row_bits) | rows.astype(np.uint64)
    packed.sort()
    found: Array = (packed & np.uint64((1 << row_bits) - 1)).astype(np.int64)
    return found
