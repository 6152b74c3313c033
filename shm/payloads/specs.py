"""Where a node stands in a tree, what is wrong with it, as the errors of packing.py say it, and leaves whose content
comes later.

Invariants: a place costs the walk one tuple, and text only in an error.
"""

from __future__ import annotations

import operator
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...errors import UnsupportedLeaf, shown
from .dtypes import DType, dtype_named, name_of, name_of_torch
from .header import INT_MAX, INT_MIN, INT_RANGE, NDIM_MAX

Place: TypeAlias = tuple[Any, ...]
"""Where a node stands: (the place of its container, its key), and () for the root."""


class Spec(NamedTuple):
    """A leaf whose content its owner writes later, as an argument of `reserve`.

    `dtype` is a numpy dtype or its name, a name of an ml_dtypes dtype ("bfloat16"), or a torch.dtype. With a
    torch.dtype, readers get the leaf as a tensor.

    Example:
        >>> tensord.Spec((576, 64), "bfloat16").shape
        (576, 64)
    """

    shape: tuple[int, ...]
    dtype: Any


def where(place: Place) -> str:
    """The place in the words of an error, such as tree['a'][2]."""
    keys = []
    while place:
        place, key = place
        keys.append(f"[{shown(key, brief=True)}]")
    return "tree" + "".join(reversed(keys))


def check_key(key: Any, place: Place) -> None:
    """Raises UnsupportedLeaf unless a key of the dict at `place`, which is no str, is bytes or an int of 64 bits."""
    kind = type(key)
    if kind is not bytes and (kind is not int or not INT_MIN <= key <= INT_MAX):
        what = f"{where(place)} has the key {shown(key, brief=True)} of type {kind.__name__}"
        raise UnsupportedLeaf(f"{what}; keys are str, bytes, or int in {INT_RANGE}")


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


def spec_of(spec: Spec, torch: ModuleType | None, place: Place) -> tuple[bool, str, DType, tuple[int, ...]]:
    """Whether readers get the leaf as a tensor, the name of its dtype, the dtype, and its shape. Raises UnsupportedLeaf
    if no leaf can have them."""
    is_tensor = torch is not None and isinstance(spec.dtype, torch.dtype)
    name = None
    if is_tensor and torch is not None:
        name = name_of_torch(torch, spec.dtype)
    elif isinstance(spec.dtype, str) and dtype_named(spec.dtype) is not None:
        name = spec.dtype
    elif spec.dtype is not None:
        try:
            name = name_of(np.dtype(spec.dtype))
        except (TypeError, ValueError, SyntaxError):
            pass  # not all exceptions: one of a signal handler is the caller's
    dtype = dtype_named(name) if name is not None else None
    if name is None or dtype is None:
        raise UnsupportedLeaf(f"{where(place)} is a Spec of dtype {shown(spec.dtype)}, which no leaf can have")
    try:
        shape = tuple(operator.index(length) for length in spec.shape)
    except TypeError:
        shape = (-1,)
    if len(shape) > NDIM_MAX or any(length < 0 for length in shape):
        given = f"{where(place)} is a Spec of shape {shown(spec.shape, brief=True)}"
        raise UnsupportedLeaf(f"{given}; a shape is up to {NDIM_MAX} ints, none negative")
    return is_tensor, name, dtype, shape
