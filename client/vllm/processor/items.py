"""vLLM's processed items as plain trees that tensord can store, and back. Nothing is pickled.

    {"fields": {name: [data, field]}, "updates": [update, …]}

    field    ["batched", keep_on_cpu] | ["flat", keep_on_cpu, slices, dim] | ["shared", keep_on_cpu, batch_size]
    slices   [start, stop, step], or a list of slices
    update   {"where": [modality, item index, mode], "target": target, "full": tokens, "embeds": embeds}
    target   tokens | ["start"] | ["end"] | ["prefix", tokens]
    embeds   None | ["is", tokens] | ["mask", (len(full),) bool]
    tokens   (n,) int64

Owns: the supported kinds of fields, targets and masks. Does not own: where items are stored (caches.py).

Prompt updates contain functions. A function that vLLM's own constructors make is recognised by its code, and stored as
the constructor's arguments. Of any other mask function only the result for the update's own tokens is stored; called
with other tokens, the stored mask raises UsageError.

Invariants: all sets are closed. A value that is in none of them, or that would be read back differently (a subclass, a
tensor on a device), is refused; its item then bypasses the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
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

# The fields that the code below encodes, in their order. If a class of the installed vLLM has others, its items are
# refused.
_KNOWN: Final[Mapping[type, tuple[str, ...]]] = {
    MultiModalFieldElem: ("data", "field"),
    MultiModalBatchedField: ("keep_on_cpu",),
    MultiModalFlatField: ("keep_on_cpu", "slices", "dim"),
    MultiModalSharedField: ("keep_on_cpu", "batch_size"),
    PromptIndex: ("get_match_index", "get_text_match_index"),
    PromptUpdateDetails: ("full", "is_embed"),
    ResolvedPromptUpdate: ("modality", "item_idx", "mode", "target", "content"),
}
_CHANGED: Final = frozenset(
    kind for kind, known in _KNOWN.items() if {field.name for field in fields(kind)} != set(known)
)
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
    return {
        "fields": {name: _elem_tree(name, elem) for name, elem in item.items()},
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


class StoredMask:
    """Replaces a function `is_embed` by its result for `full`."""

    __slots__ = ("_full", "_mask")

    def __init__(self, full: list[int], mask: torch.Tensor) -> None:
        """`mask` is (len(full),) bool: one value for each placeholder token."""
        self._full = full
        self._mask = mask

    def __call__(self, full: list[int]) -> torch.Tensor:
        """A copy of the mask, (len(full),) bool.

        Raises:
            UsageError: `full` differs from the tokens for which the mask was stored.
        """
        if full is not self._full and list(full) != self._full:
            raise UsageError(
                f"the stored mask of {len(self._full)} placeholder tokens was asked for {len(full)} others; "
                "turn the processor cache off for this model, and report it"
            )
        return self._mask.clone()


# ---- data and fields


def _elem_tree(name: str, elem: MultiModalFieldElem) -> list[Any]:
    _check_kind(elem, MultiModalFieldElem)
    return [_data(name, elem.data), _field(name, elem.field)]


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
    raise UnsupportedLeaf(f"{name} has a {kind.__module__}.{kind.__qualname__}, which is neither a tensor nor a number")


def _field(name: str, field: Any) -> list[Any]:
    kind = type(field)
    if kind not in _WORDS:
        raise UnsupportedLeaf(
            f"{name} is of the field class {kind.__module__}.{kind.__qualname__}, which is not supported"
        )
    _check_kind(field, kind)
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
    full = tree["full"].tolist()
    return ResolvedPromptUpdate(
        modality=modality,
        item_idx=item_idx,
        mode=UpdateMode(mode),
        target=_tree_target(tree["target"]),
        content=_tree_content(full, tree["embeds"]),
    )


def _target(target: Any) -> Any:
    if not isinstance(target, PromptIndex):
        return _tokens(target)
    _check_kind(target, PromptIndex)
    codes = _codes(target)
    if codes == _codes(PromptIndexTargets.start()):
        return ["start"]
    if codes == _codes(PromptIndexTargets.end()):
        return ["end"]
    if codes == _codes(PromptIndexTargets.prefix([])):
        return ["prefix", _tokens(_made_from(target.get_match_index, "seq"))]
    raise UnsupportedLeaf("a prompt update's target is an index that is neither start, end nor prefix")


def _tree_target(target: Any) -> Any:
    if isinstance(target, np.ndarray):
        return target.tolist()
    if target[0] == "prefix":
        return PromptIndexTargets.prefix(target[1].tolist())
    return PromptIndexTargets.start() if target[0] == "start" else PromptIndexTargets.end()


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
        return PromptUpdateDetails(full=full)
    kind, values = embeds
    if kind == "is":
        return PromptUpdateDetails.select_token_ids(full, values.tolist())
    return PromptUpdateDetails(full=full, is_embed=StoredMask(full, torch.from_numpy(values.copy())))


def _codes(index: PromptIndex) -> tuple[CodeType | None, ...]:
    return tuple(getattr(match, "__code__", None) for match in (index.get_match_index, index.get_text_match_index))


def _code(function: Any) -> CodeType:
    code: CodeType = function.__code__
    return code


_SELECTS_ID: Final = _code(PromptUpdateDetails.select_token_id([], 0).is_embed)
_SELECTS_IDS: Final = _code(PromptUpdateDetails.select_token_ids([], []).is_embed)


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
        UnsupportedLeaf: it is of a subclass or another class, or the installed vLLM has changed the class.
    """
    if type(found) is not kind:
        raise UnsupportedLeaf(
            f"a {type(found).__module__}.{type(found).__qualname__} would come back as {kind.__name__}"
        )
    if kind in _CHANGED:
        raise UnsupportedLeaf(f"this vLLM's {kind.__name__} has other fields than {sorted(_KNOWN[kind])}")
