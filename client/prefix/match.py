"""What a match gives: how much of a sequence is cached, and leases on it.

Owns: the views, cut to where the match ends, and the check that blocks hold what they say. Does not own the pins: those
are the batch's, which every view keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from ...errors import BadPrefix, Corrupt, UsageError
from ...shm.prefix import Modality, Piece, Tokens
from ..core.lease import Batch, Lease
from ..device.interface import mapped
from .layers import cut, is_array


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

    Example:
        >>> prefixes = tensord.PrefixCache(cache, ns)
        >>> prefixes.put([1, 2, 3], [tensord.NormalLayer(np.zeros((1, 2, 3, 8)))], wait=True).state
        'stored'
        >>> with prefixes.match([1, 2, 7, 8]) as match:
        ...     match.offset, match.remaining
        (2, array([7, 8], dtype=uint32))
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
            Corrupt: a block does not hold what it says; it is named.
            ValueError: the match was released.
        """
        return self._pinned().layers

    @property
    def snapshot(self) -> list[Any] | None:
        """The states that stand exactly at `offset`, one for each layer, None for those that need none; None where no
        layer needs one.

        Raises:
            Corrupt: the snapshot does not hold what it says.
            ValueError: the match was released.
        """
        return self._pinned().snapshot

    def joined(self, layer: int) -> Any:
        """What a layer is continued with, as numpy arrays of the caller's own: its blocks joined along their tokens, or
        its state; None for a layer that shares another's.

        Raises:
            UsageError: there is no such layer.
            Corrupt, ValueError: as for `layers`.
        """
        return self._pinned().joined(layer)

    def torch(self, layer: int) -> Any:
        """`joined`, as tensors.

        Raises:
            UnsupportedLeaf: an array has a dtype that torch lacks.
            UsageError, Corrupt, ValueError: as for `joined`.
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
    """Blocks in the ring, pinned by a batch: the first `blocks` of it, and the snapshot after them if there is one.

    Their writers may have been any client: their arrays are checked to be those of so many tokens before any is given.
    """

    __slots__ = ("_batch", "_blocks", "_form", "_keys", "_layers", "_offset", "_snapshot_at")

    def __init__(self, batch: Batch, keys: Sequence[bytes], blocks: int, offset: int, snapshot_at: int | None) -> None:
        """`keys`: of all of the batch. `snapshot_at`: its position there."""
        self._batch = batch
        self._keys = keys
        self._blocks = blocks
        self._offset = offset
        self._snapshot_at = snapshot_at
        self._layers: list[list[Any]] | None = None
        self._form = _Form([], [])

    @property
    def layers(self) -> list[list[Any]]:
        if self._layers is None:
            leases = self._leases()
            self._form = self._checked(leases)
            self._layers = self._cut([lease.tree for lease in leases])
        return self._layers

    @property
    def snapshot(self) -> list[Any] | None:
        return None if self._snapshot_at is None else self._states(self._lease(self._snapshot_at).tree)

    def joined(self, layer: int) -> Any:
        parts, axis = self._chosen(layer)
        if parts and axis is not None:
            return _merged(parts, axis, np.concatenate)
        snapshot = self.snapshot
        return (
            None
            if snapshot is None
            else mapped(snapshot[layer], lambda leaf, _: leaf.copy() if is_array(leaf) else leaf)
        )

    def torch(self, layer: int) -> Any:
        import torch

        parts, axis = self._chosen(layer)
        if parts and axis is not None:
            # Over the shared memory, which is only read from here.
            parts = self._cut([lease.torch(copy=False) for lease in self._leases()])[layer]
            return _merged(parts, axis, torch.cat)
        return None if self._snapshot_at is None else self._states(self._lease(self._snapshot_at).torch())[layer]

    def end_of(self, blocks: int) -> tuple[int, Piece]:
        """Where the first `blocks` of them end, and what the last of those says of itself."""
        piece = _piece(self._lease(blocks - 1).tree, self._named(blocks - 1))
        return piece.start + piece.count, piece

    def _leases(self) -> list[Lease]:
        return [self._lease(at) for at in range(self._blocks)]

    def _lease(self, position: int) -> Lease:
        lease = self._batch[position]
        if lease is None:
            raise Corrupt(f"{self._named(position)}: its tree cannot be read; evict it")
        return lease

    def _named(self, position: int) -> str:
        what = "the snapshot" if position == self._snapshot_at else f"block {position}"
        return f"{what} ({self._keys[position].hex()[:24]}…) of a sequence"

    def _chosen(self, layer: int) -> tuple[list[Any], int | None]:
        layers = self.layers
        if not 0 <= layer < len(layers):
            raise UsageError(f"layer {layer}: the sequence has {len(layers)}, counted from 0")
        return layers[layer], self._form.axes[layer]

    def _checked(self, leases: Sequence[Lease]) -> _Form:
        """What the blocks have in common, if all of the blocks fit together, and have as many tokens as the match.

        Of all blocks with one tree header only the first is looked at: their arrays have the same shapes.
        """
        end, piece = self.end_of(self._blocks)
        if piece.start != piece.block_tokens * (self._blocks - 1) or not piece.start < self._offset <= end:
            raise Corrupt(
                f"{self._named(self._blocks - 1)}: it has the tokens from {piece.start} to {end}, in blocks of "
                f"{piece.block_tokens}, and a match ends in it at {self._offset}; evict it"
            )
        first: _Form | None = None
        seen: set[tuple[int, int]] = set()
        for at, lease in enumerate(leases):
            count = piece.count if at == self._blocks - 1 else piece.block_tokens
            # The leases keep the headers' recipes: no two of them are at one address.
            known = id(lease._recipe), count
            if known in seen:
                continue
            form = _form_of(lease.tree, count, self._named(at))
            if first is None:
                first = form
            elif form != first:
                raise Corrupt(f"{self._named(at)}: its layers are not those of the blocks before it; evict it")
            seen.add(known)
        assert first is not None
        if self._snapshot_at is None and first.without:
            raise Corrupt(
                f"{self._named(0)}, layer {first.without[0]}: it has no array, and there is no snapshot; evict it"
            )
        return first

    def _cut(self, trees: list[Any]) -> list[list[Any]]:
        """What each layer has in each of the blocks' trees, the last one cut to where the match ends. All of them are
        checked."""
        end, piece = self.end_of(self._blocks)
        layers: list[list[Any]] = []
        for number, axis in enumerate(self._form.axes):
            parts = [] if axis is None else [part for tree in trees if (part := tree["layers"][number]) is not None]
            if parts and axis is not None and end > self._offset:
                parts[-1] = cut(parts[-1], axis, 0, self._offset - piece.start)
            layers.append(parts)
        return layers

    def _states(self, tree: Any) -> list[Any]:
        """What a snapshot's tree has for each of the blocks' layers."""
        assert self._snapshot_at is not None
        states = _part(tree, "layers", self._named(self._snapshot_at))
        if len(states) != len(self.layers):
            raise Corrupt(
                f"{self._named(self._snapshot_at)}: it has states for {len(states)} layers, and the blocks have "
                f"{len(self.layers)}; evict it"
            )
        for layer in self._form.without:
            if states[layer] is None:
                raise Corrupt(f"{self._named(self._snapshot_at)}, layer {layer}: it has no state; evict it")
        return states


class _Form(NamedTuple):
    """What blocks of one sequence have in common: the layers' axes, and for each of them the places, dtypes and shapes
    of its arrays but for the tokens; None for those that have nothing in blocks."""

    axes: list[int | None]
    arrays: list[list[tuple[str, Any, tuple[int, ...]]] | None]

    @property
    def without(self) -> list[int]:
        """The layers that have tokens, and none of them in blocks: they need a snapshot."""
        return [at for at, axis in enumerate(self.axes) if axis is not None and self.arrays[at] is None]


def _form_of(tree: Any, count: int, named: str) -> _Form:
    """The form of a block, if it is one of `count` tokens.

    Raises:
        Corrupt: it is none.
    """
    axes, layers = _part(tree, "axes", named), _part(tree, "layers", named)
    if len(axes) != len(layers):
        raise Corrupt(f"{named}: it has {len(axes)} axes for {len(layers)} layers; evict it")
    arrays: list[list[tuple[str, Any, tuple[int, ...]]] | None] = []
    for number, (axis, part) in enumerate(zip(axes, layers, strict=True)):
        if axis is not None and type(axis) is not int:
            raise Corrupt(f"{named}, layer {number}: its axis is {axis!r:.40}; evict it")
        arrays.append(None if part is None else _arrays_of(part, axis, count, f"{named}, layer {number}"))
    return _Form(axes, arrays)


def _arrays_of(part: Any, axis: int | None, count: int, named: str) -> list[tuple[str, Any, tuple[int, ...]]]:
    arrays: list[tuple[str, Any, tuple[int, ...]]] = []

    def look(leaf: Any, place: str) -> None:
        if not is_array(leaf):
            arrays.append((place, None, ()))
            return
        shape = list(leaf.shape)
        if axis is None or not -len(shape) <= axis < len(shape):
            raise Corrupt(f"{named}: its array {place} of shape {shape} has no axis {axis}; evict it")
        if shape[axis] != count:
            raise Corrupt(
                f"{named}: its array {place} has {shape[axis]} tokens along axis {axis}, and the block {count}; "
                "evict it"
            )
        shape[axis] = -1
        arrays.append((place, leaf.dtype, tuple(shape)))

    mapped(part, look)
    if all(dtype is None for _, dtype, _ in arrays):
        raise Corrupt(f"{named}: it has no array, and the block {count} tokens; evict it")
    return arrays


def _part(tree: Any, name: str, named: str) -> list[Any]:
    if not isinstance(tree, dict) or not isinstance(part := tree.get(name), list):
        raise Corrupt(f"{named}: it holds no {name}: another program has stored it; evict it")
    return part


def _piece(tree: Any, named: str) -> Piece:
    try:
        record = tree["prefix"]
        if record.dtype != np.uint8 or record.ndim != 1:
            raise TypeError(f"an array of {record.dtype} of shape {list(record.shape)}")
        return Piece.unpack(record.data)
    except (BadPrefix, TypeError, KeyError, AttributeError) as error:
        raise Corrupt(f"{named}: it holds no record: {error}; evict it") from None


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
