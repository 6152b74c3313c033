"""Recovery: takes over the ring and the index of an earlier daemon. It relies on the invariants of the layout.

An even `seq` means a complete entry: a published slot becomes an entry as it is. Every other slot with a span id is
allocated: its put was never finished, or its span waited for a scan. All these spans wait for a scan now, since readers
from before the restart may still pin a span that was published once. New spans get ids of the new epoch, which is above
the epochs of all confirmed slots, so no id is used twice.

A slot is confirmed if the span's header in the ring agrees with it. A damaged slot may name the bytes or the id of
another span. Confirmed slots are taken over first, so that they keep their bytes and ids.

An entry whose parent is missing is dropped, and so is an entry of a past generation: both were about to end.

Owns the order of recovery. Does not own the spans (`span_table`) nor the reading of headers (`segments`).

Invariant: a slot that fails a check is never published again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...shm.layout import NAMESPACE_TAG_BYTES, SpanHeader, span_bytes
from ...shm.prefix import PrefixRecord
from ...shm.slots import Slot
from .counters import StoreCounters
from .entries import SpanEntry
from .expiry import Expiry
from .span_table import SpanTable


@dataclass(frozen=True, slots=True)
class Recovered:
    """One allocated slot. `header`: None if the span's first bytes are no valid header. `record`: None if the payload
    has no record, or an invalid one."""

    slot: int
    header: SpanHeader | None
    published: bool
    record: PrefixRecord | None = None


@dataclass(frozen=True, slots=True)
class _Adopted:
    entry: SpanEntry
    header: SpanHeader
    record: PrefixRecord | None


def recover(
    records: Iterable[Recovered],
    now: float,
    memory: SpanTable,
    expiry: Expiry,
    counters: StoreCounters,
) -> None:
    """Enters the spans of `records` into an empty `memory`."""
    adopted: list[_Adopted] = []
    found: list[tuple[bool, Slot, Recovered]] = []
    for each in records:
        slot = memory.index.read(each.slot)
        found.append((confirmed(slot, each.header), slot, each))
    found.sort(key=lambda one: (not one[0], one[1].offset))
    for sound, slot, recovered in found:
        header = recovered.header if sound else None
        whole = header is not None and (recovered.record is not None) == (header.prefix_bytes > 0)
        whole = whole and _parent_fits(header, recovered.record)
        # In a bucket that is not one of its key's two buckets, no reader would find the slot.
        whole = whole and slot.number in memory.index.slots_for(slot.key)
        if recovered.published and not whole:
            counters.found_corrupt += 1
            memory.index.unpublish(recovered.slot)
        past = whole and recovered.published and memory.index.generations.is_past(slot.key)
        if past:
            memory.index.unpublish(recovered.slot)
        entry = _entry(slot, header if whole else None)
        if not memory.adopt(entry, now):
            # No damage, since no reader has seen the put: pages of an unfinished put may be missing, and a span has two
            # slots if the daemon was killed while it got its key.
            twin = memory.spans.find(slot.span_id)
            damaged = not memory.ring.withdrawn_count and (twin is None or twin.offset != slot.offset)
            counters.found_corrupt += recovered.published or damaged
        elif recovered.published and whole and not past and header is not None:
            adopted.append(_Adopted(entry, header, recovered.record))
    for one in adopted:
        entry = one.entry
        entry.used_at = max(entry.created_at, min(memory.index.used_s(entry.slot), now))
        entry.uses = memory.index.uses(entry.slot)
    # The policy learns of the entries in the order of their last use.
    adopted.sort(key=lambda one: one.entry.used_at)
    restored: list[SpanEntry] = []
    for one in _parents_first(adopted):
        entry, header = one.entry, one.header
        if memory.restore_entry(entry, now, one.record, header.parent):
            counters.recovered += 1
            expiry.recovered(entry, header.expires_s or None)
            restored.append(entry)
    restored.sort(key=lambda entry: (entry.created_at, entry.number))
    memory.policy.recovered(entry.number for entry in restored)


def _parents_first(adopted: list[_Adopted]) -> Iterator[_Adopted]:
    """All of them in their order, except that parents come before their children."""
    by_key = {each.entry.key: each for each in adopted}
    come: set[int] = set()
    for each in adopted:
        path: list[_Adopted] = []
        before: _Adopted | None = each
        while before is not None and before.entry.span_id not in come:
            come.add(before.entry.span_id)
            path.append(before)
            parent_key = before.header.parent
            before = by_key.get(parent_key) if parent_key is not None else None
        yield from reversed(path)


def confirmed(slot: Slot, header: SpanHeader | None) -> bool:
    """Whether the span's header agrees with the slot. It does not while the span is being filled."""
    return header is not None and (header.key, header.span_id, header.payload_bytes, header.tree_bytes) == (
        slot.key,
        slot.span_id,
        slot.payload_bytes,
        slot.tree_bytes,
    )


def _parent_fits(header: SpanHeader | None, record: PrefixRecord | None) -> bool:
    """Whether the header's parent is one that a put could name."""
    if header is None or (record is not None and record.parent != header.parent):
        return False
    return header.parent is None or header.parent[:NAMESPACE_TAG_BYTES] == header.key[:NAMESPACE_TAG_BYTES]


def _entry(slot: Slot, header: SpanHeader | None) -> SpanEntry:
    entry = SpanEntry(
        slot.key,
        slot.span_id,
        slot.number,
        slot.offset,
        span_bytes(slot.payload_bytes),
        slot.payload_bytes,
        slot.tree_bytes,
        header.tokens if header is not None else 0,
        header.owner_uid if header is not None else 0,
        header.created_s if header is not None else 0.0,
        (header.ttl_s or None) if header is not None else None,
        cost_ms=header.cost_ms if header is not None else 0.0,
        prefix_bytes=header.prefix_bytes if header is not None else 0,
    )
    if header is not None and header.number:
        entry.number = header.number
    return entry
