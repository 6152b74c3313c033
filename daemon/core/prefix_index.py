"""Finds the cached sequence with the longest common prefix with a query, exact to the token and to the media item.

    namespace ─ scope ─ layout: a tree ─ block ─ block ─ block …      each block a node, its text in the ring
                                  └ block …        └ snapshot         siblings in the order of their text

Every max(1024, block_tokens) tokens there is a checkpoint: a running digest, 128 bits, of all tokens and media before
it. A match computes the query's digests up to the last known checkpoint, takes the path from there back to the first
block, and walks on from the checkpoint block by block, comparing text. The number of steps is at most that of the
query's checkpoints and blocks, each O(log n) in the stored blocks, plus at most LOOKS_MAX probes for snapshots, in each
of at most LAYOUTS_MAX trees.

The removal of a block also makes all its descendants unreachable, since a path must be unbroken up to the first block.
The children stay known until each is removed.

Owns the trees. Does not own the blocks' entries, nor their removal. Pure: it reads the ring through a callable and has
no clock. Text and media are in the ring only and are not copied, so a block must be removed, or hidden until its
removal, before its place is reused.

Invariant: a node is in its parent's order exactly while it is not hidden.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ...errors import BadPrefix, ParentGone
from ...ipc.schema import BLOCKS_MAX
from ...shm.layout import NAMESPACE_TAG_BYTES
from ...shm.prefix import (
    BLOCK_TOKENS_MAX,
    BLOCK_TOKENS_MIN,
    PrefixRecord,
    Tokens,
    agreed,
    unpacked_media,
)
from .prefix_query import Query, checked, initial_digest, next_digest
from .prefix_snapshots import Snapshots
from .prefix_tree import (
    CHECKPOINT_TOKENS,
    COUNT_BITS,
    COUNT_MASK,
    Extra,
    Node,
    Read,
    Siblings,
    Snapshot,
    Tree,
    common,
    count,
    each,
)

LAYOUTS_MAX: Final = 16
"""Layouts of one scope of a namespace generation; each has a tree that is searched separately."""


class Found(NamedTuple):
    """The first `offset` tokens of a query are cached. `blocks`: the keys of the blocks that contain them, from the
    first; the last block may reach further. `snapshot`: the key of the snapshot at exactly that offset."""

    offset: int
    blocks: list[bytes]
    snapshot: bytes | None


_NONE: Final = Found(0, [], None)


class PrefixIndex:
    """The trees of blocks.

    Args:
        read: (address, bytes) → the ring's bytes. A block's folded tokens, and right before them its packed media, as
            in its record.
        seed: of the digests; random and secret.
        checkpoint_tokens: the minimum distance between checkpoints.
    """

    def __init__(self, read: Read, seed: int, *, checkpoint_tokens: int = CHECKPOINT_TOKENS) -> None:
        self._checkpoint_tokens = checkpoint_tokens
        self._order = Siblings(read)
        self._start = initial_digest(seed)
        self._nodes: dict[bytes, Node | Snapshot] = {}
        self._trees: dict[bytes, dict[bytes, dict[tuple[bytes, int, bool], Tree]]] = {}
        self._hidden: dict[Node, dict[Node, Tree]] = {}
        self._snapshots = Snapshots(self._order, self._start)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def __len__(self) -> int:
        """The number of blocks and snapshots, including hidden ones and those whose parent was removed."""
        return len(self._nodes)

    def add(self, key: bytes, record: PrefixRecord, text_at: int) -> None:
        """Adds a block or a snapshot. Its tokens begin at byte `text_at` of the ring.

        Raises:
            ParentGone: the parent is not known, or is being evicted.
            BadPrefix: the record does not fit its parent, contradicts itself, or has a known key. Nothing has changed,
                in either case.
        """
        if key in self._nodes:
            raise BadPrefix(f"the block {key.hex()} is known already")
        parent = self._parent(key, record)
        tree = parent.tree
        assert tree is not None
        if record.snapshot:
            if parent is tree or record.count or record.media:
                raise BadPrefix("a snapshot stands in a block, and has no tokens and no media of its own")
            self._nodes[key] = self._snapshots.add(key, parent, tree, record.start)
            return
        size = tree.block_tokens
        if record.start != parent.depth * size or parent.place & COUNT_MASK != size:
            raise BadPrefix(f"a block begins at token {record.start}, but its parent is incomplete or ends elsewhere")
        if not 0 < record.count <= size:
            raise BadPrefix(f"a block has {record.count} tokens; 1 to {size} are possible")
        if parent.depth >= BLOCKS_MAX:
            raise BadPrefix(f"a sequence has more than {BLOCKS_MAX} blocks")
        node = Node(key, parent, tree, text_at << COUNT_BITS | record.count, parent.depth + 1)
        if record.media or (parent.extra is not None and parent.extra.overhang is not None):
            node.extra = _with_media(record, parent)
        if record.count == size and not node.depth * size % tree.step:
            node.digest = self._digest(node, tree)
        self._order.insert(parent, node)
        if parent is tree:
            scopes = self._trees.setdefault(tree.name[0], {})
            scopes.setdefault(record.scope, {})[tree.name[2:]] = tree
        self._nodes[key] = node
        if node.digest is not None:
            tree.checkpoints[node.digest] = node

    def hide(self, key: bytes) -> None:
        """Hides a block that is being evicted: it is not matched until `show`. Its children must be hidden."""
        node = self._nodes[key]
        if isinstance(node, Snapshot):
            node.hidden = True
            self._snapshots.leave(node)
        elif node.tree is not None:
            assert node.parent is not None
            self._hidden.setdefault(node.parent, {})[node] = node.tree
            self._take_out(node, node.parent, node.tree)

    def show(self, key: bytes) -> None:
        """Shows a hidden block again. Its parent must be shown."""
        node = self._nodes[key]
        if isinstance(node, Snapshot):
            if node.hidden:
                node.hidden = False
                self._snapshots.enter(node)
        elif node.tree is None:
            assert node.parent is not None
            node.tree = self._unhide(node, node.parent)
            self._order.insert(node.parent, node, again=True)
            if node.digest is not None:
                node.tree.checkpoints.setdefault(node.digest, node)

    def remove(self, key: bytes) -> list[bytes]:
        """Removes a known block. Its children are matched no more.

        Returns:
            The keys of all children, hidden or not. The caller removes each of them soon.
        """
        node = self._nodes.pop(key)
        if isinstance(node, Snapshot):
            self._snapshots.remove(node)
            return []
        parent = node.parent
        assert parent is not None
        if node.tree is None:
            tree = self._unhide(node, parent)
        else:
            tree = node.tree
            self._take_out(node, parent, tree)
        if parent is tree and tree.children is None and tree not in self._hidden:
            self._drop(tree)
        followed = [child.key for child in each(node.children)]
        followed += [child.key for child in self._hidden.get(node, ())]
        node.children = None  # the children still refer to this node
        return followed + self._snapshots.forget(node)

    def match(self, tag: bytes, query: PrefixRecord, folded: Tokens) -> Found:
        """The longest cached prefix of a sequence that leaves at least one token to compute, cuts no media item, and
        can be continued in its layout.

        Args:
            tag: the namespace's tag. All its trees of the query's scope are searched, whatever their layout.
            query: the whole sequence and all its media.
            folded: its tokens, (query.count,) uint32.

        Raises:
            BadPrefix: the query's media are invalid, or its count is not the number of tokens.
        """
        asked = Query(query, folded, self._start)
        best = _NONE
        for tree in self._trees.get(tag, {}).get(query.scope, {}).values():
            agreement, path = self._walk(tree, asked)
            limit = min(agreement, asked.count - 1)
            if limit <= best.offset:
                continue
            if tree.exact:
                snapshot = self._snapshots.last(path, tree, asked, limit, best.offset)
                if snapshot is None:
                    continue
                position = (snapshot.block.depth - 1) * tree.block_tokens + snapshot.offset
            else:
                position = asked.uncut(limit)
                if position <= best.offset:
                    continue
                level = (position - 1) // tree.block_tokens
                snapshot = self._snapshots.at(path[level - 1] if level else tree, tree, asked, position)
            del path[-(-position // tree.block_tokens) :]
            best = Found(position, [node.key for node in path], None if snapshot is None else snapshot.key)
        return best

    def children(self, key: bytes) -> int:
        """The number of a known block's children that are not hidden."""
        node = self._nodes[key]
        if isinstance(node, Snapshot):
            return 0
        snapshots = node.extra.snapshots if node.extra is not None else None
        return count(node.children) + sum(not snapshot.hidden for snapshot in snapshots or ())

    def path(self, key: bytes) -> list[bytes]:
        """The keys from the first block of the sequence to a known block, which is last."""
        known = self._nodes[key]
        keys = []
        node: Node | None = known.block if isinstance(known, Snapshot) else known
        while node is not None and node.depth:
            keys.append(node.key)
            node = node.parent
        keys.reverse()
        return [*keys, key] if isinstance(known, Snapshot) else keys

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises. Walks all nodes."""
        for key, node in self._nodes.items():
            assert node.key == key
            if isinstance(node, Snapshot):
                continue
            parent = node.parent
            assert parent is not None and node.depth == parent.depth + 1
            assert (node in self._hidden.get(parent, {})) == (node.tree is None), "a node without a tree is not hidden"
            if node.tree is not None:
                gone = parent.depth and self._nodes.get(parent.key) is not parent
                assert gone or node in set(each(parent.children)), "a node is not among its parent's children"
                if node.digest is not None:
                    assert node.digest in node.tree.checkpoints
                    assert self._digest(node, node.tree) in (node.digest, None)
            self._order.check_invariants(node)
        for scopes in self._trees.values():
            assert scopes
            for layouts in scopes.values():
                assert layouts
                for tree in layouts.values():
                    assert tree.children is not None or tree in self._hidden, "an empty tree"
                    assert all(self._nodes.get(node.key) is node for node in tree.checkpoints.values())
                    self._order.check_invariants(tree)
        assert all(self._hidden.values())
        self._snapshots.check_invariants(self._nodes)

    def _parent(self, key: bytes, record: PrefixRecord) -> Node:
        """The parent of a new block: a known block, or a tree. The tree may be new and not stored anywhere yet."""
        tag = key[:NAMESPACE_TAG_BYTES]
        name = (tag, record.scope, record.layout, record.block_tokens, record.exact)
        if record.parent is not None:
            parent = self._nodes.get(record.parent)
            if parent is None:
                raise ParentGone(f"the parent block {record.parent.hex()} is not stored")
            if isinstance(parent, Snapshot):
                raise BadPrefix("the parent is a snapshot, which has no children")
            if parent.tree is None:
                raise ParentGone(f"the parent block {record.parent.hex()} is being evicted")
            if parent.tree.name != name:
                raise BadPrefix("the parent block is of another namespace, scope, layout or block size")
            return parent
        layouts = self._trees.get(tag, {}).get(record.scope, {})
        tree = layouts.get(name[2:])
        if tree is None:
            size = record.block_tokens
            if not BLOCK_TOKENS_MIN <= size <= BLOCK_TOKENS_MAX or size & (size - 1):
                raise BadPrefix(f"{size} tokens a block: no power of two from {BLOCK_TOKENS_MIN} to {BLOCK_TOKENS_MAX}")
            if len(layouts) >= LAYOUTS_MAX:
                raise BadPrefix(
                    f"the namespace has sequences of {LAYOUTS_MAX} layouts, the maximum: use another namespace "
                    "for other layers or another block_tokens, or evict stored sequences"
                )
            tree = Tree(name, max(self._checkpoint_tokens, size))
        return tree

    def _take_out(self, node: Node, parent: Node, tree: Tree) -> None:
        node.tree = None
        self._order.discard(parent, node)
        if node.digest is not None and tree.checkpoints.get(node.digest) is node:
            del tree.checkpoints[node.digest]

    def _unhide(self, node: Node, parent: Node) -> Tree:
        hidden = self._hidden[parent]
        tree = hidden.pop(node)
        if not hidden:
            del self._hidden[parent]
        return tree

    def _drop(self, tree: Tree) -> None:
        tag, scope, layout, size, exact = tree.name
        scopes = self._trees[tag]
        del scopes[scope][layout, size, exact]
        if not scopes[scope]:
            del scopes[scope]
        if not scopes:
            del self._trees[tag]

    def _digest(self, node: Node, tree: Tree) -> int | None:
        """The digest of everything up to the node's end, if a checkpoint is there."""
        stretch: list[Node] = []
        above: Node | None = node
        for _ in range(tree.step // tree.block_tokens):
            if above is None or above.tree is None:
                return None
            stretch.append(above)
            above = above.parent
        stretch.reverse()
        before = self._start if above is tree or above is None else above.digest
        if before is None:
            return None
        text = b"".join([self._order.text(one) for one in stretch])
        return next_digest(before, text, b"".join([self._order.media(one) for one in stretch]))

    def _walk(self, tree: Tree, query: Query) -> tuple[int, list[Node]]:
        """The largest number of tokens that a sequence of the tree has in common with the query, and the blocks up to
        there."""
        order = self._order
        path = self._to_checkpoint(tree, query)
        node: Node = path[-1] if path else tree
        size = tree.block_tokens
        at = node.depth * size
        while at < query.count and node.children is not None:
            text = query.text(at, at + size)
            media = query.packed(at, at + size) if query.media else b""
            longest = 0
            for other in order.neighbours(node.children, text, media):
                length = common(text, order.text(other))
                if length > longest and (media or other.extra is not None):
                    theirs = order.media(other)
                    if theirs != media:
                        length = agreed(query.between(at, at + size), unpacked_media(theirs), at + length) - at
                if length > longest:
                    node, longest = other, length
                    if longest == size:
                        break
            if not longest:
                break
            path.append(node)
            at += longest
            if longest < size:
                break
        return at, path

    def _to_checkpoint(self, tree: Tree, query: Query) -> list[Node]:
        """The blocks up to the last checkpoint that the query shares, or only those before the first hidden or removed
        block."""
        last: Node | None = None
        if tree.checkpoints:
            for digest in query.checkpoints(tree.step):
                node = tree.checkpoints.get(digest)
                if node is None:
                    break
                last = node
        path: list[Node] = []
        while last is not None and last is not tree:
            if last.tree is None:
                path.clear()
            else:
                path.append(last)
            last = last.parent
        path.reverse()
        return path


def _with_media(record: PrefixRecord, parent: Node) -> Extra:
    """The node's part for a block's media."""
    before = parent.extra.overhang if parent.extra is not None else None
    end = record.start + record.count
    ends = checked(record.media, record.start, end, before or {})
    extra = Extra()
    extra.items = len(record.media)
    overhang = {modality: last for modality, last in ends.items() if last > end}
    extra.overhang = (before if overhang == before else overhang) or None
    return extra
