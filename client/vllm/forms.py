"""The forms of items: which fields they have, of what kind, with what dtypes and how many dimensions.

Owns: what a form is, and which forms this process's own processors have made, by namespace. An item of another form was
made by another processor, under a name that should have told the two apart: it is a miss, whatever its name says.

A frontend learns the forms when vLLM warms its processor up, and from each item that it processes by itself. Until it
has made an item of some form, it takes none of that form from others.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, Final

import numpy as np
import torch

from .items import Tree, tree_updates

FORMS_MAX: Final = 256
"""Of one namespace. A processor whose items have more forms than this shares the first ones."""


class Forms:
    """The forms of one processor's items. Safe to use from several threads."""

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def learn(self, tree: Tree) -> None:
        """This process has made an item of this form."""
        if len(self._known) < FORMS_MAX:
            self._known.add(_form(tree))

    def has(self, tree: Any) -> bool:
        """Whether a stored tree is an item of a form that is known, with prompt updates that can be read."""
        try:
            if _form(tree) not in self._known:
                return False
            tree_updates(tree)
        except Exception:
            # No tree that items.py makes: what reading it raises depends on what it is.
            return False
        return True


_lock: Final = Lock()
_by_namespace: Final[dict[bytes, Forms]] = {}


def forms_of(tag: bytes) -> Forms:
    """The forms of the namespace with this tag, for all of its caches in this process."""
    with _lock:
        return _by_namespace.setdefault(tag, Forms())


def _form(tree: Tree) -> Any:
    """The form of a tree of items.py; equal for one that is about to be stored and one that was."""
    return frozenset((name, _field_form(field), _data_form(data)) for name, (data, field) in tree["fields"].items())


def _field_form(field: list[Any]) -> tuple[Any, ...]:
    """Without what differs from item to item."""
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
