"""What the memory of a simulated daemon holds, as the index and the store's table have it."""

from __future__ import annotations

import math
from typing import Any

from tensord.client.reading.lease import lease_over
from tensord.daemon.core.parts import Parts
from tensord.daemon.memory.segments import Segments
from tensord.daemon.store.table import EDGE
from tensord.shm.payloads.recipe import recipe
from tensord.shm.ring.layout import SPAN_HEADER_BYTES

from .payloads import number_of


class Entries:
    """The entries of one daemon."""

    def __init__(self, memory: Segments, parts: Parts) -> None:
        self.memory = memory
        self.parts = parts

    def row_of(self, key: bytes) -> int:
        """The row of an entry, published or hidden; 0 if there is none."""
        return self.parts.table.by_key.get(key) or self.parts.spans.hidden.get(key, 0)

    def expires(self, row: int) -> float:
        """The end of an entry's time to live."""
        return self.parts.details.expires(row) or math.inf

    def tree(self, row: int) -> Any:
        """The payload of an entry as it stands in the ring."""
        table = self.parts.table
        start = table.offsets[row] + SPAN_HEADER_BYTES
        header = self.memory.ring[start : start + self.parts.details.tree_bytes(row)].tobytes()
        return lease_over(self.memory.ring, start, table.payloads[row], recipe(header)).tree

    def visible(self) -> set[int]:
        """The keys that readers find."""
        return {number_of(slot.key) for slot in self.memory.index.slots() if slot.published}

    def sound(self, *, damaged: bool) -> set[int]:
        """Those of them that are not damaged, as far as is known. Before its first read, a damaged header may lack the
        parent."""
        return {
            number_of(slot.key)
            for slot in self.memory.index.slots()
            if slot.published and not (damaged and slot.unverified)
        }

    def waiting(self) -> set[bytes]:
        """Keys of the slots that are unpublished but not yet free. A damaged slot may hold an unknown key."""
        return {slot.key for slot in self.memory.index.slots() if not slot.published}

    def ends_at(self) -> dict[int, float]:
        """The end of each entry's time to live."""
        return {number_of(key): self.expires(row) for key, row in self.parts.table.by_key.items()}

    def hidden(self) -> set[int]:
        """The keys of the entries that wait for a scan's decision."""
        return {number_of(key) for key in self.parts.spans.hidden}

    def holds(self, span_id: int, key: bytes) -> bool:
        """Whether a span is still allocated to `key`."""
        table, slots = self.parts.table, self.parts.slots
        # That of a moved entry's old place does not say its row.
        row = next((row for row in table.in_order() if table.span_ids[row] == span_id), EDGE)
        if row:
            return slots.key(table.slots[row]) == key
        # As the spans of a former daemon that no entry has.
        waiting = self.parts.grants.revoked.get(span_id)
        return waiting is not None and slots.key(waiting.slot) == key
