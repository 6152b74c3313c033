"""Matches: how many tokens of a sequence are cached, and leases on their layers.

Owns: the views, and the check that blocks have the contents that their records say: any client may have stored them.
Invariants: every view of a match keeps its pins. Views are given only after their blocks were checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import BadPrefix, Corrupt, UsageError
from ...shm.index.keys import shortened
from ...shm.payloads.prefix import Modality, PrefixRecord, Tokens
from ...shm.payloads.tensors import needed_torch
from ..gpu.interface import mapped
from ..reading.lease import Batch, Lease
from ..threads.of_process import Releasable
from .layers import cut, is_array


class PrefixMatch(Releasable):
    """The longest cached prefix of a sequence. Pinned for as long as the match, or any view of it, lives.

    Raises, when its contents are read, Corrupt if those of a block or a snapshot differ from its record, which the
    message names; and ValueError once it was released.

    Attributes:
        offset: how many tokens are cached: at least 1, and fewer than the sequence has.
        remaining: the tokens left to compute, a view of the caller's tokens, uint32 of shape (n,).
        keep: per modality, how many items the remaining tokens need: the last ones of the modality's list.

    Example:
        >>> prefixes = tensord.PrefixCache(cache, ns)
        >>> prefixes.put([1, 2, 3], [tensord.NormalLayer(np.zeros((1, 2, 3, 8)))], wait=True).state
        'stored'
        >>> with prefixes.match([1, 2, 7, 8]) as match:
        ...     match.offset, match.remaining
        (2, array([7, 8], dtype=uint32))
    """

    __slots__ = ("_axes", "_batch", "_blocks", "_keys", "_layers", "_snapshot_at", "keep", "offset", "remaining")
    _instead = "match there, or send copies of the arrays"

    def __init__(
        self,
        offset: int,
        remaining: Tokens,
        keep: dict[Modality, int],
        batch: Batch,
        keys: Sequence[bytes],
        blocks: int,
        snapshot_at: int | None,
    ) -> None:
        """`batch`: pins the entries of `keys`, of which the first `blocks` are blocks, and the one at `snapshot_at` is
        the snapshot."""
        self.offset = offset
        self.remaining = remaining
        self.keep = keep
        self._batch: Batch | None = batch
        self._keys = keys
        self._blocks = blocks
        self._snapshot_at = snapshot_at
        self._layers: list[list[Any]] | None = None
        self._axes: list[int | None] = []

    @property
    def layers(self) -> list[list[Any]]:
        """For each layer the trees of its blocks in order, as read-only views with `offset` tokens in all. The last one
        is cut.

        Empty for a layer that shares another's arrays, and for a layer whose state is in the snapshot.
        """
        if self._layers is None:
            leases = [self._lease(at) for at in range(self._blocks)]
            self._axes = self._checked(leases)
            self._layers = self._cut([lease.tree for lease in leases])
        return self._layers

    @property
    def snapshot(self) -> list[Any] | None:
        """The states exactly at `offset`, one for each layer, None for a layer that needs none. None if no layer needs
        one."""
        self._held()
        return None if self._snapshot_at is None else self._states(self._lease(self._snapshot_at).tree)

    def joined(self, layer: int) -> Any:
        """Returns a layer's arrays, copied: its blocks joined along the token axis, or its state. None for a shared
        layer. Raises UsageError if there is no such layer."""
        parts, axis = self._chosen(layer)
        if parts and axis is not None:
            return _merged(parts, axis, np.concatenate)
        snapshot = self.snapshot
        if snapshot is None:
            return None
        return mapped(snapshot[layer], lambda leaf, _: leaf.copy() if is_array(leaf) else leaf)

    def torch(self, layer: int) -> Any:
        """Returns `joined` as tensors. Raises UnsupportedLeaf if an array has a dtype that torch lacks."""
        parts, axis = self._chosen(layer)  # a released match is the first thing to say
        torch = needed_torch("match.torch()")
        if parts and axis is not None:
            # Tensors over the shared memory: this function only reads them.
            parts = self._cut([self._lease(at).torch(copy=False) for at in range(self._blocks)])[layer]
            return _merged(parts, axis, torch.cat)
        return None if self._snapshot_at is None else self._states(self._lease(self._snapshot_at).torch())[layer]

    def release(self) -> None:
        """Drops the match's pins. Views that were taken before stay valid."""
        self._batch = self._layers = None

    def __repr__(self) -> str:
        return f"PrefixMatch({self.offset} tokens, {len(self.remaining)} remaining)"

    # ---- private

    def _held(self) -> Batch:
        if self._batch is None:
            raise ValueError("this match was released; take the views you need before the with block ends")
        return self._batch

    def _lease(self, position: int) -> Lease:
        lease = self._held()[position]
        if lease is None:
            raise Corrupt(f"{self._named(position)}: its tree cannot be read; evict it")
        return lease

    def _named(self, position: int) -> str:
        kind = "the snapshot" if position == self._snapshot_at else f"block {position}"
        return f"{kind} ({shortened(self._keys[position])}) of a sequence"

    def _last_block(self) -> tuple[int, PrefixRecord]:
        """The position at which the blocks end, and the last one's record. Raises Corrupt without a valid record."""
        record = _record(self._lease(self._blocks - 1).tree, self._named(self._blocks - 1))
        return record.start + record.count, record

    def _chosen(self, layer: int) -> tuple[list[Any], int | None]:
        layers = self.layers
        if not 0 <= layer < len(layers):
            raise UsageError(f"layer {layer} does not exist; the sequence has {len(layers)} layers, counted from 0")
        return layers[layer], self._axes[layer]

    def _checked(self, leases: Sequence[Lease]) -> list[int | None]:
        """The token axis of each layer. Raises Corrupt unless the blocks cover the match, and hold what they say.

        Of all blocks with the same tree header only the first is checked: their arrays have the same shapes."""
        end, record = self._last_block()
        if record.start != record.block_tokens * (self._blocks - 1) or not record.start < self.offset <= end:
            raise Corrupt(
                f"{self._named(self._blocks - 1)}: it has the tokens from {record.start} to {end} in blocks of "
                f"{record.block_tokens}, but the match ends at {self.offset}; evict it"
            )
        axes: list[int | None] = _part(leases[0].tree, "axes", self._named(0))
        seen: set[tuple[int, int]] = set()
        for at, lease in enumerate(leases):
            count = record.count if at == self._blocks - 1 else record.block_tokens
            # The leases keep the recipes alive, so two different recipes have different ids.
            known = id(lease._recipe), count
            if known not in seen:
                _check_block(lease.tree, axes, count, self._named(at))
                seen.add(known)
        return axes

    def _cut(self, trees: list[Any]) -> list[list[Any]]:
        """Each layer's parts in the checked blocks' trees. The last part is cut at the end of the match."""
        end, record = self._last_block()
        layers: list[list[Any]] = []
        for number, axis in enumerate(self._axes):
            parts = [] if axis is None else [part for tree in trees if (part := tree["layers"][number]) is not None]
            if parts and axis is not None and end > self.offset:
                parts[-1] = cut(parts[-1], axis, 0, self.offset - record.start)
            layers.append(parts)
        return layers

    def _states(self, tree: Any) -> list[Any]:
        """The states of a snapshot's tree. Raises Corrupt unless there is one for each of the blocks' layers."""
        assert self._snapshot_at is not None
        states = _part(tree, "layers", self._named(self._snapshot_at))
        if len(states) != len(self.layers):
            raise Corrupt(
                f"{self._named(self._snapshot_at)}: it has states for {len(states)} layers, but the blocks have "
                f"{len(self.layers)}; evict it"
            )
        return states


