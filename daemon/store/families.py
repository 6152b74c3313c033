"""Parents and children among the rows: an entry does not outlive its parent.

    parents[row] ── the entry that this one does not outlive        children[row] ── its published children
    firsts[row] ── its newest child; olders, newers ── that child's neighbours in the list of the same parent's children

Owns: these columns, and `depths` and `befores`. Does not own: which rows are published (`spans`), nor the index of
cached sequences (`daemon/prefix`).

Invariants: an entry is linked from its publication until its end, hidden or not. `children` counts the published ones,
the list has the hidden ones too. A row that is no entry has no parent and no children.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from .table import EDGE, LIVE, VICTIM, RowTable

DEPTH_MAX = 0xFFFF


class Families:
    """The links of one store's rows."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self.linked = 0
        """Rows that have a parent."""

    def link(self, row: int, parent: int) -> None:
        """Makes a new entry a child of the published entry `parent`."""
        table = self._table
        table.parents[row] = parent
        table.depths[row] = min(table.depths[parent] + 1, DEPTH_MAX)
        table.befores[row] = table.befores[parent] + table.sizes[parent]
        table.children[parent] += 1
        older = table.firsts[parent]
        table.olders[row], table.newers[row] = older, EDGE
        if older:
            table.newers[older] = row
        table.firsts[parent] = row
        self.linked += 1

    def unlink(self, row: int) -> None:
        """An entry ends, and is not published any more. Its children stay linked to it until they end (`spans`)."""
        table = self._table
        parent = table.parents[row]
        if not parent:
            return
        older, newer = table.olders[row], table.newers[row]
        if newer:
            table.olders[newer] = older
        else:
            table.firsts[parent] = older
        if older:
            table.newers[older] = newer
        table.parents[row] = table.olders[row] = table.newers[row] = EDGE
        table.depths[row] = table.befores[row] = 0
        self.linked -= 1

    def children_of(self, row: int) -> Iterator[int]:
        """The children, hidden ones included, the newest first."""
        table = self._table
        child: int = table.firsts[row]
        while child:
            yield child
            child = table.olders[child]

    def leaves_first(self, row: int, done: Container[int] = ()) -> Iterator[int]:
        """The published descendants of a row, each after all its own descendants, and the row last. Skips those in
        `done` and their descendants; the caller may add what was yielded to it."""
        if row in done:
            return
        states, firsts, olders = self._table.states, self._table.firsts, self._table.olders
        path, ahead = [row], [firsts[row]]
        while path:
            child = ahead[-1]
            while child and (states[child] != LIVE or child in done):
                child = olders[child]
            if child:
                ahead[-1] = olders[child]
                path.append(child)
                ahead.append(firsts[child])
            else:
                ahead.pop()
                yield path.pop()

    def ancestors(self, rows: Iterable[int]) -> set[int]:
        """All ancestors of the rows."""
        found: set[int] = set()
        if self.linked:
            parents = self._table.parents
            for row in rows:
                above = parents[row]
                while above and above not in found:
                    found.add(above)
                    above = parents[above]
        return found

    def check_invariants(self) -> None:
        table = self._table
        rows = list(table.in_order())
        linked = [row for row in rows if table.parents[row]]
        assert len(linked) == self.linked
        for row in rows:
            below = list(self.children_of(row))
            assert set(below) == {each for each in linked if table.parents[each] == row}
            assert table.children[row] == sum(table.states[each] == LIVE for each in below)
            if table.states[row] not in (LIVE, VICTIM):
                assert not table.parents[row], "a row that is no entry has a parent"
