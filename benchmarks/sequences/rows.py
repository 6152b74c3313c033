"""An index of sequences over rows of its own, which have no entries: what prefix.py measures.

Owns: the rows. Does not own: their text (forest.py), nor what the index does.
"""

from __future__ import annotations

from sequences.forest import TAG
from tensord.daemon.prefix.index import Found, PrefixIndex
from tensord.daemon.store.families import Families
from tensord.daemon.store.table import LIVE, RowTable
from tensord.shm.payloads.prefix import PrefixRecord, Tokens


class IndexedRows:
    """The index of one store with room for `most` blocks. `memory`: the bytes in which texts stand."""

    def __init__(self, memory: memoryview, most: int, seed: int) -> None:
        self.table = RowTable((most + 1).bit_length(), 1)
        self._families = Families(self.table)
        self._memory = memory
        self._seed = seed
        self._rows: dict[bytes, int] = {}
        self._index: PrefixIndex | None = None

    @property
    def index(self) -> PrefixIndex:
        """The index, made at its first use, so that its memory can be told from that of the table."""
        if self._index is None:
            self._index = PrefixIndex(self.table, self._memory, self._seed)
        return self._index

    def __len__(self) -> int:
        return len(self.index)

    def row_of(self, key: bytes) -> int:
        """The row of a block, also of one that is added later."""
        return self._rows.setdefault(key, len(self._rows) + 1)

    def add(self, key: bytes, record: PrefixRecord, text_at: int) -> None:
        """Adds a block, whose text begins at byte `text_at`."""
        table, row = self.table, self.row_of(key)
        above = 0 if record.parent is None else self._rows[record.parent]
        table.states[row], table.records[row] = LIVE, record.record_bytes
        self.index.add(row, TAG, above, record, text_at - record.text_at)
        if above:
            self._families.link(row, above)

    def match(self, tag: bytes, query: PrefixRecord, folded: Tokens) -> Found:
        """The longest cached prefix (`PrefixIndex.match`)."""
        return self.index.match(tag, query, folded)