def _check_block(tree: Any, axes: list[int | None], count: int, named: str) -> None:
    """Raises Corrupt unless a block has an item for each layer, whose arrays have `count` tokens along the layer's
    axis."""
    layers = _part(tree, "layers", named)
    if _part(tree, "axes", named) != axes or len(layers) != len(axes):
        raise Corrupt(f"{named}: its {len(layers)} layers are not those of the first block; evict it")

    for number, (axis, part) in enumerate(zip(axes, layers, strict=True)):

        def look(leaf: Any, place: str, number: int = number, axis: int | None = axis) -> None:
            shape = tuple(leaf.shape) if is_array(leaf) else None
            if shape is not None and (axis is None or not -len(shape) <= axis < len(shape) or shape[axis] != count):
                raise Corrupt(
                    f"{named}, layer {number}: its array {place} of shape {list(shape)} has not {count} tokens along "
                    f"axis {axis}; evict it"
                )

        mapped(part, look)


def _part(tree: Any, name: str, named: str) -> list[Any]:
    if not isinstance(tree, dict) or not isinstance(part := tree.get(name), list):
        raise Corrupt(f"{named}: it has no {name!r} list, so another program stored it; evict it")
    return part


def _record(tree: Any, named: str) -> PrefixRecord:
    try:
        packed = tree["prefix"]
        if packed.dtype != np.uint8 or packed.ndim != 1:
            raise TypeError(f"an array of {packed.dtype} of shape {list(packed.shape)}")
        return PrefixRecord.unpack(packed.data)
    except (BadPrefix, TypeError, KeyError, AttributeError) as error:
        raise Corrupt(f"{named}: it has no valid record ({error}); evict it") from None


def _merged(parts: list[Any], axis: int, join: Callable[[list[Any], int], Any]) -> Any:
    """Joins trees of one structure into one tree: arrays along `axis`, other leaves from the first tree."""
    leaves: list[list[Any]] = []
    for part in parts:
        leaves.append([])
        mapped(part, lambda leaf, _: leaves[-1].append(leaf))
    columns = iter(zip(*leaves, strict=True))

    def joined(leaf: Any, _: str) -> Any:
        column = next(columns)
        return join(list(column), axis) if is_array(leaf) else leaf

    return mapped(parts[0], joined)
