"""Splits an encoder's output into the parts of the items in a batch, and joins such parts.

Owns: the assignment of a tensor's rows to items, and the plain tree in which an item's part is stored. Does not own:
any model. The caller gives the number of rows of each item.

An output is a tensor, a ModelOutput, a list or tuple of outputs, None or a scalar. In every tensor the items follow one
another along the first dimension: all rows of the batch or, if an encoder merges neighbouring rows, a fraction of them.
A list with one tensor for each item must be declared (`listed`).

Invariants: joining the parts of a split gives the same types, and tensors that are equal bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from transformers.utils.generic import ModelOutput

from ...errors import BadTree, UnsupportedLeaf
from ...shm.payloads.tensors import bytes_of

_SCALARS: Final = (bool, int, float, str)


class NotSplittable(UnsupportedLeaf):
    """The output cannot be divided among the items."""


class CallItems:
    """The items of one call, with their numbers of rows.

    Args:
        rows: the number of rows of each item.
        listed: fields of the output with a list of one tensor for each item; "" is the output itself.
        modules: names of the Python modules that define the output's classes.
    """

    def __init__(self, rows: Sequence[int], *, listed: Sequence[str] = (), modules: Sequence[str] = ()) -> None:
        self._count = len(rows)
        self._rows = rows
        self._listed = frozenset(listed)
        self._modules = modules

    def split(self, output: Any) -> list[Any]:
        """One tree for each item, in the form that `Client.put` takes. Raises NotSplittable if a tensor has another
        number of rows, or a value is of a type that no output has."""
        return self._split(output, "")

    def join(self, parts: Sequence[Any], device: Any) -> Any:
        """The output with these parts, in new memory on a device. Raises BadTree if the parts are not of one output."""
        try:
            return self._join(parts, device)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise BadTree(f"the parts are not those of one output: {error}") from None

    def _split(self, node: Any, field: str) -> list[Any]:
        count = self._count
        if isinstance(node, torch.Tensor):
            return [["rows", piece] for piece in self._pieces(node)]
        if field in self._listed and isinstance(node, list | tuple):
            if len(node) != count or not all(isinstance(item, torch.Tensor) for item in node):
                raise NotSplittable(f"{field or 'the output'} has {len(node)} items, the batch {count}")
            return [["item", type(node).__name__, item] for item in node]
        if isinstance(node, ModelOutput):
            name = type(node).__name__
            if self._class(name) is not type(node):
                raise NotSplittable(f"{name} is not one of the model's own output classes")
            fields = {field: self._split(child, field) for field, child in node.items()}
            return [["output", name, {field: parts[at] for field, parts in fields.items()}] for at in range(count)]
        if type(node) is list or type(node) is tuple:
            children = [self._split(child, f"{field}[]") for child in node]
            return [[type(node).__name__, [parts[at] for parts in children]] for at in range(count)]
        if node is None or type(node) in _SCALARS:
            return [["same", node]] * count
        raise NotSplittable(f"{field or 'the output'} is a {type(node).__name__}")

    def _pieces(self, tensor: Any) -> Sequence[Any]:
        found = tensor.shape[0] if tensor.ndim else 0
        total = sum(self._rows)
        merged = total // found if found else 0
        if not merged or merged * found != total or any(rows % merged for rows in self._rows):
            raise NotSplittable(f"a tensor {list(tensor.shape)} for items of {list(self._rows)} rows")
        pieces: Sequence[Any] = tensor.split([rows // merged for rows in self._rows])
        return pieces

    def _join(self, parts: Sequence[Any], device: Any) -> Any:
        kind = parts[0][0]
        if any(part[0] != kind for part in parts):
            raise BadTree("the parts have different types")
        match kind:
            case "rows":
                pieces = [part[1] for part in parts]
                whole = _gathered(pieces, device)
                if [piece.shape for piece in self._pieces(whole)] != [piece.shape for piece in pieces]:
                    raise BadTree("a part has another number of rows than its item")
                return whole
            case "item":
                items = [_gathered([part[2]], device) for part in parts]
                return tuple(items) if parts[0][1] == "tuple" else items
            case "output":
                fields = {name: self._join([part[2][name] for part in parts], device) for name in parts[0][2]}
                made = self._class(parts[0][1])
                if made is None:
                    raise BadTree(f"no output class is called {parts[0][1]!r}")
                return made(**fields)
            case "list" | "tuple":
                children = [self._join([part[1][at] for part in parts], device) for at in range(len(parts[0][1]))]
                return tuple(children) if kind == "tuple" else children
            case "same" if parts[0][1] is None or type(parts[0][1]) in _SCALARS:
                return parts[0][1]
        raise BadTree(f"a part of the unknown type {kind!r}")

    def _class(self, name: str) -> Any:
        candidates = (getattr(sys.modules.get(module), name, None) for module in self._modules)
        return next((found for found in candidates if isinstance(found, type) and issubclass(found, ModelOutput)), None)


def _gathered(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    first = pieces[0]
    if any(piece.dtype != first.dtype or piece.shape[1:] != first.shape[1:] for piece in pieces):
        raise BadTree("the pieces have different dtypes or shapes")
    if device.type != "cpu" or first.ndim == 0 or not all(p.is_contiguous() and p.device == device for p in pieces):
        return torch.cat([piece.to(device) for piece in pieces]) if len(pieces) > 1 else first.to(device, copy=True)
    whole = first.new_empty((sum(len(piece) for piece in pieces), *first.shape[1:]))
    at = 0
    for piece in pieces:
        # numpy copies, since torch's threads take many times as long while the cores are busy.
        np.copyto(bytes_of(whole[at : at + len(piece)], "the output"), bytes_of(piece, "a part"))
        at += len(piece)
    return whole
