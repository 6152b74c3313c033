"""The trees of the prefix index, and their nodes: the rows of blocks, siblings in the order of their text.

    tree: −number ─ row ─ row ─ row …      node: a row, or the number of a tree, negative
                     └ row …               parents are those of the table (daemon/store/families)

There is a tree for each layout of the sequences in one scope of a namespace. A node's text and media are read from the
block's record in the ring when two blocks are compared. Siblings are ordered by the bytes of their folded text, then by
media. So those that agree longest with a query are beside its own place in the order. A hidden block (state VICTIM)
keeps its place, and is passed over.

Owns: the trees and their numbers, which tree a row is in, where its text is, and its children in order. Does not own:
which rows are nodes (`index`), nor parents and states (daemon/store).

Invariants: a tree exists exactly while it has nodes, hidden ones and those without a path to its root included.
Siblings are in order. A row has a place exactly while it is in a tree. An only child is in no list but the table's.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from ...errors import BadPrefix, LimitReached
from ...shm.payloads.prefix import BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN, HEADER_BYTES, TOKEN_BYTES, PrefixRecord
from ..store.table import LIVE, RowTable

LAYOUTS_MAX: Final = 16
"""Layouts of one scope of a namespace generation; each has a tree that is searched separately."""
TREES_MAX: Final = 0xFFFF
COUNT_BITS: Final = 13
COUNT_MASK: Final = (1 << COUNT_BITS) - 1


class TreeName(NamedTuple):
    """The identity of a tree. `exact`: its sequences are continued at snapshots only."""

    tag: bytes
    scope: bytes
    layout: bytes
    block_tokens: int
    exact: bool

    @classmethod
    def of(cls, tag: bytes, record: PrefixRecord) -> TreeName:
        """That of a record in the namespace `tag`."""
        return cls(tag, record.scope, record.layout, record.block_tokens, record.exact)


@dataclass(slots=True, eq=False)
class Tree:
    """The sequences of one layout in one scope. A checkpoint every `step` tokens: `checkpoints` has the rows of those
    blocks by the digests of everything up to their ends."""

    number: int
    name: TreeName
    step: int
    count: int = 0
    checkpoints: dict[int, int] = field(default_factory=dict)


class Trees:
    checkpoint_tokens = 1024
    """The minimum distance between checkpoints."""

    def __init__(self) -> None:
        self._by_scope: dict[tuple[bytes, bytes], dict[TreeName, Tree]] = {}
        self.by_number: dict[int, Tree] = {}
        self._last_number = 0

    def of(self, tag: bytes, scope: bytes) -> Iterable[Tree]:
        """The trees of one scope."""
        return self._by_scope.get((tag, scope), {}).values()

    def for_first(self, tag: bytes, record: PrefixRecord) -> Tree:
        """The tree of a first block. It may be new, and is kept once it is `joined`. Raises BadPrefix or LimitReached
        if there can be none."""
        name = TreeName.of(tag, record)
        layouts, size = self._by_scope.get(name[:2], {}), record.block_tokens
        if name in layouts:
            return layouts[name]
        if not BLOCK_TOKENS_MIN <= size <= BLOCK_TOKENS_MAX or size & (size - 1):
            raise BadPrefix(f"{size} tokens a block: no power of two from {BLOCK_TOKENS_MIN} to {BLOCK_TOKENS_MAX}")
        if len(layouts) >= LAYOUTS_MAX:
            raise BadPrefix(
                f"the namespace has sequences of {LAYOUTS_MAX} layouts, the maximum: use another namespace "
                "for other layers or another block_tokens, or evict stored sequences"
            )
        if len(self.by_number) == TREES_MAX:
            raise LimitReached(
                f"sequences of {TREES_MAX} namespaces and layouts are stored, the maximum: evict the sequences of some"
            )
        number = self._last_number % TREES_MAX + 1
        while number in self.by_number:
            number = number % TREES_MAX + 1
        return Tree(number, name, max(self.checkpoint_tokens, size))

    def joined(self, tree: Tree) -> None:
        """The tree has one more node."""
        if not tree.count:
            self._by_scope.setdefault(tree.name[:2], {})[tree.name] = tree
            self.by_number[tree.number] = tree
            self._last_number = tree.number
        tree.count += 1

    def left(self, tree: Tree) -> None:
        tree.count -= 1
        if not tree.count:
            del self.by_number[tree.number]
            layouts = self._by_scope[tree.name[:2]]
            del layouts[tree.name]
            if not layouts:
                del self._by_scope[tree.name[:2]]


class Nodes:
    """The nodes over the rows of a table, in 10 bytes a row. Pages of a column take memory once they are written."""

    def __init__(self, table: RowTable, ring: memoryview) -> None:
        rows = table.row_mask + 1
        self._table = table
        self._ring = ring
        self.trees = np.zeros(rows, np.uint16).data
        """The number of a row's tree; 0 if the row is no node."""
        self._places = np.zeros(rows, np.uint64).data
        self._lists: dict[int, array[int]] = {}
        """The children of each tree, and of each row that has several."""

    def enter(self, row: int, tree: int, text_at: int, count: int) -> None:
        """Makes a node of a row, whose `count` tokens begin at byte `text_at` of the ring. Its record is known."""
        self.trees[row] = tree
        self._places[row] = text_at << COUNT_BITS | count

    def leave(self, row: int) -> None:
        """A row is no node any more. Its children do not find it."""
        self.trees[row] = self._places[row] = 0
        self._lists.pop(row, None)

    def count(self, row: int) -> int:
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

    # ---- siblings

    def children(self, node: int) -> Sequence[int]:
        """The children in order, hidden ones included."""
        listed = self._lists.get(node)
        if listed is not None or node < 0:
            return listed or ()
        firsts, olders = self._table.firsts, self._table.olders
        child, found = firsts[node], []
        while child:
            # Others are snapshots, or not in the index yet.
            if self.count(child):
                found.append(child)
            child = olders[child]
        return found

    def insert(self, node: int, row: int) -> None:
        """Adds a child, which the table links to its parent before or after this."""
        there = self._lists.get(node)
        if there is None:
            others = [child for child in self.children(node) if child != row]
            if not others and node > 0:
                return
            there = self._lists[node] = array("I", others)
        there.insert(self._rank(there, self.text(row), self.media(row)), row)

    def discard(self, node: int, row: int) -> None:
        there = self._lists.get(node)
        if there is None:
            return
        at = self._rank(there, self.text(row), self.media(row)) - 1
        if at < 0 or there[at] != row:
            # It has a twin that was put while it was hidden, or a client has overwritten text in the ring.
            at = there.index(row)
        del there[at]
        if len(there) <= (node > 0):
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
        for node, there in self._lists.items():
            assert len(there) > (node > 0), "a list of too few"
            assert node < 0 or trees[node], "children of no node"
            assert all(trees[row] for row in there)
            ranks = [(self.text(row), self.media(row)) for row in there]
            assert ranks == sorted(ranks), "siblings are not in order"


def common(ours: bytes, theirs: bytes) -> int:
    """The number of tokens in the common prefix of two texts."""
    size_bytes = min(len(ours), len(theirs))
    if ours[:size_bytes] == theirs[:size_bytes]:
        return size_bytes // TOKEN_BYTES
    differs = np.frombuffer(ours[:size_bytes], np.uint32) != np.frombuffer(theirs[:size_bytes], np.uint32)
    return int(differs.argmax())
