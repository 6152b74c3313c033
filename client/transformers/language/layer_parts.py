"""The parts of a layer of transformers' caches: their arrays, how a part is filled, and the trial of the classes.

    attention    keys and values of all tokens
    sliding      those of a window; transformers keeps one token less than `sliding_window`
    recurrent    a recurrent state
    empty        never used: the layer keeps nothing

Owns: the classes that are known, by name, and their trial. Does not own: caches (cache_layers).

How a layer keeps its tokens is internal to transformers and changes between releases, so no list of versions decides.
Each class is tried once in a process, with a few numbers: a layer that is filled from the arrays of another layer must
continue as the other layer does, and the arrays must stay as they are meanwhile.

Invariants: a part is of a class that passed the trial. A layer of any other class raises NotShared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import torch
import transformers

from ..reasons import NotShared

Kind = Literal["attention", "sliding", "recurrent", "empty"]

TOKEN_AXIS: Final = -2
"""The token axis of keys and values, [batch, heads, tokens, dim]."""
_MODULE: Final = "transformers.cache_utils"
_PARTS: Final[Mapping[str, tuple[Kind, ...]]] = {
    "DynamicLayer": ("attention",),
    "DynamicSlidingWindowLayer": ("sliding",),
    "LinearAttentionLayer": ("recurrent",),
    "LinearAttentionAndFullAttentionLayer": ("attention", "recurrent"),
    "LinearAttentionAndSlidingWindowAttentionLayer": ("sliding", "recurrent"),
    "DummyLayer": ("empty",),
}
"""Class of `transformers.cache_utils` → the kinds of its parts. By name: an older version lacks some."""
_WINDOW: Final = 4
"""The window of a layer that is tried."""


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One layer of `PrefixCache`: a layer of transformers, or one half of it."""

    layer: Any
    kind: Kind

    @property
    def window(self) -> int:
        """How many tokens it keeps; 0: all of them, or a recurrent state."""
        return int(self.layer.sliding_window) - 1 if self.kind == "sliding" else 0

    @property
    def used(self) -> bool:
        """Whether the model has written to it."""
        layer = self.layer
        if self.kind == "recurrent":
            return any(layer.is_conv_states_initialized.values()) or any(layer.is_recurrent_states_initialized.values())
        return self.kind != "empty" and bool(layer.is_initialized)

    def arrays(self) -> dict[str, Any]:
        """Keys and values. The model replaces these tensors and never writes to them, so they need no copy."""
        return {"keys": self.layer.keys.detach(), "values": self.layer.values.detach()}

    def state(self) -> dict[str, Any]:
        """A copy of the recurrent state, which the model changes in place."""
        return {
            name: {str(at): tensor.detach().clone() for at, tensor in states.items() if tensor is not None}
            for name, states in (("conv", self.layer.conv_states), ("recurrent", self.layer.recurrent_states))
        }

    def fill(self, tree: Any, tokens: int, device: Any) -> None:
        """Writes the arrays or the state of another part, after `tokens` tokens, into this unused one. Raises
        ValueError if a tensor has another shape, other errors of Python if the tree is of another form."""
        layer = self.layer
        if self.kind == "recurrent":
            for name in ("conv", "recurrent"):
                for at, state in tree[name].items():
                    layer.lazy_initialization(**{f"{name}_states": state.to(device), "state_idx": int(at)})
                    getattr(layer, f"{name}_states")[int(at)].copy_(state)
            for at in tree["conv"]:
                layer.has_previous_state[int(at)] = True
            return
        keys, values = tree["keys"].to(device), tree["values"].to(device)
        count = min(tokens, self.window) if self.window else tokens
        for tensor in (keys, values):
            if tensor.ndim != 4 or len(tensor) != 1 or tensor.shape[TOKEN_AXIS] != count:
                raise ValueError(f"a tensor of shape {list(tensor.shape)} for {count} tokens")
        # With two positional arguments: layers with a recurrent state too tell their two initialisations apart by that.
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if self.window:
            layer.cumulative_length = tokens


