"""The nodes of the prefix index, one for each block, and the order of siblings by their text.

A node contains no text and no media. Both are in the ring, in the block's record, and are read from there when two
blocks are compared. Siblings are ordered by the bytes of their folded text, then by media, then by key. So the siblings
that agree longest with a query are adjacent to the query's own place in the order.

Owns the nodes and the order of siblings. Does not own which nodes exist (`prefix_index`).

Invariant: siblings are in order. Up to SHELF_MAX are in one list; more are in shelves of at most that size, so that an
insertion or a removal moves few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final, Union

from ...errors import BadPrefix
from ...shm.prefix import MEDIA_BYTES, TOKEN_BYTES

Read = Callable[[int, int], bytes | memoryview]
"""(address, bytes) → the ring's bytes at that address."""

COUNT_BITS: Final = 13
COUNT_MASK: Final = (1 << COUNT_BITS) - 1
SHELF_MAX: Final = 512
"""Siblings in one list."""
CHECKPOINT_TOKENS: Final = 1024
"""The minimum distance between checkpoints."""
_LAST: Final = b"\xff" * 33


class Shelves:
    """Many siblings: lists in order, one after another, none empty."""

    __slots__ = ("lists",)

    def __init__(self, lists: list[list[Node]]) -> None:
        self.lists = lists


Children = Union[None, "Node", "list[Node]", Shelves]


class Snapshot:
    """Continues a sequence at `offset` tokens into `block`. `digest`: the one by which matches find it. `listed`: a
    match can find it."""

    __slots__ = ("block", "digest", "hidden", "key", "listed", "offset")

    def __init__(self, key: bytes, block: Node, offset: int) -> None:
        self.key = key
        self.block = block
        self.offset = offset
        self.digest = 0
        self.hidden = False
        self.listed = False


class Extra:
    """Attributes that few nodes need.

    `items`: the number of media that begin in the block. `overhang`: for each modality, where its last item ends, if
    that is after the block. `snapshots`: those in the block. `offsets`: the offsets of snapshots in the node's
    children, with the number at each. `name`: a number that no other node has.
    """

    __slots__ = ("items", "name", "offsets", "overhang", "snapshots")

    def __init__(self) -> None:
        self.items = 0
        self.overhang: dict[str, int] | None = None
        self.snapshots: list[Snapshot] | None = None
        self.offsets: dict[int, int] | None = None
        self.name = 0


class Node:
    """A block. `tree` is None while the block is hidden, and after its removal.

    `place`: the offset of its tokens in the ring, and their number. `depth`: the number of blocks from the first,
    itself included. `digest`: of everything up to its end, if a checkpoint is there.
    """

    __slots__ = ("children", "depth", "digest", "extra", "key", "parent", "place", "tree")

    def __init__(self, key: bytes, parent: Node | None, tree: Tree | None, place: int, depth: int) -> None:
        self.key = key
        self.parent = parent
        self.tree = tree
        self.place = place
        self.depth = depth
        self.children: Children = None
        self.digest: int | None = None
        self.extra: Extra | None = None

    def more(self) -> Extra:
        if self.extra is None:
            self.extra = Extra()
        return self.extra


Name = tuple[bytes, bytes, bytes, int, bool]
"""The identity of a tree: namespace tag, scope, layout, tokens of a block, exact."""


class Tree(Node):
    """The sequences of one layout in one scope, and the root of their first blocks. A checkpoint every `step`
    tokens."""

    __slots__ = ("block_tokens", "checkpoints", "exact", "name", "step")

    def __init__(self, name: Name, step: int) -> None:
        super().__init__(b"", None, self, name[3], 0)
        self.name = name
        self.block_tokens = name[3]
        self.exact = name[4]
        self.step = step
        self.checkpoints: dict[int, Node] = {}


def each(children: Children) -> Iterator[Node]:
    """All siblings, in order."""
    if isinstance(children, Node):
        yield children
    elif isinstance(children, list):
        yield from children
    elif children is not None:
        for shelf in children.lists:
            yield from shelf


def count(children: Children) -> int:
    """The number of siblings."""
    if children is None:
        return 0
    if isinstance(children, Node):
        return 1
    if isinstance(children, list):
        return len(children)
    return sum(map(len, children.lists))


def common(ours: bytes, theirs: bytes) -> int:
    """The number of tokens in the common prefix of two texts."""
    if ours == theirs:
        return len(ours) // TOKEN_BYTES
    high = min(len(ours), len(theirs)) // TOKEN_BYTES
    if ours[: high * TOKEN_BYTES] == theirs[: high * TOKEN_BYTES]:
        return high
    low = 0
    while high - low > 1:
        middle = (low + high) >> 1
        part = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        if ours[part] == theirs[part]:
            low = middle
        else:
            high = middle
    return low


