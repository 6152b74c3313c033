"""The blocks of cached sequences among a store's entries: records are taken in at commits, and again after a restart.

    record of a put ─ Commits → `take` ─ continues its parent? → index          `errors`: why not, in order
    entries of an earlier daemon ─ `recovered` → `rebuild`, slice by slice, parents first
    entry ends ─ Spans → `index.remove`

Owns: what a block's record must say, and the blocks that are not in the index yet. Does not own: the index (`index`),
the links between entries (daemon/store/families), nor the end of an entry.

Invariant: a stored block is in the index, or waits for `rebuild`. A block is matched only while it and all its
ancestors are published.
"""

from __future__ import annotations

from struct import Struct
from sys import maxsize
from typing import Any, Final

import numpy as np

from ...errors import BadPrefix, LimitReached, TensordError
from ...shm.index.keys import generation_of, shortened
from ...shm.payloads.prefix import HEADER_BYTES, RECORD_BYTES_MAX, PrefixRecord, block_key
from ...shm.ring.layout import NAMESPACE_TAG_BYTES, SPAN_HEADER_BYTES, aligned
from ..store.slots import Slots
from ..store.table import LIVE, VICTIM, RowTable
from .index import PrefixIndex

REBUILD_SLICE: Final = 32
"""Blocks that one call of `rebuild` puts into the index: about 1 ms."""

Array = np.ndarray[Any, Any]

_TREE_BYTES: Final = Struct("@4xI")


class SequenceBlocks:
    """The blocks of one store. `prefix_tokens_max`: the longest sequence that can be asked for."""

    def __init__(self, table: RowTable, slots: Slots, ring: memoryview, seed: int, prefix_tokens_max: int) -> None:
        self.index = PrefixIndex(table, ring, seed)
        self.prefix_tokens_max = prefix_tokens_max
        self.errors: list[TensordError] = []
        """Why `take` has refused, once for each time, since the caller emptied it."""
        self._table = table
        self._slots = slots
        self._ring = ring
        self._pending: Array = np.zeros(0, np.int64)
        self._done = 0

    @property
    def rebuilding(self) -> int:
        """The number of blocks that `rebuild` has not looked at yet after a restart."""
        return len(self._pending) - self._done

    # ---- puts

    def take(self, row: int, key: bytes, above: int, record_at: int, size: int, end: int) -> bool:
        """Takes in the record of a put, of `size` bytes at byte `record_at` of the ring, whose payload ends at byte
        `end`. `above`: the row of its published parent, or EDGE. Returns whether it is a block that continues its
        parent; if not, `errors` has one more."""
        table = self._table
        try:
            if not HEADER_BYTES <= size <= RECORD_BYTES_MAX or record_at + size > end:
                raise BadPrefix(
                    f"prefix_bytes = {size}: a record has {HEADER_BYTES} to {RECORD_BYTES_MAX} bytes, within the "
                    f"payload, which has {end - record_at} bytes from its beginning on"
                )
            if above and not table.records[above]:
                raise BadPrefix("the parent of a block with a record has no record: put the block with its own parent")
            table.records[row] = size
            self._enter(row, key, above, record_at, self.prefix_tokens_max)
        except TensordError as error:
            table.records[row] = 0
            self.errors.append(error)
            return False
        return True

    def record(self, row: int) -> PrefixRecord | None:
        """The record of a stored block; None if the entry is not a block."""
        size = self._table.records[row]
        if not size:
            return None
        at = self._record_at(row)
        try:
            return PrefixRecord.unpack(bytes(self._ring[at : at + size]))
        except TensordError:
            return None

    # ---- restarts

    def recovered(self) -> None:
        """Finds the blocks that an earlier daemon left: the rows of the table with records. `rebuild` takes them in."""
        table = self._table
        rows = np.flatnonzero(table.column("records"))
        self._pending = rows[np.argsort(table.column("depths")[rows], kind="stable")]
        self._done = 0

    def rebuild(self, most: int = REBUILD_SLICE) -> list[int]:
        """Puts the next blocks into the index. Returns the rows of those that do not continue their parents: the caller
        ends them as corrupt."""
        states, records = self._table.states, self._table.records
        rows = self._pending[self._done : self._done + most].tolist()
        self._done += len(rows)
        if self._done == len(self._pending):
            self._pending, self._done = np.zeros(0, np.int64), 0
        failed = []
        for row in rows:
            if states[row] in (LIVE, VICTIM) and records[row] and row not in self.index:
                key, above = self._slots.key(self._table.slots[row]), self._table.parents[row]
                try:
                    self._enter(row, key, above, self._record_at(row), maxsize)
                except TensordError:
                    failed.append(row)
        return failed

    def check_invariants(self) -> None:
        table = self._table
        waits = set(self._pending[self._done :].tolist())
        blocks = [row for row in table.in_order() if table.records[row]]
        assert all(row in self.index or row in waits for row in blocks)
        assert all(table.states[row] in (LIVE, VICTIM) for row in blocks)
        self.index.check_invariants()

    def _enter(self, row: int, key: bytes, above: int, record_at: int, tokens_max: int) -> None:
        """Puts a block, whose record has the length that the table says, into the index. Clients that match trust keys:
        under a wrong key they would get the payload of another sequence. Raises BadPrefix, ParentGone or LimitReached,
        and changes nothing, if the block does not continue its parent, or ends behind `tokens_max`."""
        packed = bytes(self._ring[record_at : record_at + self._table.records[row]])
        record = PrefixRecord.unpack(packed)
        if block_key(key[:NAMESPACE_TAG_BYTES], packed, generation_of(key)) != key:
            raise BadPrefix(f"the key {shortened(key)} is not the digest of the payload's record")
        if record.parent != (self._slots.key(self._table.slots[above]) if above else None):
            raise BadPrefix("the record names another parent than the put does")
        if record.start + record.count > tokens_max:
            raise LimitReached(
                f"a block of a sequence ends at token {record.start + record.count}, and prefix_tokens_max is "
                f"{tokens_max}: store fewer tokens of the sequence, or raise prefix_tokens_max"
            )
        self.index.add(row, key[:NAMESPACE_TAG_BYTES], above, record, record_at)

    def _record_at(self, row: int) -> int:
        at: int = self._table.offsets[row]
        [tree_bytes] = _TREE_BYTES.unpack_from(self._ring, at)
        return at + SPAN_HEADER_BYTES + aligned(tree_bytes)
