"""Recovery: takes over ring and index of an earlier daemon, as arrays in one pass.

    slots ─ header agrees, published → LIVE     ─ sorted by offset: overlaps? → rows, order, holes, keys, sums
          └ any other                → REVOKED: waits for a scan

An even seq means a complete entry. Every other slot with a span id is allocated: a grant, or a span that waited for a
scan; readers from before may still pin it. The header in the ring has to agree with the slot in key, span id and
lengths. Whether the rest of a header and the payload are sound is found later, by the scrub or by the first reader:
recovered entries are marked as unverified.

Owns: the order of taking over. Does not own: the scrub, nor what policies and prefix indexes make of the rows.

Invariants: a slot that does not agree with its header is not published any more. Rows that overlap are never both LIVE:
of confirmed ones, the first by offset stays. Nothing here takes time for each entry but the table of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...shm.layout import (
    BUCKET_SLOTS,
    PLACE_OFFSET_MASK,
    PLACE_UNVERIFIED,
    SPAN_HEADER_BYTES,
    IndexGeometry,
)
from ...shm.slots import LENGTH, PLACE, SPAN, cells_of, slots_of
from .grants import Grants, LentGrant
from .holes import Holes
from .slots import Slots
from .table import EDGE, FREE, LIVE, REVOKED, RowTable
from .tenants import Tenants

Array = np.ndarray[Any, Any]

_MAGIC: Final = 0x4E415053
_HEADER: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("tree", "<u4"),
        ("span", "<u8"),
        ("key", "V32"),
        ("payload", "<u8"),
        ("checksum", "<u8"),
        ("tokens", "<u8"),
        ("ttl", "<f8"),
        ("created", "<f8"),
        ("expires", "<u8"),
        ("uid", "<u4"),
        ("prefix", "<u4"),
        ("cost", "<f8"),
        ("number", "<u8"),
        ("parent", "V32"),
        ("has_parent", "<u4"),
        ("check", "<u4"),
        ("rest", f"V{SPAN_HEADER_BYTES - 160}"),
    ]
)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a recovery found. `rows`: the entries in the order of their last use, (n,). `created`: when each was put, by
    the clock of the headers; `prefix_bytes`: of each, 0 if it is no block; `corrupt`: published slots that were not
    taken over."""

    rows: Array
    created: Array
    prefix_bytes: Array
    corrupt: int


