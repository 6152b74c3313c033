"""vLLM's processed items as plain trees that tensord can store, and back. Nothing is pickled.

    {"fields": {name: [data, field]}, "updates": [update, …]}

    field    ["batched", keep_on_cpu] | ["flat", keep_on_cpu, slices, dim] | ["shared", keep_on_cpu, batch_size]
    slices   [start, stop, step], or a list of slices
    update   {"where": [modality, item index, mode], "target": target, "full": tokens, "embeds": embeds}
    target   tokens | ["start"] | ["end"] | ["prefix", tokens]
    embeds   None | ["is", tokens] | ["mask", (len(full),) bool]
    tokens   (n,) int64

Owns: the supported kinds of fields, targets and masks; the forms of items that this process's own processors have made,
by namespace. Does not own: where items are stored (caches.py).

Prompt updates contain functions. A function that vLLM's own constructors make is recognised by its code, and stored as
the constructor's arguments. Of any other mask function only the result for the update's own tokens is stored; called
with other tokens, the stored mask raises UsageError.

The form of an item is its fields, and the kind, dtypes and number of dimensions of each. An item of an unknown form was
made by another processor, under a name that should have told the two apart. Such an item is a miss, whatever its name.
A frontend learns forms when vLLM warms its processor up, and from each item that it processes itself.

Invariants: all sets are closed. A value that is in none of them, or that would be read back differently (a subclass, a
tensor on a device), is refused; its item then bypasses the cache. Forms are only added, up to FORMS_MAX a namespace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any, Final

import numpy as np
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)
from vllm.multimodal.processing.processor import (
    PromptIndex,
    PromptIndexTargets,
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    UpdateMode,
)

from ....errors import UnsupportedLeaf, UsageError

Tree = dict[str, Any]

FORMS_MAX: Final = 256
"""Limit on forms in one namespace. Items of further forms are not accepted from other processes."""
# The fields that the code below encodes, in their order.
_KNOWN: Final[Mapping[type, tuple[str, ...]]] = {
    MultiModalBatchedField: ("keep_on_cpu",),
    MultiModalFlatField: ("keep_on_cpu", "slices", "dim"),
    MultiModalSharedField: ("keep_on_cpu", "batch_size"),
}
_FIELDS: Final[Mapping[str, type]] = {
    "batched": MultiModalBatchedField,
    "flat": MultiModalFlatField,
    "shared": MultiModalSharedField,
}
_WORDS: Final = {kind: word for word, kind in _FIELDS.items()}


def item_tree(item: MultiModalKwargsItem, updates: Sequence[ResolvedPromptUpdate]) -> Tree:
    """An item and its prompt updates as a tree. The tree shares the item's tensors.

    Raises:
        UnsupportedLeaf: a value that is in none of the supported sets; the message names it.
    """
    _check_kind(item, MultiModalKwargsItem)
    for elem in item.values():
        _check_kind(elem, MultiModalFieldElem)
    return {
        "fields": {name: [_data(name, elem.data), _field(name, elem.field)] for name, elem in item.items()},
        "updates": [_update_tree(update) for update in updates],
    }


def tree_item(tree: Tree) -> MultiModalKwargsItem:
    """The item of a tree. Its tensors share the tree's memory."""
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(data=data, field=_tree_field(*field))
            for name, (data, field) in tree["fields"].items()
        }
    )


def tree_updates(tree: Tree) -> list[ResolvedPromptUpdate]:
    """The prompt updates of a tree. They share no memory with it."""
    return [_tree_update(update) for update in tree["updates"]]


# ---- forms


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
            tree_updates(tree)
            return _form(tree) in self._known
        except Exception:
            # The tree was not made here. The type of the exception depends on the tree.
            return False


_by_namespace: Final[dict[bytes, Forms]] = {}


def forms_of(tag: bytes) -> Forms:
    """The forms of the namespace with this tag, shared by all its caches in this process."""
    return _by_namespace.setdefault(tag, Forms())


def _form(tree: Tree) -> Any:
    """The form of a tree, without the values that differ from item to item. It is the same before the tree is stored
    and after it is read."""
    form = set()
    for name, (data, (kind, keep_on_cpu, *rest)) in tree["fields"].items():
        form.add((name, kind, keep_on_cpu, rest[-1] if kind == "flat" else None, _data_form(data)))
    return frozenset(form)


def _data_form(data: Any) -> Any:
    if isinstance(data, torch.Tensor | np.ndarray):
        return str(data.dtype).removeprefix("torch."), data.ndim
    if isinstance(data, list | tuple):
        return type(data).__name__, frozenset(map(_data_form, data))
    return type(data).__name__


# ---- data and fields


def _data(name: str, data: Any) -> Any:
    """The data, if it consists of CPU tensors and plain numbers in lists and tuples."""
    kind = type(data)
    if kind is torch.Tensor:
        if data.device.type != "cpu" or data.layout is not torch.strided or data.requires_grad:
            raise UnsupportedLeaf(
                f"{name} is a tensor on {data.device}, {data.layout}, requires_grad={data.requires_grad}; "
                "only plain tensors on the CPU without gradients can be stored"
            )
        return data
    if kind in (list, tuple):
        return kind(_data(name, part) for part in data)
    if kind in (int, float, bool, type(None)):
        return data
    raise UnsupportedLeaf(f"{name} has a {_named(kind)}, which is neither a tensor nor a number")


def _field(name: str, field: Any) -> list[Any]:
    kind = type(field)
    if kind not in _WORDS:
        raise UnsupportedLeaf(f"{name} is of the field class {_named(kind)}, which is not supported")
    return [_WORDS[kind], *(_plain(getattr(field, known)) for known in _KNOWN[kind])]


