"""A sequence whose arrays lie on a device: its description, its common prefix with a query, and views of it.

Owns: the tree of its entry in the DeviceCache, and the way from that tree back to a sequence. Does not own: the
tensors, nor which sequences stay (device.py).
Invariants: a Resident holds no tensors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...shm.payloads.dtypes import dtype_named
from ...shm.payloads.prefix import Media, Tokens, agreed, uncut
from ...shm.payloads.tensors import loaded_torch, tensor_copy, tensor_leaf
from ..gpu.interface import Device, mapped
from .layers import Layers, PrefixLayer, RecurrentLayer, SharedLayer, check_layer, cut
from .put import PrefixPut, PrefixSequence

if TYPE_CHECKING:
    from ..device.entries import DeviceLease

__all__ = ["HeldOnDevice", "Resident", "layers_from", "longest", "resident_of", "tree_of"]


@dataclass(slots=True, eq=False)
class Resident:
    """A sequence on the device without its tensors, which its entry holds. Its layers have None in their place.

    `ends_at`: when it expires, in monotonic seconds; None: never. `offered`: it is offloaded because `n_on_device` is
    exceeded. `unwanted`: it is not to be stored in the host tier any more. `copy`: its last put into the host tier.
    """

    sequence: PrefixSequence
    ends_at: float | None
    offered: bool = False
    unwanted: bool = False
    copy: PrefixPut | None = None

    @property
    def is_in_host(self) -> bool:
        return self.copy is not None and self.copy.state in ("stored", "existed")


class HeldOnDevice:
    """A leased sequence on the device, for a PrefixMatch."""

    __slots__ = ("_device", "_layers", "_lease", "_offset")

    def __init__(self, lease: DeviceLease, device: Device, offset: int) -> None:
        self._lease = lease
        self._device = device
        self._offset = offset
        self._layers: Layers = lease.tree["resident"].sequence.layers

    @property
    def layers(self) -> list[list[Any]]:
        """As `Held.layers`: one tree a layer, with tensors of the device, cut to the match. Do not write them."""
        return [
            [cut(tree, axis, 0, self._offset)] if whole and axis is not None else []
            for tree, axis, whole in zip(self._lease.tree["layers"], self._layers.axes, self._layers.whole, strict=True)
        ]

    @property
    def snapshot(self) -> list[Any] | None:
        return layers_from(self._layers, self._lease.tree).snapshots.get(self._offset)

    def joined(self, layer: int) -> Any:
        tree = self._part(layer)
        return mapped(self._device.to_host(tree, self._device.mark()), _array)

    def torch(self, layer: int) -> Any:
        """As `Held.torch`. The tensors stay on the device."""
        return mapped(self._part(layer), _tensor)

    def _part(self, layer: int) -> Any:
        layers = self.layers
        check_layer(layer, len(layers))
        if layers[layer]:
            return layers[layer][0]
        snapshot = self.snapshot
        return None if snapshot is None else snapshot[layer]


def longest(sequence: PrefixSequence, query: Tokens, media: Sequence[Media]) -> int:
    """After how many tokens of a query a sequence can be continued: tokens and media agree up to there, no media item
    is cut, every layer can rewind to there, and at least one token of the query is left.
    """
    ours = sequence.tokens
    most = min(len(ours), len(query) - 1)
    if most < 1 or ours[0] != query[0]:
        return 0
    differs = ours[:most] != query[:most]
    first = int(differs.argmax())
    most = agreed(media, sequence.media, first if differs[first] else most)
    if not sequence.layers.exact:
        return uncut(most, media)
    positions = sequence.layers.snapshots
    return max((at for at in positions if at <= most and uncut(at, media) == at), default=0)


def resident_of(sequence: PrefixSequence) -> Resident:
    """The Resident of a sequence. Copies the tokens."""
    layers = sequence.layers
    bare = replace(
        layers,
        given=tuple(_with(layer, None) for layer in layers.given),
        snapshots={position: [state is not None for state in states] for position, states in layers.snapshots.items()},
    )
    ends_at = None if sequence.ttl_s is None else time.monotonic() + sequence.ttl_s
    return Resident(replace(sequence, tokens=sequence.tokens.copy(), layers=bare), ends_at)


def tree_of(layers: Layers, resident: Resident | None) -> dict[str, Any]:
    """The tree that the DeviceCache holds for a sequence. The states at its end are in its layers."""
    return {
        "layers": [_tree_in(layer) for layer in layers.given],
        "snapshots": {at: states for at, states in layers.snapshots.items() if at != layers.tokens},
        "resident": resident,
    }


def layers_from(bare: Layers, tree: dict[str, Any]) -> Layers:
    """The layers of a Resident, with the arrays of its entry's tree, or of a copy of that tree."""
    arrays: list[Any] = tree["layers"]
    given = tuple(_with(layer, array) for layer, array in zip(bare.given, arrays, strict=True))
    snapshots = {
        at: [array if has else None for array, has in zip(arrays, states, strict=True)]
        if at == bare.tokens
        else tree["snapshots"][at]
        for at, states in bare.snapshots.items()
    }
    return replace(bare, given=given, snapshots=snapshots)


def _tree_in(layer: PrefixLayer) -> Any:
    if isinstance(layer, SharedLayer):
        return None
    return layer.state if isinstance(layer, RecurrentLayer) else layer.tree


def _with(layer: PrefixLayer, arrays: Any) -> PrefixLayer:
    if isinstance(layer, SharedLayer):
        return layer
    return replace(layer, state=arrays) if isinstance(layer, RecurrentLayer) else replace(layer, tree=arrays)


def _array(leaf: Any, place: str) -> Any:
    """A leaf as a new array, if it is an array or a tensor on the host."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    torch = loaded_torch()
    if torch is None or not isinstance(leaf, torch.Tensor):
        return leaf
    name, array, _ = tensor_leaf(torch, leaf, lambda: place)
    dtype = dtype_named(name)
    assert dtype is not None, name
    return array.view(dtype).copy()


def _tensor(leaf: Any, _: str) -> Any:
    """A leaf as a new tensor, on the leaf's device."""
    if isinstance(leaf, np.ndarray):
        import torch

        return tensor_copy(torch, leaf)
    return leaf.clone() if hasattr(leaf, "clone") else leaf
