"""transformers' caches as the layers of a token sequence, and back.

Owns: the mapping between a `DynamicCache` and the layers of `PrefixCache`, and snapshots of a cache on the way. Does
not own: blocks and keys (client/prefix), nor the choice of calls that share (generation.py).

    DynamicLayer                 a NormalLayer
    DynamicSlidingWindowLayer    a RotatingLayer; transformers keeps one token less than `sliding_window`
    LinearAttentionLayer         a RecurrentLayer, or a SharedLayer if the model never uses it
    a layer with both            two layers: attention, then the recurrent state

Invariants: a cache that was filled from a match holds the bytes that the stored cache had at that position, in memory
of its own. A cache of any other class raises NotShared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers.cache_utils import DynamicCache

from ..prefix.layers import NormalLayer, PrefixLayer, RecurrentLayer, RotatingLayer, SharedLayer
from ..prefix.match import PrefixMatch
from .reasons import NotShared

__all__ = [
    "StateCopy",
    "StoredCache",
    "empty_cache",
    "fill",
    "needs_snapshots",
    "parts_of",
    "snapshot_of",
    "stored_of",
    "tokens_in",
]

_AXIS: Final = -2
"""The token axis of keys and values, [batch, heads, tokens, dim]."""
_MODULE: Final = "transformers.cache_utils"
_ATTENTION: Final = frozenset({"DynamicLayer", "LinearAttentionAndFullAttentionLayer"})
_SLIDING: Final = frozenset({"DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer"})
_RECURRENT: Final = frozenset(
    {
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    }
)
"""Classes of `transformers.cache_utils`, by name: an older version lacks some."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One layer of `PrefixCache`: a layer of transformers, or one half of it.

    `window`: how many tokens it keeps; 0: all of them, or a recurrent state.
    """

    layer: Any
    recurrent: bool
    window: int = 0

    @property
    def used(self) -> bool:
        """Whether the model has written to it."""
        if not self.recurrent:
            return bool(self.layer.is_initialized)
        layer = self.layer
        return any(layer.is_conv_states_initialized.values()) or any(layer.is_recurrent_states_initialized.values())

    def arrays(self) -> dict[str, Any]:
        """Keys and values. The model replaces these tensors and never writes to them, so they need no copy."""
        return {"keys": self.layer.keys.detach(), "values": self.layer.values.detach()}

    def state(self) -> dict[str, Any]:
        """A copy of the recurrent state, which the model changes in place."""
        return {
            name: {str(at): tensor.detach().clone() for at, tensor in states.items() if tensor is not None}
            for name, states in (("conv", self.layer.conv_states), ("recurrent", self.layer.recurrent_states))
        }


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A cache's state after `tokens` tokens: for each part, what a match at that position needs, or None."""

    tokens: int
    states: list[Any]


@dataclass(frozen=True, slots=True)
class StoredCache:
    """The arguments of `PrefixCache.put` for a cache."""

    layers: list[PrefixLayer]
    snapshots: dict[int, list[Any]]


def empty_cache(model: Any) -> DynamicCache:
    """The cache that `generate` would make for the model.

    Raises:
        NotShared: a layer is of a class that cannot be shared.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    parts_of(cache)
    return cache


def parts_of(cache: Any) -> list[_Part]:
    """The parts of a cache, in the order of its layers.

    Raises:
        NotShared: the cache, or one of its layers, is of a class that cannot be shared.
    """
    if type(cache) is not DynamicCache:
        raise NotShared(f"the cache is a {type(cache).__name__}; only a DynamicCache can be shared")
    if cache.offloading:
        raise NotShared("the cache is offloaded; only one that stays on the device can be shared")
    parts: list[_Part] = []
    for number, layer in enumerate(cache.layers):
        kind = type(layer).__name__
        if type(layer).__module__ != _MODULE or kind not in _ATTENTION | _SLIDING | _RECURRENT:
            raise NotShared(f"layer {number} of the cache is a {kind}, which cannot be shared")
        if getattr(layer, "record_past", False):
            raise NotShared(f"layer {number} of the cache records its past, for assisted generation")
        if kind in _ATTENTION:
            parts.append(_Part(layer, recurrent=False))
        elif kind in _SLIDING:
            if layer.sliding_window < 2:
                raise NotShared(f"layer {number} has a window of {layer.sliding_window}; it must be at least 2")
            parts.append(_Part(layer, recurrent=False, window=layer.sliding_window - 1))
        if kind in _RECURRENT:
            parts.append(_Part(layer, recurrent=True))
    return parts


def needs_snapshots(cache: Any) -> bool:
    """Whether some layer can only be continued from a snapshot, once the sequence is longer than its window."""
    return any(part.recurrent or part.window for part in parts_of(cache))


def tokens_in(cache: Any, given: int) -> int:
    """How many tokens the cache holds. `given`: the answer for a cache without attention, which does not count them."""
    counts = {part.layer.get_seq_length() for part in parts_of(cache) if not part.recurrent and part.used}
    if len(counts) > 1:
        raise NotShared(f"the cache's layers hold different numbers of tokens: {sorted(counts)}")
    return counts.pop() if counts else given


def snapshot_of(cache: Any, tokens: int) -> StateCopy:
    """The cache's state now, after `tokens` tokens. Copies recurrent states."""
    states: list[Any] = []
    for part in parts_of(cache):
        if part.recurrent:
            states.append(part.state() if part.used else None)
        else:
            states.append(part.arrays() if part.window and part.used else None)
    return StateCopy(tokens, states)


