"""Where a node stands in a tree, and what is wrong with it, as the errors of packing.py say it.

Owns: places, and the words about values that no tree holds. Does not own: the walk that finds them.

Invariants: a place costs the walk one tuple, and text only in an error.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from ..errors import UnsupportedLeaf, shown
from .header import INT_MAX, INT_MIN, INT_RANGE
from .tree import Spec

Place: TypeAlias = tuple[Any, ...]
"""Where a node stands: (the place of its container, its key), and () for the root."""


def where(place: Place) -> str:
    """The place in the words of an error, such as tree['a'][2]."""
    keys = []
    while place:
        place, key = place
        keys.append(f"[{shown(key, brief=True)}]")
    return "tree" + "".join(reversed(keys))


def check_key(key: Any, place: Place) -> None:
    """Checks a key of the dict at `place`, which is not a str.

    Raises:
        UnsupportedLeaf: it is neither bytes nor an int of 64 bits.
    """
    kind = type(key)
    if kind is not bytes and (kind is not int or not INT_MIN <= key <= INT_MAX):
        raise UnsupportedLeaf(
            f"{where(place)} has the key {shown(key, brief=True)} of type {kind.__name__}; "
            f"keys are str, bytes, or int in {INT_RANGE}"
        )


def described(node: Any) -> str:
    """What a value is that no tree holds, and what to pass instead."""
    kind = type(node)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(node, Spec):
        return "a Spec, which only reserve takes; pass an array"
    for base in (dict, list, tuple, str, bytes, int, float):
        if isinstance(node, base):
            plain = base.__name__
            return f"a {name}, which would come back as a plain {plain}; pass {plain}(x)"
    if isinstance(node, np.ndarray):
        return f"a {name}, which would come back as a plain ndarray; pass its plain arrays"
    if isinstance(node, bytearray | memoryview):
        return f"a {name}; pass bytes(x), or np.frombuffer(x, np.uint8)"
    return (
        f"a {name}; a tree holds dict, list, tuple, str, bytes, int, float, bool, None, numpy "
        "arrays and torch tensors: convert it, for instance with np.asarray(x)"
    )
