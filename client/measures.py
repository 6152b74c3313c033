"""How large a nested tree is, whatever its leaves are.

Owns: what counts as a leaf, and as its bytes. Imports neither torch nor numpy: a leaf that knows its bytes says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any


def item_bytes(tree: Any) -> int:
    """Bytes of all leaves of a nested tree: of an array or tensor its values', of str its UTF-8's, of bytes their
    number; of any other leaf, as an int or None, what Python takes for it. Mappings' keys and containers count 0.
    """
    return sum(map(_leaf_bytes, _leaves(tree)))


def leaf_count(tree: Any) -> int:
    """How many leaves a nested tree has: all that is no mapping, list or tuple. An empty container has none."""
    return sum(1 for _ in _leaves(tree))


def _leaves(tree: Any) -> Iterator[Any]:
    # Not by recursion: a tree may be deeper than the stack.
    rest = [tree]
    while rest:
        node = rest.pop()
        if isinstance(node, Mapping):
            rest.extend(node.values())
        elif isinstance(node, list | tuple):
            rest.extend(node)
        else:
            yield node


def _leaf_bytes(leaf: Any) -> int:
    if isinstance(leaf, str):
        return len(leaf.encode("utf-8", "surrogatepass"))
    if isinstance(leaf, bytes | bytearray):
        return len(leaf)
    try:
        return int(leaf.nbytes)
    except (AttributeError, RuntimeError):
        # A sparse tensor has the attribute, and raises.
        return sys.getsizeof(leaf)
