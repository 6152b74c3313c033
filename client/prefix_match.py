"""What a match gives: how much of a sequence is cached, and leases on it.

Owns: the views, cut to where the match ends. Does not own the pins: those are the batch's, which every view keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import numpy as np

from ..errors import BadPrefix, Corrupt, UsageError
from ..shm.prefix import Modality, Piece, Tokens
from .device.interface import mapped
from .lease import Batch, Lease
from .prefix_layers import cut, is_array


class Held(Protocol):
    """Where a match's arrays come from: blocks in the ring, or a sequence on a device."""

    @property
    def layers(self) -> list[list[Any]]:
        """For each layer its arrays from the sequence's start on: a list of trees, empty where it has none."""
        ...

    @property
    def snapshot(self) -> list[Any] | None:
        """For each layer its state, None for those that have none; None if there is no snapshot."""
        ...

    def torch(self, layer: int) -> Any:
        """A layer's arrays, joined into tensors of the caller's own, or its state."""
        ...

    def joined(self, layer: int) -> Any:
        """A layer's arrays, joined into arrays of the caller's own, or its state."""
        ...


class PrefixMatch:
    """The longest prefix of a sequence that is cached. It is pinned for as long as this, or any view of it, lives.

    Attributes:
        offset: so many tokens are cached, at least 1, and less than the sequence has.
        remaining: the others, which have to be computed: a view of the caller's tokens, uint32.
        keep: per modality, how many items the remaining tokens still need: the last so many of its list.
    """

    __slots__ = ("_held", "keep", "offset", "remaining")

    def __init__(self, offset: int, remaining: Tokens, keep: dict[Modality, int], held: Held) -> None:
        self.offset = offset
        self.remaining = remaining
        self.keep = keep
        self._held: Held | None = held

    @property
    def layers(self) -> list[list[Any]]:
        """For each layer the trees of its blocks, in order, the last one cut: read-only views, `offset` tokens in all.

        Empty for a layer that shares another's, and for one that has a state in the snapshot.

        Raises:
            ValueError: the match was released.
        """
        return self._pinned().layers

    @property
    def snapshot(self) -> list[Any] | None:
        """The states that stand exactly at `offset`, one for each layer, None for those that need none; None where no
        layer needs one.

        Raises:
            ValueError: the match was released.
        """
        return self._pinned().snapshot

    def joined(self, layer: int) -> Any:
        """What a layer is continued with, as numpy arrays of the caller's own: its blocks joined along their tokens, or
        its state; None for a layer that shares another's.

        Raises:
            UsageError: there is no such layer.
            ValueError: the match was released.
        """
        return self._pinned().joined(layer)

    def torch(self, layer: int) -> Any:
        """`joined`, as tensors.

        Raises:
            UnsupportedLeaf: an array has a dtype that torch lacks.
            UsageError, ValueError: as for `joined`.
        """
        return self._pinned().torch(layer)

    def release(self) -> None:
        """Drops this hold; views already taken keep theirs."""
        self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"PrefixMatch({self.offset} tokens, {len(self.remaining)} remaining)"

    def _pinned(self) -> Held:
        if self._held is None:
            raise ValueError("this match was released; take the views you need before the with block ends")
        return self._held


class HeldBlocks:
    """Blocks in the ring, pinned by a batch: the first `blocks` of it, and the snapshot after them if there is one."""

    __slots__ = ("_batch", "_blocks", "_layers", "_offset", "_snapshot_at")

    def __init__(self, batch: Batch, blocks: int, offset: int, snapshot_at: int | None) -> None:
        """`snapshot_at`: its position in the batch."""
        self._batch = batch
        self._blocks = blocks
        self._offset = offset
        self._snapshot_at = snapshot_at
        self._layers: list[list[Any]] | None = None

    @property
    def layers(self) -> list[list[Any]]:
        if self._layers is None:
            self._layers = self._cut([lease.tree for lease in self._leases()])
        return self._layers

    @property
    def snapshot(self) -> list[Any] | None:
        return None if self._snapshot_at is None else _part(self._lease(self._snapshot_at).tree, "layers")

    def joined(self, layer: int) -> Any:
        parts = _chosen(self.layers, layer)
        if parts:
            return _merged(parts, self._axis(layer), np.concatenate)
        snapshot = self.snapshot
        return (
            None
            if snapshot is None
            else mapped(snapshot[layer], lambda leaf, _: leaf.copy() if is_array(leaf) else leaf)
        )

    def torch(self, layer: int) -> Any:
        import torch

        if _chosen(self.layers, layer):
            # Over the shared memory, which is only read from here.
            parts = self._cut([lease.torch(copy=False) for lease in self._leases()])[layer]
            return _merged(parts, self._axis(layer), torch.cat)
        return None if self._snapshot_at is None else _part(self._lease(self._snapshot_at).torch(), "layers")[layer]

    def end_of(self, blocks: int) -> tuple[int, Piece]:
        """Where the first `blocks` of them end, and what the last of those says of itself."""
        piece = _piece(self._lease(blocks - 1).tree)
        return piece.start + piece.count, piece

    def _leases(self) -> list[Lease]:
        return [self._lease(at) for at in range(self._blocks)]

    def _lease(self, position: int) -> Lease:
        lease = self._batch[position]
        if lease is None:
            raise Corrupt("a block of a sequence was pinned, and its tree cannot be read; evict its key")
        return lease

    def _axis(self, layer: int) -> int:
        axis = _part(self._lease(0).tree, "axes")[layer]
        assert isinstance(axis, int)
        return axis

    def _cut(self, trees: list[Any]) -> list[list[Any]]:
        """What each layer has in each of the blocks' trees, the last one cut to where the match ends."""
        end, piece = self.end_of(self._blocks)
        layers: list[list[Any]] = []
        for number, axis in enumerate(_part(trees[0], "axes")):
            parts = [_part(tree, "layers")[number] for tree in trees]
            parts = [part for part in parts if part is not None]
            if parts and end > self._offset:
                parts[-1] = cut(parts[-1], axis, 0, self._offset - piece.start)
            layers.append(parts)
        return layers


def _part(tree: Any, name: str) -> list[Any]:
    """A list of a block's tree. Its writer may have been any client."""
    if not isinstance(tree, dict) or not isinstance(part := tree.get(name), list):
        raise Corrupt(f"a block of a sequence holds no {name}: another program has stored it; clear its namespace")
    return part


def _piece(tree: Any) -> Piece:
    try:
        return Piece.unpack(tree["prefix"].data)
    except (BadPrefix, TypeError, KeyError, AttributeError) as error:
        raise Corrupt(f"a block of a sequence holds no record: {error}; clear its namespace") from None


def _chosen(layers: list[list[Any]], layer: int) -> list[Any]:
    if not 0 <= layer < len(layers):
        raise UsageError(f"layer {layer}: the sequence has {len(layers)}, counted from 0")
    return layers[layer]


def _merged(parts: list[Any], axis: int, join: Callable[[list[Any], int], Any]) -> Any:
    """Trees of one shape, as one: their arrays joined along `axis`; all else as the first has it."""
    leaves: list[list[Any]] = []
    for part in parts:
        leaves.append([])
        mapped(part, lambda leaf, _: leaves[-1].append(leaf))
    columns = iter(zip(*leaves, strict=True))

    def joined(leaf: Any, _: str) -> Any:
        column = next(columns)
        return join(list(column), axis) if is_array(leaf) else leaf

    return mapped(parts[0], joined)
