"""Snapshots of the prefix index: they continue a sequence at one position, where its blocks alone cannot.

A snapshot in a block continues every sequence that agrees up to its position, even if that sequence continues in
another block. So snapshots are found by the digest of the text from the end of the parent block to their position. Each
node knows the offsets at which its children have snapshots (a level).

Owns the table of digests. Does not own which blocks exist (`prefix_index`).

Invariant: a snapshot is in the table, and counted in its level, unless it is hidden or its block was removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...errors import BadPrefix
from ...shm.prefix import MEDIA_BYTES, TOKEN_BYTES, unpacked_media
from .prefix_query import Query, snapshot_digest
from .prefix_tree import COUNT_MASK, Extra, Node, Siblings, Snapshot, Tree

LOOKS_MAX: Final = 1024
"""Probes in one tree for one match."""


class Snapshots:
    """The table. `start`: the digest of an empty sequence."""

    def __init__(self, order: Siblings, start: int) -> None:
        self._order = order
        self._start = start
        self._table: dict[int, dict[Snapshot, None]] = {}
        self._names = 0

    def add(self, key: bytes, block: Node, tree: Tree, position: int) -> Snapshot:
        """Adds a snapshot in a block of a tree.

        Raises:
            BadPrefix: the position is not within the block or at its end, or has a snapshot already. Nothing has
                changed then.
        """
        offset = position - (block.depth - 1) * tree.block_tokens
        if not 0 < offset <= block.place & COUNT_MASK:
            raise BadPrefix(f"a snapshot for position {position}, which is not in its block")
        there = block.extra.snapshots if block.extra is not None else None
        if there is not None and any(other.offset == offset for other in there):
            raise BadPrefix(f"a snapshot for position {position} is stored there already")
        assert block.parent is not None
        text = self._order.text(block)[: offset * TOKEN_BYTES]
        media = self._order.media(block)
        begun = sum(item.start < position for item in unpacked_media(media))
        level = block.parent.more()
        if not level.name:
            self._names += 1
            level.name = self._names
        snapshot = Snapshot(key, block, offset)
        snapshot.digest = snapshot_digest(self._start, level.name, offset, text, media[: begun * MEDIA_BYTES])
        extra = block.more()
        if extra.snapshots is None:
            extra.snapshots = []
        extra.snapshots.append(snapshot)
        self.enter(snapshot)
        return snapshot

    def remove(self, snapshot: Snapshot) -> None:
        """Removes a snapshot."""
        self.leave(snapshot)
        block, _ = _place(snapshot)
        if block.snapshots is not None:
            block.snapshots.remove(snapshot)

    def forget(self, block: Node) -> list[bytes]:
        """Removes the snapshots of a removed block from the table, and returns their keys."""
        there = block.extra.snapshots if block.extra is not None else None
        if block.extra is None or there is None:
            return []
        for snapshot in there:
            self.leave(snapshot)
        block.extra.snapshots = None
        return [snapshot.key for snapshot in there]

    def enter(self, snapshot: Snapshot) -> None:
        """Makes matches find the snapshot, if its block exists."""
        block, level = _place(snapshot)
        if block.snapshots is None:
            return
        snapshot.listed = True
        self._table.setdefault(snapshot.digest, {})[snapshot] = None
        if level.offsets is None:
            level.offsets = {}
        level.offsets[snapshot.offset] = level.offsets.get(snapshot.offset, 0) + 1

    def leave(self, snapshot: Snapshot) -> None:
        """Hides the snapshot from matches."""
        if not snapshot.listed:
            return
        snapshot.listed = False
        same = self._table[snapshot.digest]
        del same[snapshot]
        if not same:
            del self._table[snapshot.digest]
        _, level = _place(snapshot)
        assert level.offsets is not None
        level.offsets[snapshot.offset] -= 1
        if not level.offsets[snapshot.offset]:
            del level.offsets[snapshot.offset]
        if not level.offsets:
            level.offsets = None

    def at(self, level: Node, tree: Tree, query: Query, position: int) -> Snapshot | None:
        """A snapshot at a position in the children of `level`, of a sequence that agrees with the query up to there."""
        extra = level.extra
        start = level.depth * tree.block_tokens
        if extra is None or extra.offsets is None or position - start not in extra.offsets:
            return None
        text, media = query.text(start, position), query.packed(start, position)
        for snapshot in self._table.get(snapshot_digest(self._start, extra.name, position - start, text, media), ()):
            if snapshot.block.tree is not None:
                return snapshot
        return None

    def last(self, path: Sequence[Node], tree: Tree, query: Query, limit: int, least: int) -> Snapshot | None:
        """The last snapshot after `least` and up to `limit` that cuts no item, on a path that the query shares up to
        `limit`. None also if LOOKS_MAX probes did not find it."""
        size = tree.block_tokens
        looks = 0
        for depth in range(len(path) - 1, least // size - 1, -1):
            level = path[depth - 1] if depth else tree
            if level.extra is None or level.extra.offsets is None:
                continue
            for offset in sorted(level.extra.offsets, reverse=True):
                position = depth * size + offset
                if position > limit or query.uncut(position) != position:
                    continue
                looks += 1
                snapshot = self.at(level, tree, query, position)
                if snapshot is not None or looks == LOOKS_MAX:
                    return snapshot if position > least else None
        return None

    def check_invariants(self, known: dict[bytes, Node | Snapshot]) -> None:
        """Asserts that the table contains exactly the listed snapshots."""
        for digest, snapshots in self._table.items():
            assert snapshots
            assert all(known[one.key] is one and one.digest == digest and one.listed for one in snapshots)
        counted: dict[Extra, dict[int, int]] = {}
        for one in known.values():
            if isinstance(one, Snapshot):
                block, level = _place(one)
                there = known.get(one.block.key) is one.block
                assert there == (block.snapshots is not None and one in block.snapshots)
                assert one.listed == (there and not one.hidden)
                if one.listed:
                    offsets = counted.setdefault(level, {})
                    offsets[one.offset] = offsets.get(one.offset, 0) + 1
        assert all(level.offsets == offsets for level, offsets in counted.items())


def _place(snapshot: Snapshot) -> tuple[Extra, Extra]:
    """The extras of the snapshot's block, and of the parent block."""
    before = snapshot.block.parent
    assert before is not None and before.extra is not None and snapshot.block.extra is not None
    return snapshot.block.extra, before.extra