class Siblings:
    """Finds, inserts and removes siblings in their order, reading O(log n) texts."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def text(self, node: Node) -> bytes:
        """The node's folded tokens, as bytes."""
        place = node.place
        return bytes(self._read(place >> COUNT_BITS, (place & COUNT_MASK) * TOKEN_BYTES))

    def media(self, node: Node) -> bytes:
        """The node's packed media. In the record they are right before the tokens."""
        if node.extra is None or not node.extra.items:
            return b""
        size = node.extra.items * MEDIA_BYTES
        return bytes(self._read((node.place >> COUNT_BITS) - size, size))

    def neighbours(self, children: Children, text: bytes, media: bytes) -> tuple[Node, ...]:
        """The siblings before and after a text's place in the order: at most two."""
        if children is None:
            return ()
        if isinstance(children, Node):
            return (children,)
        if isinstance(children, list):
            rank = self._rank(children, text, media, _LAST)
            return tuple(children[max(0, rank - 1) : rank + 1])
        lists = children.lists
        number = self._shelf(lists, text, media, _LAST)
        shelf = lists[number]
        rank = self._rank(shelf, text, media, _LAST)
        found = shelf[max(0, rank - 1) : rank + 1]
        if rank == len(shelf) and number + 1 < len(lists):
            found.append(lists[number + 1][0])
        return tuple(found)

    def insert(self, parent: Node, node: Node, *, again: bool = False) -> None:
        """Inserts a child of `parent`. `again`: the node was removed from here before, so it needs no check.

        Raises:
            BadPrefix: a child with the same text and media exists. Nothing has changed then.
        """
        children = parent.children
        if children is None:
            parent.children = node
            return
        text, media = self.text(node), self.media(node)
        key = node.key if again else _LAST
        number = 0
        if isinstance(children, Shelves):
            number = self._shelf(children.lists, text, media, key)
            siblings = children.lists[number]
        else:
            siblings = [children] if isinstance(children, Node) else children
        rank = self._rank(siblings, text, media, key)
        if rank and not again:
            before = siblings[rank - 1]
            if self.text(before) == text and self.media(before) == media:
                raise BadPrefix(f"the same tokens are stored there under another key, {before.key.hex()}")
        siblings.insert(rank, node)
        if len(siblings) <= SHELF_MAX:
            if isinstance(children, Node):
                parent.children = siblings
            return
        middle = len(siblings) // 2
        halves = [siblings[:middle], siblings[middle:]]
        if isinstance(children, Shelves):
            children.lists[number : number + 1] = halves
        else:
            parent.children = Shelves(halves)

    def discard(self, parent: Node, node: Node) -> None:
        """Removes a child, if it is there."""
        children = parent.children
        if children is node:
            parent.children = None
        elif isinstance(children, list):
            self._take(children, node)
            if len(children) == 1:
                parent.children = children[0]
        elif isinstance(children, Shelves):
            lists = children.lists
            number = self._shelf(lists, self.text(node), self.media(node), node.key)
            if not self._take(lists[number], node):  # the node's text in the ring was overwritten
                number = next((number for number, shelf in enumerate(lists) if node in shelf), number)
                self._take(lists[number], node)
            if not lists[number]:
                del lists[number]
            if len(lists) == 1 and len(lists[0]) < SHELF_MAX // 2:
                parent.children = lists[0] if len(lists[0]) > 1 else lists[0][0]

    def check_invariants(self, parent: Node) -> None:
        """Asserts the order, and that no list or shelf is empty or too long."""
        children = parent.children
        if isinstance(children, list):
            assert 1 < len(children) <= SHELF_MAX, len(children)
        elif isinstance(children, Shelves):
            assert children.lists
            assert all(0 < len(shelf) <= SHELF_MAX for shelf in children.lists)
        ranks = [(self.text(node), self.media(node), node.key) for node in each(children)]
        assert all(one < other for one, other in pairwise(ranks)), parent.key.hex()

    def _take(self, siblings: list[Node], node: Node) -> bool:
        rank = self._rank(siblings, self.text(node), self.media(node), node.key) - 1
        if rank < 0 or siblings[rank] is not node:
            if node not in siblings:
                return False
            rank = siblings.index(node)
        del siblings[rank]
        return True

    def _rank(self, siblings: list[Node], text: bytes, media: bytes, key: bytes) -> int:
        """The number of siblings that are not after (text, media, key)."""
        read = self._read
        low, high = 0, len(siblings)
        while low < high:
            middle = (low + high) >> 1
            node = siblings[middle]
            place = node.place
            theirs = bytes(read(place >> COUNT_BITS, (place & COUNT_MASK) * TOKEN_BYTES))
            if theirs < text or (theirs == text and (self.media(node), node.key) <= (media, key)):
                low = middle + 1
            else:
                high = middle
        return low

    def _shelf(self, lists: list[list[Node]], text: bytes, media: bytes, key: bytes) -> int:
        """The index of the list that contains, or would contain, (text, media, key)."""
        low, high = 1, len(lists)
        while low < high:
            middle = (low + high) >> 1
            if self._rank(lists[middle][:1], text, media, key):
                low = middle + 1
            else:
                high = middle
        return low - 1
