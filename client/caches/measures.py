"""How large a nested tree is, whatever its leaves are.

Owns: what counts as a leaf, and as its bytes. Imports neither torch nor numpy: a leaf that knows its bytes says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

_CONTAINERS: Final = (Mapping, list, tuple)


def item_bytes(tree: Any, *, nodes_max: int | None = None) -> int:
    """Bytes of all leaves of a nested tree: of an array or tensor its values', of str its UTF-8's, of bytes their
    number; of any other leaf, as an int or None, what Python takes for it. Mappings' keys and containers count 0.

    Args:
        nodes_max: look at no more containers and leaves than so many. A tree that contains itself has no end.
    """
    nodes = islice(_nodes(tree), nodes_max)
    return sum(_leaf_bytes(node) for node in nodes if not isinstance(node, _CONTAINERS))


def array_bytes(tree: Any, *, nodes_max: int | None = None) -> int:
    """Bytes of a nested tree's arrays, tensors and byte strings; other leaves count 0. Otherwise as `item_bytes`."""
    nodes = islice(_nodes(tree), nodes_max)
    return sum(_array_bytes(node) or 0 for node in nodes if not isinstance(node, _CONTAINERS))


def leaf_count(tree: Any) -> int:
    """How many leaves a nested tree has: all that is no mapping, list or tuple. An empty container has none."""
    return sum(not isinstance(node, _CONTAINERS) for node in _nodes(tree))


def _nodes(tree: Any) -> Iterator[Any]:
    # Not by recursion: a tree may be deeper than the stack.
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
    """None for what is no array, tensor or byte string."""
    if isinstance(leaf, bytes | bytearray):
        return len(leaf)
    try:
        # Their own word for it is right for 0 dimensions and for narrow dtypes too.
        return int(leaf.nbytes)
    except (AttributeError, RuntimeError):
        # A sparse tensor has the attribute, and raises.
        return None