def stored_of(cache: Any, tokens: int, snapshots: Sequence[StateCopy], *, copied: bool) -> StoredCache:
    """What to put for a cache of `tokens` tokens. Copies recurrent states, and tensors of other devices to the host;
    with `copied` also keys and values in host memory.

    Raises:
        NotShared: the cache is of another class, or has more than one sequence.
    """
    layers: list[PrefixLayer] = []
    needed: list[int] = []
    for number, part in enumerate(parts_of(cache)):
        if not part.used:
            layers.append(SharedLayer())
        elif part.recurrent:
            layers.append(RecurrentLayer(_on_host(part.state())))
            needed.append(number)
        else:
            _check_one(part.layer.keys)
            arrays = _on_host(part.arrays(), copied=copied)
            layers.append(RotatingLayer(arrays, part.window, _AXIS) if part.window else NormalLayer(arrays, _AXIS))
            if part.window and tokens > part.window:
                needed.append(number)
    found = {each.tokens: [_on_host(each.states[number]) for number in needed] for each in snapshots} if needed else {}
    return StoredCache(layers, {at: states for at, states in found.items() if 0 < at < tokens})


def fill(cache: DynamicCache, match: PrefixMatch, device: Any) -> None:
    """Writes a match's layers into an empty cache, on a device.

    Raises:
        NotShared: the match is of other layers, so another program stored it.
        TensordError: as for `PrefixMatch.torch`.
    """
    parts = parts_of(cache)
    if len(match.layers) != len(parts):
        raise NotShared(f"the cached prefix has {len(match.layers)} layers, the model {len(parts)}")
    for number, part in enumerate(parts):
        tree = match.torch(number)
        if tree is None:
            continue
        try:
            if part.recurrent:
                _fill_state(part.layer, tree, device)
            else:
                _fill_attention(part, tree, match.offset, device)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise NotShared(f"the cached prefix does not fit layer {number}: {error}") from None


def _fill_attention(part: _Part, tree: Any, offset: int, device: Any) -> None:
    keys, values = tree["keys"].to(device), tree["values"].to(device)
    count = min(offset, part.window) if part.window else offset
    for tensor in (keys, values):
        if tensor.ndim != 4 or len(tensor) != 1 or tensor.shape[_AXIS] != count:
            raise ValueError(f"a tensor of shape {list(tensor.shape)} for {count} tokens")
    layer = part.layer
    # With two positional arguments: layers with a recurrent state too tell their two initialisations apart by that.
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if part.window:
        layer.cumulative_length = offset


def _fill_state(layer: Any, tree: Any, device: Any) -> None:
    for at, state in tree["conv"].items():
        number = int(at)
        layer.lazy_initialization(conv_states=state.to(device), state_idx=number)
        layer.conv_states[number].copy_(state)
        layer.has_previous_state[number] = True
    for at, state in tree["recurrent"].items():
        number = int(at)
        layer.lazy_initialization(recurrent_states=state.to(device), state_idx=number)
        layer.recurrent_states[number].copy_(state)


def _check_one(tensor: torch.Tensor) -> None:
    if len(tensor) != 1:
        raise NotShared(f"the cache has {len(tensor)} sequences; only one can be shared")


def _on_host(tree: Any, *, copied: bool = False) -> Any:
    if isinstance(tree, dict):
        return {name: _on_host(each, copied=copied) for name, each in tree.items()}
    return tree if tree is None else tree.to("cpu", copy=copied)
