"""The forms of items: their fields, and the kind, dtypes and number of dimensions of each field.

Owns: the definition of a form, and the forms that this process's own processors have made, by namespace. Does not own:
storing items.

An item of an unknown form was made by another processor, under a name that should have told the two apart. Such an item
is a miss, whatever its name.

A frontend learns forms when vLLM warms its processor up, and from each item that it processes itself. It accepts no
stored item of a form before it has made one of that form.

Invariants: forms are only added, up to FORMS_MAX a namespace.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from .items import Tree, tree_updates

FORMS_MAX: Final = 256
"""Limit on forms in one namespace. Items of further forms are not accepted from other processes."""


class Forms:
    """The forms of one processor's items. Thread-safe."""

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def learn(self, tree: Tree) -> None:
        """Records the form of an item that this process has made."""
        if len(self._known) < FORMS_MAX:
            self._known.add(_form(tree))

    def has(self, tree: Any) -> bool:
        """Whether a stored tree is an item of a known form, with readable prompt updates."""
        try:
            if _form(tree) not in self._known:
                return False
            tree_updates(tree)
        except Exception:
            # The tree was not made by items.py. The type of the exception depends on the tree.
            return False
        return True


_by_namespace: Final[dict[bytes, Forms]] = {}


def forms_of(tag: bytes) -> Forms:
    """The forms of the namespace with this tag, shared by all its caches in this process."""
    return _by_namespace.setdefault(tag, Forms())


def _form(tree: Tree) -> Any:
    """The form of a tree of items.py. It is the same before the tree is stored and after it is read."""
    return frozenset((name, _field_form(field), _data_form(data)) for name, (data, field) in tree["fields"].items())


def _field_form(field: list[Any]) -> tuple[Any, ...]:
    """The form of a field, without the values that differ from item to item."""
    kind, keep_on_cpu, *rest = field
    return (kind, keep_on_cpu, rest[-1]) if kind == "flat" else (kind, keep_on_cpu)


def _data_form(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return str(data.dtype).removeprefix("torch."), data.ndim
    if isinstance(data, np.ndarray):
        return data.dtype.name, data.ndim
    if isinstance(data, list | tuple):
        return type(data).__name__, frozenset(map(_data_form, data))
    return type(data).__name__