def recover(
    table: RowTable,
    holes: Holes,
    slots: Slots,
    grants: Grants,
    tenants: Tenants,
    geometry: IndexGeometry,
    ring: memoryview,
) -> Recovery:
    """Fills an empty store with what the index and the ring have. `ring` is as large as the ring."""
    assert table.count == 0
    cells = slots_of(cells_of(slots.memory, geometry))
    words = cells.reshape(-1, 8) if cells.flags.c_contiguous else None
    spans = cells[:, :, SPAN].reshape(-1)
    number = np.flatnonzero(spans)
    whole = cells[number // BUCKET_SLOTS, number % BUCKET_SLOTS] if words is None else words[number]
    seq, key, span, place, length = whole[:, 0], whole[:, 1:5], whole[:, SPAN], whole[:, PLACE], whole[:, LENGTH]
    offset = (place & np.uint64(PLACE_OFFSET_MASK)).astype(np.int64)
    tree = (place >> np.uint64(48)).astype(np.int64)
    capacity = len(ring)
    is_grant = tree == 0
    payload = np.minimum(length, np.uint64(1 << 48)).astype(np.int64)
    size = np.where(is_grant, payload, SPAN_HEADER_BYTES + ((payload + 63) & -64))
    inside = (size > 0) & (offset + size <= capacity)

    header = _headers(ring, np.where(inside & ~is_grant, offset, 0))
    agrees = (
        inside
        & ~is_grant
        & (header["magic"] == _MAGIC)
        & (header["span"] == span)
        & (header["payload"] == length)
        & (header["tree"] == tree)
        & (np.ascontiguousarray(header["key"]).view("u8").reshape(-1, 4) == key).all(axis=1)
    )
    published = (seq & np.uint64(1)) == 0
    live = published & agrees & _first_of(span, published & agrees) & _in_its_bucket(key, number, slots.mask)
    live &= _apart(offset, size, live)
    corrupt = int(np.count_nonzero(published & ~live))
    for each in number[published & ~live].tolist():
        slots.unpublish(each)

    # Whatever else is allocated waits for a scan, as far as no entry lies there. A grant has entries inside it.
    waiting = np.flatnonzero(~live & inside)
    taken = np.flatnonzero(live)
    for each in number[~live & ~inside].tolist():
        slots.release(each)
    rows = _rows_for(table, span[taken])
    order = np.argsort(offset[taken], kind="stable")
    _tie(table, rows[order])
    for name, column in (
        ("span_ids", span[taken]),
        ("offsets", offset[taken]),
        ("sizes", size[taken]),
        ("payloads", length[taken]),
        ("digests", key[taken, 2]),
        ("costs", header["cost"][taken]),
        ("tokens", np.minimum(header["tokens"][taken], 0xFFFF_FFFF)),
        ("slots", number[taken]),
        ("ends", header["ttl"][taken]),
    ):
        table.column(name)[rows] = column
    np.frombuffer(table.states, np.uint8)[rows] = LIVE
    table.count = len(rows)
    keys: list[bytes] = header["key"][taken].tolist()
    table.by_key.update(zip(keys, rows.tolist(), strict=True))
    _mark_unverified(slots, number[taken])

    starts = offset[taken][order]
    for each in waiting.tolist():
        # The entry before it, from which the rows around it are near.
        before = int(np.searchsorted(starts, offset[each])) - 1
        before = int(rows[order[before]]) if before >= 0 else EDGE
        _wait(table, slots, grants, int(number[each]), int(offset[each]), int(size[each]), before)
    holes.found()
    _sums(table, tenants, rows, key[taken, 0], header["uid"][taken])
    _families(table, rows, header["parent"][taken], header["has_parent"][taken])
    used = np.frombuffer(slots.memory, "u8", geometry.slot_count, geometry.uses_at)[number[taken]]
    last = np.lexsort((header["created"][taken], used >> np.uint64(16) & np.uint64((1 << 32) - 1)))
    return Recovery(rows[last], header["created"][taken][last], header["prefix"][taken][last], corrupt)


def _headers(ring: memoryview, offsets: Array) -> Array:
    """The headers at these offsets, as (n,) of _HEADER."""
    lines = np.frombuffer(ring, "V64", len(ring) // 64)
    at = offsets // 64
    packed = np.empty((len(at), 3), "V64")
    for part in range(3):
        packed[:, part] = lines[at + part]
    found: Array = packed.view(np.uint8).reshape(len(at), SPAN_HEADER_BYTES).view(_HEADER).reshape(-1)
    return found


def _first_of(spans: Array, among: Array) -> Array:
    """Which of `among` are the first with their span id."""
    first = np.zeros(len(spans), np.bool_)
    candidates = np.flatnonzero(among)
    _, at = np.unique(spans[candidates], return_index=True)
    first[candidates[at]] = True
    return first


def _in_its_bucket(keys: Array, numbers: Array, mask: int) -> Array:
    """Which slots are in one of the two buckets of their keys: no reader finds the others."""
    hashes = np.ascontiguousarray(keys).view("<u4")[:, 2:4] & np.uint32(mask)
    first, second = hashes[:, 0].astype(np.int64), hashes[:, 1].astype(np.int64)
    second ^= (second == first) & bool(mask)
    bucket = numbers // BUCKET_SLOTS
    fits: Array = (bucket == first) | (bucket == second)
    return fits


def _apart(offsets: Array, sizes: Array, among: Array) -> Array:
    """Which of `among` overlap with none before them."""
    apart = np.zeros(len(offsets), np.bool_)
    order = np.flatnonzero(among)
    order = order[np.argsort(offsets[order], kind="stable")]
    if len(order):
        ends = offsets[order] + sizes[order]
        before = np.maximum.accumulate(ends)[:-1]
        fits = np.concatenate([[True], offsets[order][1:] >= before])
        if not fits.all():
            # Damage: one after the other.
            end = 0
            for at in range(len(order)):
                fits[at] = offsets[order[at]] >= end
                end = int(ends[at]) if fits[at] else end
        apart[order[fits]] = True
    return apart


def _rows_for(table: RowTable, spans: Array) -> Array:
    """The rows that the span ids say; others for ids of a daemon with another number of rows."""
    rows: Array = (spans & np.uint64(table.row_mask)).astype(np.int64)
    _, at = np.unique(rows, return_index=True)
    own = np.zeros(len(rows), np.bool_)
    own[at] = True
    own &= rows != EDGE
    used = np.zeros(table.row_mask + 1, np.bool_)
    used[rows[own]] = True
    used[EDGE] = True
    strangers = np.flatnonzero(~own)
    if len(strangers):
        rows[strangers] = np.flatnonzero(~used)[: len(strangers)]
        used[rows[strangers]] = True
        table.strangers.update(zip(spans[strangers].tolist(), rows[strangers].tolist(), strict=True))
    table.reserve(used)
    return rows


def _tie(table: RowTable, rows: Array) -> None:
    """Puts rows into the order of offsets, in which they are given."""
    around = np.concatenate([[EDGE], rows, [EDGE]])
    table.column("nexts")[around[:-1]] = around[1:]
    table.column("prevs")[around[1:]] = around[:-1]


def _mark_unverified(slots: Slots, numbers: Array) -> None:
    words = np.frombuffer(slots.words, "u8")
    at = slots.first_word + (numbers // BUCKET_SLOTS + numbers + 1) * 8 + PLACE
    words[at] |= np.uint64(PLACE_UNVERIFIED)


def _wait(table: RowTable, slots: Slots, grants: Grants, slot: int, offset: int, size: int, before: int) -> None:
    """The parts of [offset, offset + size) that no row has wait for a scan of the slot's span id."""
    while before != EDGE and table.end(before) > offset:
        before = table.prevs[before]
    pieces = []
    for low, high, behind in table.gaps(offset, offset + size, before):
        row = table.add(REVOKED, low, high - low, behind)
        if row == EDGE:
            break
        pieces.append(row)
    if pieces:
        span_id: int = slots.words[slots.at(slot) + SPAN]
        grants.revoked[span_id] = LentGrant(0, 0, span_id, slot, slots.seq(slot), pieces)
    else:
        slots.release(slot)


def _sums(table: RowTable, tenants: Tenants, rows: Array, packed: Array, uids: Array) -> None:
    sizes, tokens = table.column("sizes")[rows], table.column("tokens")[rows]
    tags, name = np.unique(packed, return_inverse=True)
    numbers = np.array([tenants.add(int(tag).to_bytes(8, "little")) for tag in tags.tolist()], np.int64)
    table.column("namespaces")[rows] = numbers[name]
    own_uids, owner = np.unique(uids, return_inverse=True)
    owners = np.array([tenants.owner(int(uid)) for uid in own_uids.tolist()], np.int64)
    table.column("owners")[rows] = owners[owner]
    for number, group in ((int(n), name == i) for i, n in enumerate(numbers)):
        tenants.entries[number] += int(np.count_nonzero(group))
        tenants.bytes[number] += int(sizes[group].sum())
    for number, group in ((int(n), owner == i) for i, n in enumerate(owners)):
        tenants.owned_bytes[number] += int(sizes[group].sum())
        tenants.owned_entries[number] += int(np.count_nonzero(group))
        tenants.owned_tokens[number] += int(tokens[group].sum())


def _families(table: RowTable, rows: Array, parents: Array, has_parent: Array) -> None:
    """Ties entries to their parents. One whose parent is not there stays alone: the caller ends it."""
    children = np.flatnonzero(has_parent)
    if not len(children):
        return
    find = table.by_key.get
    above = np.array([find(parent, EDGE) for parent in parents[children].tolist()], np.int64)
    table.column("parents")[rows[children]] = above
    np.add.at(table.column("children"), above[above != EDGE], 1)
    # Depths from the roots down: as many passes as the longest sequence has blocks.
    depths, befores, sizes = table.column("depths"), table.column("befores"), table.column("sizes")
    level = rows[children][np.isin(above, rows[children][above == EDGE], invert=True) & (above != EDGE)]
    known = np.zeros(table.row_mask + 1, np.bool_)
    known[rows] = True
    known[rows[children]] = False
    mine, up = rows[children], above
    while len(mine):
        ready = known[up] & (up != EDGE)
        if not ready.any():
            break
        level, parent = mine[ready], up[ready]
        depths[level] = np.minimum(depths[parent].astype(np.int64) + 1, 0xFFFF)
        befores[level] = befores[parent] + sizes[parent]
        known[level] = True
        mine, up = mine[~ready], up[~ready]


def missing_parents(table: RowTable, found: Recovery) -> list[int]:
    """Entries that had a parent, which is not stored: they were about to end."""
    rows = found.rows
    states = np.frombuffer(table.states, np.uint8)
    assert FREE not in states[rows]
    return [int(row) for row in rows if table.depths[row] == 0 and table.parents[row] != EDGE]
