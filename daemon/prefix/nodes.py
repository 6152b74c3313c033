"""The nodes of the prefix index: the rows of blocks, in trees, and siblings in the order of their text.

    tree: −number ─ row ─ row ─ row …      node: a row, or the number of a tree, negative
                     └ row …               parents are those of the table (daemon/store/families)

A node has no text and no media: both are in the ring, in the block's record, and are read from there when two blocks
are compared. Siblings are ordered by the bytes of their folded text, then by media. So the siblings that agree longest
with a query are beside the query's own place in the order. A hidden block (state VICTIM) keeps its place, and is passed
over.

Owns: which tree a row is in, where its text is, and its children in order. Does not own: which rows are nodes
(`index`), nor parents and states (daemon/store).

Invariants: siblings are in order. A row has a place exactly while it is in a tree. Fewer than two children of a row are
in no list.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from ...shm.payloads.prefix import HEADER_BYTES, TOKEN_BYTES
from ..store.table import LIVE, RowTable

COUNT_BITS: Final = 13
COUNT_MASK: Final = (1 << COUNT_BITS) - 1
MANY: Final = 0xFFFF_FFFF
"""In place of the only child: there are several, in a list."""


class Nodes:
    """The nodes over the rows of a table. `ring`: the ring's bytes.

    A column takes 14 bytes a row, and pages of it take memory once they are written.
    """

    def __init__(self, table: RowTable, ring: memoryview) -> None:
        rows = table.row_mask + 1
        self._table = table
        self._ring = ring
        self.trees = np.zeros(rows, np.uint16).data
        """The number of a row's tree; 0 if the row is no node."""
        self._places = np.zeros(rows, np.uint64).data
        self._only = np.zeros(rows, np.uint32).data
        self._lists: dict[int, array[int]] = {}

    def enter(self, row: int, tree: int, text_at: int, count: int) -> None:
        """Makes a node of a row, whose `count` tokens begin at byte `text_at` of the ring. Its record is known."""
        self.trees[row] = tree
        self._places[row] = text_at << COUNT_BITS | count

    def leave(self, row: int) -> None:
        """A row is no node any more. Its children do not find it."""
        self.trees[row] = self._places[row] = self._only[row] = 0
        self._lists.pop(row, None)

    def count(self, row: int) -> int:
        """The number of a block's tokens."""
        count: int = self._places[row] & COUNT_MASK
        return count

    def text(self, row: int) -> bytes:
        """A block's folded tokens."""
        at, count = self._places[row] >> COUNT_BITS, self._places[row] & COUNT_MASK
        return bytes(self._ring[at : at + count * TOKEN_BYTES])

    def media(self, row: int) -> bytes:
        """A block's packed media. In the record they are right before the tokens."""
        at, count = self._places[row] >> COUNT_BITS, self._places[row] & COUNT_MASK
        size = self._table.records[row] - HEADER_BYTES - count * TOKEN_BYTES
        return bytes(self._ring[at - size : at]) if size > 0 else b""

    def shown(self, row: int) -> bool:
        """Whether a row is a published block of the index."""
        return bool(self.trees[row]) and self._table.states[row] == LIVE

    # ---- siblings

    def children(self, node: int) -> Sequence[int]:
        """The children in order, hidden ones included."""
        only = MANY if node < 0 else self._only[node]
        if only == MANY:
            return self._lists.get(node, ())
        return (only,) if only else ()

    def insert(self, node: int, row: int) -> None:
        """Makes a block a child of a node."""
        there = self.children(node)
        if not there and node > 0:
            self._only[node] = row
            return
        if not isinstance(there, array):
            there = self._lists[node] = array("I", there)
            if node > 0:
                self._only[node] = MANY
        there.insert(self._rank(there, self.text(row), self.media(row)), row)

    def discard(self, node: int, row: int) -> None:
        """Removes a child."""
        there = self._lists.get(node)
        if there is None:
            if node > 0:
                self._only[node] = 0
            return
        at = self._rank(there, self.text(row), self.media(row)) - 1
        if at < 0 or there[at] != row:
            # It has a twin that was put while it was hidden, or a client has overwritten text in the ring.
            at = there.index(row)
        del there[at]
        if node > 0 and len(there) == 1:
            self._only[node] = there[0]
            del self._lists[node]
        elif not there:
            del self._lists[node]

    def neighbours(self, node: int, text: bytes, media: bytes) -> Iterator[int]:
        """The published children before and after a text's place in the order: at most two."""
        there = self.children(node)
        rank = self._rank(there, text, media) if len(there) > 1 else len(there)
        states = self._table.states
        for side in (range(rank - 1, -1, -1), range(rank, len(there))):
            for at in side:
                if states[there[at]] == LIVE:
                    yield there[at]
                    break

    def _rank(self, siblings: Sequence[int], text: bytes, media: bytes) -> int:
        """The number of siblings that are not after (text, media)."""
        ring, places = self._ring, self._places
        low, high = 0, len(siblings)
        while low < high:
            middle = (low + high) >> 1
            row = siblings[middle]
            at = places[row] >> COUNT_BITS
            theirs = bytes(ring[at : at + (places[row] & COUNT_MASK) * TOKEN_BYTES])
            if theirs < text or (theirs == text and self.media(row) <= media):
                low = middle + 1
            else:
                high = middle
        return low

    def check_invariants(self) -> None:
        trees = np.frombuffer(self.trees, np.uint16)
        assert np.array_equal(np.flatnonzero(trees), np.flatnonzero(np.frombuffer(self._places, np.uint64)))
        only = np.frombuffer(self._only, np.uint32)
        assert set(np.flatnonzero(only == MANY).tolist()) == {node for node in self._lists if node > 0}
        for node, there in self._lists.items():
            assert len(there) > (node > 0), "a list of too few"
            ranks = [(self.text(row), self.media(row)) for row in there]
            assert ranks == sorted(ranks), "siblings are not in order"
        for node in [*np.flatnonzero(only).tolist(), *self._lists]:
            assert node < 0 or trees[node], "children of no node"
            assert all(trees[row] for row in self.children(node))


def common(ours: bytes, theirs: bytes) -> int:
    """The number of tokens in the common prefix of two texts."""
    size_bytes = min(len(ours), len(theirs))
    if ours[:size_bytes] == theirs[:size_bytes]:
        return size_bytes // TOKEN_BYTES
    differs = np.frombuffer(ours[:size_bytes], np.uint32) != np.frombuffer(theirs[:size_bytes], np.uint32)
    return int(differs.argmax())