def _tree_field(word: str, *values: Any) -> Any:
    kind = _FIELDS[word]
    return kind(**dict(zip(_KNOWN[kind], map(_not_plain, values), strict=True)))


def _plain(value: Any) -> Any:
    """The value with lists in place of slices."""
    if isinstance(value, slice):
        return [None if end is None else int(end) for end in (value.start, value.stop, value.step)]
    return [_plain(inner) for inner in value] if isinstance(value, Sequence) else value


def _not_plain(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return slice(*value) if value and not isinstance(value[0], list) else [_not_plain(inner) for inner in value]


# ---- prompt updates


def _update_tree(update: ResolvedPromptUpdate) -> Tree:
    _check_kind(update, ResolvedPromptUpdate)
    _check_kind(update.content, PromptUpdateDetails)
    return {
        "where": [update.modality, update.item_idx, UpdateMode(update.mode).value],
        "target": _target(update.target),
        "full": _tokens(update.content.full),
        "embeds": _embeds(update.content.full, update.content.is_embed),
    }


def _tree_update(tree: Tree) -> ResolvedPromptUpdate:
    modality, item_idx, mode = tree["where"]
    target = tree["target"]
    if isinstance(target, np.ndarray):
        target = target.tolist()
    else:
        word, *given = target
        target = _TARGETS[word](*(tokens.tolist() for tokens in given))
    content = _tree_content(tree["full"].tolist(), tree["embeds"])
    return ResolvedPromptUpdate(modality, item_idx, UpdateMode(mode), target, content)


def _target(target: Any) -> Any:
    if not isinstance(target, PromptIndex):
        return _tokens(target)
    _check_kind(target, PromptIndex)
    word = _TARGET_WORDS.get(_codes(target))
    if word is None:
        raise UnsupportedLeaf("a prompt update's target is an index that is neither start, end nor prefix")
    return ["prefix", _tokens(_made_from(target.get_match_index, "seq"))] if word == "prefix" else [word]


def _embeds(full: list[int], is_embed: Any) -> Any:
    if is_embed is None:
        return None
    code = getattr(is_embed, "__code__", None)
    if code is _SELECTS_ID:
        return ["is", _tokens([_made_from(is_embed, "embed_token_id")])]
    if code is _SELECTS_IDS:
        return ["is", _tokens(_made_from(is_embed, "embed_token_ids"))]
    mask = is_embed(full)
    if type(mask) is not torch.Tensor or mask.dtype is not torch.bool or tuple(mask.shape) != (len(full),):
        raise UnsupportedLeaf(
            f"a prompt update's is_embed does not return a mask of {len(full)} bools for its own tokens"
        )
    return ["mask", mask.cpu().numpy()]


def _tree_content(full: list[int], embeds: Any) -> PromptUpdateDetails:
    if embeds is None:
        return PromptUpdateDetails(full)
    kind, values = embeds
    if kind == "is":
        return PromptUpdateDetails.select_token_ids(full, values.tolist())
    return PromptUpdateDetails(full, partial(stored_mask, full, torch.from_numpy(values.copy())))


def stored_mask(known: list[int], mask: torch.Tensor, full: list[int]) -> torch.Tensor:
    """What replaces a function `is_embed`: a copy of `mask`, (len(full),) bool, its result for the tokens `known`.

    Raises:
        UsageError: `full` differs from the tokens for which the mask was stored.
    """
    if full is not known and list(full) != known:
        raise UsageError(
            f"the stored mask of {len(known)} placeholder tokens was asked for {len(full)} others; "
            "turn the processor cache off for this model, and report it"
        )
    return mask.clone()


def _codes(index: PromptIndex) -> tuple[CodeType | None, ...]:
    return tuple(getattr(match, "__code__", None) for match in (index.get_match_index, index.get_text_match_index))


_TARGETS: Final[Mapping[str, Any]] = {
    "start": PromptIndexTargets.start,
    "end": PromptIndexTargets.end,
    "prefix": PromptIndexTargets.prefix,
}
_TARGET_WORDS: Final = {
    _codes(PromptIndexTargets.start()): "start",
    _codes(PromptIndexTargets.end()): "end",
    _codes(PromptIndexTargets.prefix([])): "prefix",
}
_SELECTS_ID: Final = getattr(PromptUpdateDetails.select_token_id([], 0).is_embed, "__code__", "")
_SELECTS_IDS: Final = getattr(PromptUpdateDetails.select_token_ids([], []).is_embed, "__code__", "")


def _made_from(function: Any, name: str) -> Any:
    """The value of the variable `name` in the closure of one of vLLM's functions.

    Raises:
        UnsupportedLeaf: the function has no such variable.
    """
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if name not in cells:
        raise UnsupportedLeaf(f"a prompt update's function from vLLM has no variable {name!r} in its closure")
    return cells[name].cell_contents


def _tokens(tokens: Any) -> np.ndarray[Any, Any]:
    if type(tokens) is not list or not all(type(token) is int for token in tokens):
        raise UnsupportedLeaf(
            f"a prompt update has tokens of type {type(tokens).__qualname__}; only a list of int is supported"
        )
    return np.array(tokens, np.int64)


def _check_kind(found: Any, kind: type) -> None:
    """Checks that an object is exactly of the class `kind`, so that it is read back as the same type.

    Raises:
        UnsupportedLeaf: it is of a subclass or another class.
    """
    if type(found) is not kind:
        raise UnsupportedLeaf(f"a {_named(type(found))} would come back as {kind.__name__}")


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
