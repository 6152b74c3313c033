"""Sizes of nested trees with leaves of any type.

Owns: the rules what a leaf is, and how many bytes it counts. Does not own: limits.
Invariants: imports neither torch nor numpy; a leaf's own `nbytes` is its size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

_CONTAINERS: Final = (Mapping, list, tuple)


def item_bytes(tree: Any, *, nodes_max: int | None = None) -> int:
    """Bytes of all leaves of a nested tree. Containers, and the keys of mappings, count 0.

    An array or tensor counts its values' bytes, a str its UTF-8 bytes, bytes their length, any other leaf (int, None)
    the size of its Python object.

    Args:
        nodes_max: limit of containers and leaves that are counted. A tree that contains itself has no end.
    """
    nodes = islice(_nodes(tree), nodes_max)
    return sum(_leaf_bytes(node) for node in nodes if not isinstance(node, _CONTAINERS))


def array_bytes(tree: Any, *, nodes_max: int | None = None) -> int:
    """Bytes of a nested tree's arrays, tensors and byte strings. Other leaves count 0. Otherwise as `item_bytes`."""
    nodes = islice(_nodes(tree), nodes_max)
    return sum(_array_bytes(node) or 0 for node in nodes if not isinstance(node, _CONTAINERS))


def leaf_count(tree: Any) -> int:
    """How many leaves a nested tree has: nodes that are no mapping, list or tuple. An empty container has none."""
    return sum(not isinstance(node, _CONTAINERS) for node in _nodes(tree))


def _nodes(tree: Any) -> Iterator[Any]:
    # Not recursive: a tree may be deeper than the stack.
    rest = [tree]
    while rest:
        node = rest.pop()
        yield node
        if isinstance(node, Mapping):
            rest.extend(node.values())
        elif isinstance(node, list | tuple):
            rest.extend(node)


def _leaf_bytes(leaf: Any) -> int:
    if isinstance(leaf, str):
        return len(leaf.encode("utf-8", "surrogatepass"))
    size_bytes = _array_bytes(leaf)
    return sys.getsizeof(leaf) if size_bytes is None else size_bytes


def _array_bytes(leaf: Any) -> int | None:
    """The bytes of an array, tensor or byte string; None for any other leaf."""
    if isinstance(leaf, bytes | bytearray):
        return len(leaf)
    try:
        # `nbytes` is right for 0 dimensions and narrow dtypes too.
        return int(leaf.nbytes)
    except (AttributeError, RuntimeError):
        # A sparse tensor has the attribute, but it raises.
        return None
