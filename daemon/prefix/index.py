"""Finds the cached sequence with the longest common prefix with a query, exact to the token and to the media item.

    namespace ─ scope ─ layout: a tree ─ block ─ block ─ block …      each block a row, its text in the ring
                                  └ block …        └ snapshot         siblings in the order of their text

Every max(1024, block_tokens) tokens there is a checkpoint: a running digest, 128 bits, of all tokens and media before
it. A match computes the query's digests up to the last known checkpoint, takes the path from there back to the first
block, and walks on from the checkpoint block by block, comparing text. The number of steps is at most that of the
query's checkpoints and blocks, each O(log n) in the stored blocks, plus at most LOOKS_MAX probes for snapshots, in each
of at most LAYOUTS_MAX trees.

A path must be unbroken up to the first block, each block published. So hiding a block, publishing it again, or ending
one with descendants needs no call: the table's states say it.

A snapshot continues a sequence at one position, where its blocks alone cannot; also every other sequence that agrees up
to there, even if that one continues in another block. So snapshots are found by the digest of the text from the end of
the parent block to their position. Each node has the offsets at which its children have snapshots (a level).

Owns the digests. Does not own the blocks' entries, nor their states and links. Text and media are in the ring only and
are not copied, so a block must be removed before its place is reused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from ...errors import BadPrefix, ParentGone
from ...ipc.messages.schema import BLOCKS_MAX
from ...shm.payloads.prefix import MEDIA_BYTES, TOKEN_BYTES, PrefixRecord, Tokens, agreed, unpacked_media
from ..store.table import LIVE, RowTable
from .nodes import Nodes, Tree, TreeName, Trees, common
from .query import Query, checked, initial_digest, next_digest, snapshot_digest

LOOKS_MAX: Final = 1024
"""Probes for snapshots in one tree for one match."""


class Found(NamedTuple):
    """The first `offset` tokens of a query are cached. `blocks`: the rows of the blocks that contain them, from the
    first; the last block may reach further. `snapshot`: the row of the snapshot at exactly that offset, or 0."""

    offset: int = 0
    blocks: Sequence[int] = ()
    snapshot: int = 0


class PrefixIndex:
    """The trees of blocks, over the rows of a table. `seed`: of the digests; random and secret."""

    def __init__(self, table: RowTable, ring: memoryview, seed: int) -> None:
        self._table = table
        self._nodes = Nodes(table, ring)
        self._start = initial_digest(seed)
        self._trees = Trees()
        self._snapshots = Snapshots(table, self._nodes, self._start)
        self._digests: dict[int, int] = {}
        """By row: the digest of everything up to the block's end, if a checkpoint is there."""

    def __len__(self) -> int:
        """The number of blocks and snapshots, hidden ones included."""
        return sum(tree.count for tree in self._trees.by_number.values())

    def __contains__(self, row: int) -> bool:
        return bool(self._nodes.trees[row])

    def add(self, row: int, tag: bytes, above: int, record: PrefixRecord, record_at: int) -> None:
        """Adds a block or a snapshot of the namespace `tag`, whose record begins at byte `record_at` of the ring and
        has the length that the table says. `above`: the row of its parent; 0 for a first block. Raises ParentGone
        if that is not in the index; BadPrefix or LimitReached if the record does not fit its parent, or contradicts
        itself, or there are too many trees. Nothing has changed then."""
        nodes = self._nodes
        tree = self._tree(tag, above, record)
        if record.snapshot:
            if not above or record.count or record.media:
                raise BadPrefix("a snapshot stands in a block, and has no tokens and no media of its own")
            self._snapshots.add(row, above, tree, record.start)
            nodes.enter(row, tree.number, record_at + record.text_at, 0)
        else:
            size = tree.name.block_tokens
            depth = self._table.depths[above] + 1 if above else 0
            if record.start != depth * size or (above and nodes.count(above) != size):
                raise BadPrefix(
                    f"a block begins at token {record.start}, but its parent is incomplete or ends elsewhere"
                )
            if not 0 < record.count <= size:
                raise BadPrefix(f"a block has {record.count} tokens; 1 to {size} are possible")
            if depth >= BLOCKS_MAX:
                raise BadPrefix(f"a sequence has more than {BLOCKS_MAX} blocks")
            checked(record.media, record.start, record.start + record.count)
            nodes.enter(row, tree.number, record_at + record.text_at, record.count)
            if record.count == size and not (depth + 1) * size % tree.step:
                digest = self._digest(row, above, tree)
                if digest is not None:
                    self._digests[row] = digest
                    tree.checkpoints[digest] = row
            nodes.insert(above or -tree.number, row)
        self._trees.joined(tree)

    def remove(self, row: int) -> None:
        """Removes a row, if it is in the index. Its children are matched no more."""
        nodes = self._nodes
        number = nodes.trees[row]
        if not number:
            return
        tree = self._trees.by_number[number]
        if not nodes.count(row):
            self._snapshots.remove(row)
        else:
            above = self._table.parents[row]
            if not above or nodes.trees[above]:
                nodes.discard(above or -number, row)
            digest = self._digests.pop(row, None)
            if digest is not None and tree.checkpoints.get(digest) == row:
                del tree.checkpoints[digest]
        nodes.leave(row)
        self._trees.left(tree)

    def match(self, tag: bytes, query: PrefixRecord, folded: Tokens) -> Found:
        """The longest cached prefix of a sequence that leaves at least one token to compute, cuts no media item, and
        can be continued in its layout, in all trees of the namespace `tag` and the query's scope. `query`, `folded`: as
        for Query."""
        asked = Query(query, folded, self._start)
        best = Found()
        for tree in self._trees.of(tag, query.scope):
            agreement, path = self._walk(tree, asked)
            limit = min(agreement, asked.count - 1)
            if limit <= best.offset:
                continue
            if tree.name.exact:
                snapshot, position = self._snapshots.last(path, tree, asked, limit, best.offset)
            else:
                snapshot, position = 0, asked.uncut(limit)
            if position <= best.offset:
                continue
            del path[-(-position // tree.name.block_tokens) :]
            best = Found(position, path, snapshot)
        return best

    def check_invariants(self) -> None:
        nodes = self._nodes
        nodes.check_invariants()
        self._snapshots.check_invariants()
        rows = [row for row in self._table.in_order() if nodes.trees[row]]
        assert len(rows) == len(self)
        for row in rows:
            assert self._table.records[row], "a node without a record"
            above = self._table.parents[row] or -nodes.trees[row]
            if nodes.count(row):
                assert (above > 0 and not nodes.trees[above]) or row in nodes.children(above), "a node is not in order"
        for row, digest in self._digests.items():
            tree = self._trees.by_number[nodes.trees[row]]
            assert self._digest(row, self._table.parents[row], tree) in (digest, None)
        for tree in self._trees.by_number.values():
            assert all(self._digests.get(row) == digest for digest, row in tree.checkpoints.items())

    def _tree(self, tag: bytes, above: int, record: PrefixRecord) -> Tree:
        """The tree of a new block. It may be new and not stored anywhere yet."""
        if not above:
            return self._trees.for_first(tag, record)
        number = self._nodes.trees[above]
        if not number:
            raise ParentGone("the parent block is not indexed yet after a restart: put it again in a while")
        if not self._nodes.count(above):
            raise BadPrefix("the parent is a snapshot, which has no children")
        tree = self._trees.by_number[number]
        if tree.name != TreeName.of(tag, record):
            raise BadPrefix("the parent block is of another namespace, scope, layout or block size")
        return tree

    def _digest(self, row: int, above: int, tree: Tree) -> int | None:
        """The digest of everything up to a block's end; None if a block or the digest before it is missing."""
        nodes, stretch = self._nodes, [row]
        for _ in range(tree.step // tree.name.block_tokens - 1):
            if not above or not nodes.trees[above]:
                return None
            stretch.append(above)
            above = self._table.parents[above]
        before = self._digests.get(above) if above else self._start
        if before is None:
            return None
        stretch.reverse()
        return next_digest(before, b"".join(map(nodes.text, stretch)), b"".join(map(nodes.media, stretch)))

    def _walk(self, tree: Tree, query: Query) -> tuple[int, list[int]]:
        """The largest number of tokens that a sequence of the tree has in common with the query, and the blocks up to
        there."""
        nodes, size = self._nodes, tree.name.block_tokens
        path = self._to_checkpoint(tree, query)
        node = path[-1] if path else -tree.number
        at = len(path) * size
        while at < query.count:
            text = query.text(at, at + size)
            media = query.packed(at, at + size) if query.media else b""
            longest, best = 0, 0
            for other in nodes.neighbours(node, text, media):
                length = common(text, nodes.text(other))
                if length > longest:
                    theirs = nodes.media(other)
                    if theirs != media:
                        length = agreed(unpacked_media(media), unpacked_media(theirs), at + length) - at
                if length > longest:
                    best, longest = other, length
                    if longest == size:
                        break
            if not longest:
                break
            node = best
            path.append(node)
            at += longest
            if longest < size:
                break
        return at, path

    def _to_checkpoint(self, tree: Tree, query: Query) -> list[int]:
        """The blocks up to the last checkpoint that the query shares, or only those before the first hidden or removed
        block."""
        last = 0
        if tree.checkpoints:
            for digest in query.checkpoints(tree.step):
                row = tree.checkpoints.get(digest)
                if row is None:
                    break
                last = row
        path: list[int] = []
        while last:
            if self._nodes.trees[last] and self._table.states[last] == LIVE:
                path.append(last)
            else:
                path.clear()
            last = self._table.parents[last]
        return path[::-1]


class Snapshots:
    """The snapshots of one index. Hidden ones stay, and are passed over. `start`: the digest of an empty sequence."""

    def __init__(self, table: RowTable, nodes: Nodes, start: int) -> None:
        self._table = table
        self._nodes = nodes
        self._start = start
        self._listed: dict[int, tuple[int, int, int]] = {}
        """By row: digest, level and offset; `_found`: the rows of each digest."""
        self._found: dict[int, tuple[int, ...]] = {}
        self._levels: dict[int, Counter[int]] = {}
        """By level, the number of snapshots at each offset. A row is used again, so a level is named by the span id of
        the row, and that of a tree's first blocks by the tree's number."""

    def add(self, row: int, block: int, tree: Tree, position: int) -> None:
        """Raises BadPrefix if the position is not within the block or at its end. Nothing has changed then."""
        offset = position - self._table.depths[block] * tree.name.block_tokens
        if not 0 < offset <= self._nodes.count(block):
            raise BadPrefix(f"a snapshot for position {position}, which is not in its block")
        media = self._nodes.media(block)
        begun = sum(item.start < position for item in unpacked_media(media))
        level = self._name(self._table.parents[block], tree)
        text = self._nodes.text(block)[: offset * TOKEN_BYTES]
        digest = snapshot_digest(self._start, level, offset, text, media[: begun * MEDIA_BYTES])
        self._listed[row] = digest, level, offset
        self._found[digest] = (*self._found.get(digest, ()), row)
        self._levels.setdefault(level, Counter())[offset] += 1

    def remove(self, row: int) -> None:
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
                row = next((row for row in rows if self._table.states[row] == LIVE), 0)
                if row or looks == LOOKS_MAX:
                    return (row, position) if row and position > least else (0, 0)
        return 0, 0

    def check_invariants(self) -> None:
        assert {row for rows in self._found.values() for row in rows} == self._listed.keys()
        levels: dict[int, Counter[int]] = {}
        for row, (digest, level, offset) in self._listed.items():
            assert row in self._found[digest] and self._nodes.trees[row]
            levels.setdefault(level, Counter())[offset] += 1
        assert levels == self._levels

    def _name(self, above: int, tree: Tree) -> int:
        level: int = self._table.span_ids[above] if above else tree.number
        return level
