"""transformers' caches as the layers of a token sequence, and back.

    kind of a part                                              layer of the sequence
    attention    keys and values of all tokens                  NormalLayer
    sliding      those of a window: transformers keeps one      RotatingLayer
                 token less than `sliding_window`
    recurrent    a recurrent state                              RecurrentLayer
    empty        never used: the layer keeps nothing            SharedLayer

Owns: the mapping between a `DynamicCache` and the layers of `PrefixCache`, snapshots of a cache on the way, the classes
of transformers' layers that are known, by name, and their trial. Does not own: blocks and keys (client/prefix), the
choice of calls that share (families).

How a layer keeps its tokens is internal to transformers and changes between releases, so no list of versions decides.
Each class is tried once in a process, with a few numbers: a layer that is filled from the arrays of another layer must
continue as the other layer does, and the arrays must stay as they are meanwhile.

Invariants: a part is of a class that passed the trial. A cache that was filled from a match holds the bytes that the
stored cache had at that position, in memory of its own. A cache or a layer of any other class raises NotShared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import torch
import transformers
from transformers.cache_utils import DynamicCache

from ...prefix.layers import NormalLayer, PrefixLayer, RecurrentLayer, RotatingLayer, SharedLayer
from ...prefix.match import PrefixMatch
from ..conditions import NotShared

Kind = Literal["attention", "sliding", "recurrent", "empty"]
State = list[Any]
"""A cache's state at a position: for each part, what a match at that position needs, or None."""

_TOKEN_AXIS: Final = -2
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
        layer = self.layer
        if self.kind == "recurrent":
            return any(layer.is_conv_states_initialized.values()) or any(layer.is_recurrent_states_initialized.values())
        return self.kind != "empty" and bool(layer.is_initialized)

    @property
    def needs_snapshot(self) -> bool:
        """Whether it can only be continued from a snapshot, once the sequence is longer than its window."""
        return self.kind == "recurrent" or self.window > 0

    def contents(self) -> dict[str, Any]:
        """Keys and values, or a copy of the recurrent state, which the model changes in place. The model replaces keys
        and values and never writes to them, so they need no copy."""
        if self.kind != "recurrent":
            return {"keys": self.layer.keys.detach(), "values": self.layer.values.detach()}
        return {
            name: {str(at): tensor.detach().clone() for at, tensor in states.items() if tensor is not None}
            for name, states in (("conv", self.layer.conv_states), ("recurrent", self.layer.recurrent_states))
        }

    def fill(self, tree: Any, tokens: int, device: Any) -> None:
        """Writes the contents of another part, after `tokens` tokens, into this unused one. Raises
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
            if tensor.ndim != 4 or len(tensor) != 1 or tensor.shape[_TOKEN_AXIS] != count:
                raise ValueError(f"a tensor of shape {list(tensor.shape)} for {count} tokens")
        # With two positional arguments: layers with a recurrent state too tell their two initialisations apart by that.
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if self.window:
            layer.cumulative_length = tokens


def empty_cache(model: Any) -> DynamicCache:
    """The cache that `generate` would make for the model."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    parts_of(cache)
    return cache


def parts_of(cache: Any) -> list[LayerPart]:
    if type(cache) is not DynamicCache:
        raise NotShared(f"the cache is a {type(cache).__name__}; only a DynamicCache can be shared")
    if cache.offloading:
        raise NotShared("the cache is offloaded; only one that stays on the device can be shared")
    parts: list[LayerPart] = []
    for number, layer in enumerate(cache.layers):
        kind: type = type(layer)
        if kind.__module__ != _MODULE or kind.__name__ not in _PARTS:
            raise NotShared(f"layer {number} of the cache is a {kind.__name__}, which cannot be shared")
        if getattr(layer, "record_past", False):
            raise NotShared(f"layer {number} of the cache records its past, for assisted generation")
        window = getattr(layer, "sliding_window", _WINDOW)
        if window < 2:
            raise NotShared(f"layer {number} has a window of {window}; it must be at least 2")
        _check_class(kind)
        parts += _parts(layer)
    return parts


def _parts(layer: Any) -> list[LayerPart]:
    return [LayerPart(layer, kind) for kind in _PARTS[type(layer).__name__]]


def needs_snapshots(cache: Any) -> bool:
    """Whether some layer can only be continued from a snapshot, once the sequence is longer than its window."""
    return any(part.needs_snapshot for part in parts_of(cache))


def tokens_in(cache: Any) -> int:
    counts = {
        part.layer.get_seq_length() for part in parts_of(cache) if part.kind in ("attention", "sliding") and part.used
    }
    if len(counts) > 1:
        raise NotShared(f"the cache's layers hold different numbers of tokens: {sorted(counts)}")
    return counts.pop() if counts else 0


def snapshot_of(cache: Any) -> State:
    """The cache's state now. Copies recurrent states."""
    return [part.contents() if part.used and part.needs_snapshot else None for part in parts_of(cache)]


def stored_of(cache: Any, tokens: int, snapshots: Mapping[int, State]) -> tuple[list[PrefixLayer], dict[int, State]]:
    """The layers and the snapshots of `PrefixCache.put`, for a cache of `tokens` tokens, with its states on the way
    (`snapshots`, by the number of tokens). Copies tensors of other devices to the host."""
    layers: list[PrefixLayer] = []
    needed: list[int] = []
    for number, part in enumerate(parts_of(cache)):
        if not part.used:
            layers.append(SharedLayer())
        elif part.kind == "recurrent":
            layers.append(RecurrentLayer(_on_host(part.contents())))
            needed.append(number)
        else:
            if (count := len(part.layer.keys)) != 1:
                raise NotShared(f"the cache has {count} sequences; only one can be shared")
            arrays = _on_host(part.contents())
            if not part.window:
                layers.append(NormalLayer(arrays, _TOKEN_AXIS))
                continue
            layers.append(RotatingLayer(arrays, part.window, _TOKEN_AXIS))
            if tokens > part.window:
                needed.append(number)
    kept = {at: states for at, states in snapshots.items() if needed and 0 < at < tokens}
    return layers, {at: [_on_host(states[number]) for number in needed] for at, states in kept.items()}


def fill(cache: DynamicCache, match: PrefixMatch, device: Any) -> None:
    """Writes a match's layers into an empty cache, on a device. Raises NotShared if the match is of other layers, so
    another program stored it; a TensordError as `PrefixMatch.torch`."""
    parts = parts_of(cache)
    if len(match.layers) != len(parts):
        raise NotShared(f"the cached prefix has {len(match.layers)} layers, the model {len(parts)}")
    for number, part in enumerate(parts):
        tree = match.torch(number)
        if tree is None:
            continue
        try:
            part.fill(tree, match.offset, device)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise NotShared(f"the cached prefix does not fit layer {number}: {error}") from None


def _on_host(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _on_host(each) for name, each in tree.items()}
    return tree if tree is None else tree.to("cpu")


# ---- the trial of a class


@lru_cache(64)
def _check_class(kind: type) -> None:
    """Raises NotShared if a class's layers do something else than this module relies on. Only success is kept."""
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
    arrays = part.contents()
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
    filled.fill(part.contents(), 6, "cpu")
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
