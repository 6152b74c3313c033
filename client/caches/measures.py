"""Sizes of nested trees with leaves of any type.

Owns: the rule how many bytes a leaf counts. Does not own: limits.
Invariants: imports neither torch nor numpy; a leaf's own `nbytes` is its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...shm.payloads.header import NODES_MAX


def array_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays, tensors and byte strings, of any shape, dtype and depth. Scalars and text count 0.

    A leaf that occurs twice counts twice, as when it is stored. A tree that is too large to store, or that contains
    itself, is counted up to the largest number of nodes that can be stored.
    """
    size_bytes, rest = 0, [tree]
    # Not recursive: a tree may be deeper than the stack.
    for _ in range(NODES_MAX):
        if not rest:
            break
        node = rest.pop()
        if isinstance(node, Mapping):
            rest.extend(node.values())
        elif isinstance(node, list | tuple):
            rest.extend(node)
        elif isinstance(node, bytes | bytearray):
            size_bytes += len(node)
        else:
            # `nbytes` is right for 0 dimensions and narrow dtypes too. A sparse tensor's raises RuntimeError.
            with suppress(AttributeError, RuntimeError):
                size_bytes += int(node.nbytes)
    return size_bytes
