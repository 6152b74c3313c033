"""The trees of the prefix index: one for each layout of the sequences in one scope of a namespace.

Owns the trees and their numbers. Does not own their nodes (`nodes`).

Invariant: a tree exists exactly while it has nodes, hidden ones and those without a path to its root included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ...errors import BadPrefix, LimitReached
from ...shm.payloads.prefix import BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN, PrefixRecord

LAYOUTS_MAX: Final = 16
"""Layouts of one scope of a namespace generation; each has a tree that is searched separately."""
TREES_MAX: Final = 0xFFFF


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
    """All trees of one index."""

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
        """The tree of a first block. It may be new, and is kept once it is `joined`.

        Raises:
            BadPrefix: the size of a block is impossible, or the scope has too many layouts.
            LimitReached: there are too many trees.
        """
        name = TreeName.of(tag, record)
        layouts = self._by_scope.get(name[:2], {})
        tree = layouts.get(name)
        if tree is not None:
            return tree
        size = record.block_tokens
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
        """The tree has one node less."""
        tree.count -= 1
        if not tree.count:
            del self.by_number[tree.number]
            layouts = self._by_scope[tree.name[:2]]
            del layouts[tree.name]
            if not layouts:
                del self._by_scope[tree.name[:2]]