def parts_of_layer(number: int, layer: Any) -> list[LayerPart]:
    """The parts of a cache's layer. Raises NotShared, with the layer's number, if its class cannot be shared."""
    kind: type = type(layer)
    if kind.__module__ != _MODULE or kind.__name__ not in _PARTS:
        raise NotShared(f"layer {number} of the cache is a {kind.__name__}, which cannot be shared")
    if getattr(layer, "record_past", False):
        raise NotShared(f"layer {number} of the cache records its past, for assisted generation")
    window = getattr(layer, "sliding_window", _WINDOW)
    if window < 2:
        raise NotShared(f"layer {number} has a window of {window}; it must be at least 2")
    _check_class(kind)
    return _parts(layer)


def _parts(layer: Any) -> list[LayerPart]:
    return [LayerPart(layer, kind) for kind in _PARTS[type(layer).__name__]]


# ---- the trial of a class


@lru_cache(64)
def _check_class(kind: type) -> None:
    """Tries a class. Raises NotShared if its layers do something else than this module relies on; only success is
    remembered."""
    given = {"sliding_window": _WINDOW} if "sliding" in _PARTS[kind.__name__] else {}
    try:
        # On the host whatever the caller's default device is, and without the caller's random numbers.
        with torch.device("cpu"), torch.no_grad():
            for part, filled in zip(_parts(kind(**given)), _parts(kind(**given)), strict=True):
                if part.kind == "recurrent":
                    _try_state(part, filled)
                elif part.kind != "empty":
                    _try_attention(part, filled)
    except Exception as error:
        raise NotShared(
            f"{kind.__name__} of transformers {transformers.__version__} keeps tokens in a way that tensord does not "
            f"know ({type(error).__name__}: {error}); docs/compatibility.md has the versions that are tested"
        ) from error


def _try_attention(part: LayerPart, filled: LayerPart) -> None:
    _require(not part.used, "a new layer counts as used")
    total = 0
    for tokens in (3, _WINDOW):
        part.layer.update(_numbers(tokens), -_numbers(tokens))
        total += tokens
    arrays = part.arrays()
    copies = {name: tensor.clone() for name, tensor in arrays.items()}
    filled.fill({name: tensor.clone() for name, tensor in copies.items()}, total, "cpu")
    for tokens in (2, 1):
        _require(part.layer.get_seq_length() == filled.layer.get_seq_length() == total, "its count of tokens differs")
        _require(part.layer.get_mask_sizes(tokens) == filled.layer.get_mask_sizes(tokens), "its mask differs")
        new = _numbers(tokens) + total
        _require(_same(part.layer.update(new, -new), filled.layer.update(new, -new)), "its keys or values differ")
        total += tokens
    _require(part.used and filled.used, "a used layer counts as new")
    _require(_same(arrays.values(), copies.values()), "it writes to keys and values that it has given out")


def _try_state(part: LayerPart, filled: LayerPart) -> None:
    _require(not part.used, "a new layer counts as used")
    rows = _numbers(6)[0]
    part.layer.update_conv_state(rows)
    part.layer.update_recurrent_state(rows)
    filled.fill(part.state(), 6, "cpu")
    for new in (rows[..., :1] + 7, rows + 8):
        _require(part.layer.has_previous_state == filled.layer.has_previous_state, "its count of states differs")
        for name in ("update_conv_state", "update_recurrent_state"):
            given = new if name == "update_conv_state" else rows + new[..., :1]
            found, wanted = getattr(filled.layer, name)(given), getattr(part.layer, name)(given)
            _require(torch.equal(found, wanted), "its states differ")
    _require(part.used and filled.used, "a used layer counts as new")


def _numbers(tokens: int) -> torch.Tensor:
    """Keys of one sequence with two heads of three numbers."""
    return torch.arange(2.0 * tokens * 3).reshape(1, 2, tokens, 3)


def _same(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
