"""Sizes of nested trees with leaves of any type.

Owns: the rule how many bytes a leaf counts. Does not own: limits.
Invariants: imports neither torch nor numpy; a leaf's own `nbytes` is its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ...shm.payloads.header import NODES_MAX


def array_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays, tensors and byte strings, of any shape, dtype and depth. Scalars and text count 0.

    A leaf that occurs twice counts twice, as when it is stored. A tree that is too large to store, or that contains
    itself, is counted up to the largest number of nodes that can be stored.
    """
    return sum(_leaf_bytes(node) for node in islice(_nodes(tree), NODES_MAX))


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


def _leaf_bytes(node: Any) -> int:
    if isinstance(node, Mapping | list | tuple | str):
        return 0
    if isinstance(node, bytes | bytearray):
        return len(node)
    try:
        # `nbytes` is right for 0 dimensions and narrow dtypes too.
        return int(node.nbytes)
    except (AttributeError, RuntimeError):
        # A sparse tensor has the attribute, but it raises.
        return 0
