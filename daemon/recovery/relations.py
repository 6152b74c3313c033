"""Ties recovered rows to their parents, level by level from the roots of the trees.

Owns: the columns of families after a restart. Does not own them later (`families`).

Invariant: whoever is tied has all its ancestors.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

import numpy as np

from ..store.families import DEPTH_MAX, Families
from ..store.table import EDGE, RowTable
from .ordering import sort

STEP_ROWS: Final = 1 << 14
STEP_LEVELS: Final = 128

Array = np.ndarray[Any, Any]


def tie(table: RowTable, families: Families, children: Array, parents: Array) -> Generator[None, None, Array]:
    """Makes each of `children` a child of its parent; EDGE: its parent is not stored.

    Returns:
        The rows that were not tied: their parent, or another ancestor, is missing.
    """
    if not len(children):
        return children
    bits, depths, befores = table.row_bits, table.column("depths"), table.column("befores")
    # Sorted by parents, so that the children of one are neighbours; among them the order is that of rows.
    packed = parents.astype(np.uint64) << np.uint64(bits) | children.astype(np.uint64)
    yield
    yield from sort(packed)
    children = (packed & np.uint64(table.row_mask)).astype(np.int64)
    parents = (packed >> np.uint64(bits)).astype(np.int64)
    begins = np.flatnonzero(np.concatenate([[True], parents[1:] != parents[:-1]]))
    counts = np.diff(np.append(begins, len(parents)))
    first, count = np.zeros(table.row_mask + 1, np.int64), np.zeros(table.row_mask + 1, np.int64)
    first[parents[begins]], count[parents[begins]] = begins, counts
    is_child = np.zeros(table.row_mask + 1, np.bool_)
    is_child[children] = True
    yield
    tied = np.zeros(len(children), np.bool_)
    level = parents[begins][~is_child[parents[begins]] & (parents[begins] != EDGE)]
    yield
    levels = rows = 0
    while len(level):
        many = count[level]
        ends = np.cumsum(many)
        at = np.repeat(first[level] - ends + many, many) + np.arange(int(ends[-1]))
        tied[at] = True
        above, level = np.repeat(level, many), children[at]
        depths[level] = np.minimum(depths[above].astype(np.int64) + 1, DEPTH_MAX)
        befores[level] = befores[above] + table.column("sizes")[above]
        level = level[count[level] > 0]
        levels, rows = levels + 1, rows + len(at)
        if rows >= STEP_ROWS or levels >= STEP_LEVELS:
            levels = rows = 0
            yield
    lost, children, parents = children[~tied], children[tied], parents[tied]
    yield
    table.column("parents")[children] = parents
    yield
    same = np.flatnonzero(parents[1:] == parents[:-1])
    table.column("olders")[children[same + 1]] = children[same]
    table.column("newers")[children[same]] = children[same + 1]
    yield
    begins = np.flatnonzero(np.concatenate([np.ones(min(len(parents), 1), np.bool_), parents[1:] != parents[:-1]]))
    ends = np.append(begins[1:], len(parents))[: len(begins)]
    table.column("firsts")[parents[begins]] = children[ends - 1]
    table.column("children")[parents[begins]] = ends - begins
    families.linked += len(children)
    return lost
