"""Taking over what a former daemon left in the ring and the index. Part of what the layout promises.

Even `seq` means whole: a published slot becomes an entry as it is. Every other slot with a span id is allocated: a
put that was never finished, or a span that waited for its scan. Both wait for a scan, since readers from before the
restart may still pin the latter. New spans get ids of the new epoch, so none is used twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...shm.index import Slot
from ...shm.layout import SpanHeader, span_bytes
from .counters import Counters
from .entries import Entry
from .memory import Memory
from .tenure import Tenure


@dataclass(frozen=True, slots=True)
class Recovered:
    """One allocated slot. `header` is None where the span's first bytes are no header."""

    slot: int
    header: SpanHeader | None
    published: bool


def recover(
    records: Iterable[Recovered],
    now: float,
    memory: Memory,
    tenure: Tenure,
    counters: Counters,
    unix_at_zero_s: float,
) -> None:
    """Makes the records' spans known to an empty `memory`."""
    adopted: list[tuple[Entry, SpanHeader]] = []
    for record in sorted(records, key=lambda record: memory.index.read(record.slot).offset):
        slot = memory.index.read(record.slot)
        header = record.header
        whole = header is not None and _agree(header, slot)
        if record.published and not whole:
            counters.found_corrupt += 1
            memory.index.unpublish(record.slot)
        entry = _entry(slot, header if whole else None, unix_at_zero_s)
        if not memory.adopt(entry, now):
            # Of a put that never had all its bytes, some pages may be missing: nobody has seen it.
            counters.found_corrupt += record.published or not memory.ring.withdrawn_count
        elif record.published and whole and header is not None:
            adopted.append((entry, header))
    for entry, header in sorted(adopted, key=lambda pair: pair[0].created_at):
        if memory.readopt(entry, now):
            counters.recovered += 1
            entry.uses = memory.index.uses(entry.slot)
            ttl_s = header.expires_unix_s - header.created_unix_s if header.expires_unix_s else None
            tenure.begin(entry, ttl_s, entry.created_at)


def _agree(header: SpanHeader, slot: Slot) -> bool:
    return (header.key, header.span_id, header.image_bytes, header.tree_bytes) == (
        slot.key,
        slot.span_id,
        slot.image_bytes,
        slot.tree_bytes,
    )


def _entry(slot: Slot, header: SpanHeader | None, unix_at_zero_s: float) -> Entry:
    return Entry(
        slot.key,
        slot.span_id,
        slot.number,
        slot.offset,
        span_bytes(slot.image_bytes),
        slot.image_bytes,
        slot.tree_bytes,
        header.tokens if header is not None else 0,
        header.owner_uid if header is not None else 0,
        header.created_unix_s - unix_at_zero_s if header is not None else 0.0,
    )
