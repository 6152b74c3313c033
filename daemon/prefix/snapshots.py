"""Snapshots of the prefix index: they continue a sequence at one position, where its blocks alone cannot.

A snapshot in a block continues every sequence that agrees up to its position, even if that sequence continues in
another block. So snapshots are found by the digest of the text from the end of the parent block to their position. Each
node has the offsets at which its children have snapshots (a level).

Owns the table of digests. Does not own which blocks exist (`index`). A snapshot that is hidden stays in the table, and
is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...errors import BadPrefix
from ...shm.payloads.prefix import MEDIA_BYTES, TOKEN_BYTES, unpacked_media
from ..store.table import LIVE, RowTable
from .nodes import Nodes
from .query import Query, snapshot_digest
from .trees import Tree

LOOKS_MAX: Final = 1024
"""Probes in one tree for one match."""


class Snapshots:
    """The table. `start`: the digest of an empty sequence."""

    def __init__(self, table: RowTable, nodes: Nodes, start: int) -> None:
        self._rows = table
        self._nodes = nodes
        self._start = start
        self._listed: dict[int, tuple[int, int, int]] = {}
        """By row: digest, level and offset."""
        self._found: dict[int, tuple[int, ...]] = {}
        """The rows of each digest."""
        self._levels: dict[int, dict[int, int]] = {}
        """By level, the offsets of snapshots and the number at each. A row is used again, so a level is named by the
        span id of the row, and that of a tree's first blocks by the tree's number."""

    def add(self, row: int, block: int, tree: Tree, position: int) -> None:
        """Adds the snapshot `row` in a block of a tree.

        Raises:
            BadPrefix: the position is not within the block or at its end. Nothing has changed then.
        """
        offset = position - self._rows.depths[block] * tree.name.block_tokens
        if not 0 < offset <= self._nodes.count(block):
            raise BadPrefix(f"a snapshot for position {position}, which is not in its block")
        media = self._nodes.media(block)
        begun = sum(item.start < position for item in unpacked_media(media))
        level = self._name(self._rows.parents[block], tree)
        text = self._nodes.text(block)[: offset * TOKEN_BYTES]
        digest = snapshot_digest(self._start, level, offset, text, media[: begun * MEDIA_BYTES])
        self._listed[row] = digest, level, offset
        self._found[digest] = (*self._found.get(digest, ()), row)
        offsets = self._levels.setdefault(level, {})
        offsets[offset] = offsets.get(offset, 0) + 1

    def remove(self, row: int) -> None:
        """Removes a snapshot."""
        digest, level, offset = self._listed.pop(row)
        rest = tuple(other for other in self._found[digest] if other != row)
        if rest:
            self._found[digest] = rest
        else:
            del self._found[digest]
        offsets = self._levels[level]
        offsets[offset] -= 1
        if not offsets[offset]:
            del offsets[offset]
        if not offsets:
            del self._levels[level]

    def last(self, path: Sequence[int], tree: Tree, query: Query, limit: int, least: int) -> tuple[int, int]:
        """The last snapshot after `least` and up to `limit` that cuts no item, on a path that the query shares up to
        `limit`, and its position. Zeros if there is none, or LOOKS_MAX probes did not find it."""
        size, looks = tree.name.block_tokens, 0
        for depth in range(len(path) - 1, least // size - 1, -1):
            start = depth * size
            level = self._name(path[depth - 1] if depth else 0, tree)
            for offset in sorted(self._levels.get(level, ()), reverse=True):
                position = start + offset
                if position > limit or query.uncut(position) != position:
                    continue
                looks += 1
                text, media = query.text(start, position), query.packed(start, position)
                rows = self._found.get(snapshot_digest(self._start, level, offset, text, media), ())
                row = next((row for row in rows if self._rows.states[row] == LIVE), 0)
                if row or looks == LOOKS_MAX:
                    return (row, position) if row and position > least else (0, 0)
        return 0, 0

    def check_invariants(self) -> None:
        assert {row for rows in self._found.values() for row in rows} == self._listed.keys()
        levels: dict[int, dict[int, int]] = {}
        for row, (digest, level, offset) in self._listed.items():
            assert row in self._found[digest] and self._nodes.trees[row]
            offsets = levels.setdefault(level, {})
            offsets[offset] = offsets.get(offset, 0) + 1
        assert levels == self._levels

    def _name(self, above: int, tree: Tree) -> int:
        level: int = self._rows.span_ids[above] if above else tree.number
        return level
