"""transformers' caches as the layers of a token sequence, and back.

Owns: the mapping between a `DynamicCache` and the layers of `PrefixCache`, and snapshots of a cache on the way. Does
not own: the parts of a single layer (layer_parts), blocks and keys (client/prefix), the choice of calls that share
(generation).

    attention                  a NormalLayer
    attention with a window    a RotatingLayer
    a recurrent state          a RecurrentLayer
    a part that is not used    a SharedLayer

Invariants: a cache that was filled from a match holds the bytes that the stored cache had at that position, in memory
of its own. A cache of any other class raises NotShared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.cache_utils import DynamicCache

from ...prefix.layers import NormalLayer, PrefixLayer, RecurrentLayer, RotatingLayer, SharedLayer
from ...prefix.match import PrefixMatch
from ..reasons import NotShared
from .layer_parts import TOKEN_AXIS, LayerPart, parts_of_layer

State = list[Any]
"""A cache's state at a position: for each part, what a match at that position needs, or None."""


def empty_cache(model: Any) -> DynamicCache:
    """The cache that `generate` would make for the model."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    parts_of(cache)
    return cache


def parts_of(cache: Any) -> list[LayerPart]:
    """The parts of a cache, in the order of its layers."""
    if type(cache) is not DynamicCache:
        raise NotShared(f"the cache is a {type(cache).__name__}; only a DynamicCache can be shared")
    if cache.offloading:
        raise NotShared("the cache is offloaded; only one that stays on the device can be shared")
    return [part for number, layer in enumerate(cache.layers) for part in parts_of_layer(number, layer)]


def needs_snapshots(cache: Any) -> bool:
    """Whether some layer can only be continued from a snapshot, once the sequence is longer than its window."""
    return any(part.kind == "recurrent" or part.window for part in parts_of(cache))


def tokens_in(cache: Any) -> int:
    """How many tokens the cache holds."""
    counts = {
        part.layer.get_seq_length() for part in parts_of(cache) if part.kind in ("attention", "sliding") and part.used
    }
    if len(counts) > 1:
        raise NotShared(f"the cache's layers hold different numbers of tokens: {sorted(counts)}")
    return counts.pop() if counts else 0


def snapshot_of(cache: Any) -> State:
    """The cache's state now. Copies recurrent states."""

    def state(part: LayerPart) -> Any:
        if part.kind == "recurrent":
            return part.state() if part.used else None
        return part.arrays() if part.window and part.used else None

    return [state(part) for part in parts_of(cache)]


def stored_of(
    cache: Any, tokens: int, snapshots: Mapping[int, State], *, copied: bool
) -> tuple[list[PrefixLayer], dict[int, State]]:
    """The layers and the snapshots of `PrefixCache.put`, for a cache of `tokens` tokens, with its states on the way
    (`snapshots`, by the number of tokens). Copies recurrent states, and tensors of other devices to the host; with
    `copied` also keys and values in host memory."""
    layers: list[PrefixLayer] = []
    needed: list[int] = []
    for number, part in enumerate(parts_of(cache)):
        if not part.used:
            layers.append(SharedLayer())
        elif part.kind == "recurrent":
            layers.append(RecurrentLayer(_on_host(part.state())))
            needed.append(number)
        else:
            if (count := len(part.layer.keys)) != 1:
                raise NotShared(f"the cache has {count} sequences; only one can be shared")
            arrays = _on_host(part.arrays(), copied=copied)
            layers.append(
                RotatingLayer(arrays, part.window, TOKEN_AXIS) if part.window else NormalLayer(arrays, TOKEN_AXIS)
            )
            if part.window and tokens > part.window:
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


def _on_host(tree: Any, *, copied: bool = False) -> Any:
    if isinstance(tree, dict):
        return {name: _on_host(each, copied=copied) for name, each in tree.items()}
    return tree if tree is None else tree.to("cpu", copy=copied)
