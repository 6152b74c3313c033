"""What a caller gives: tokens, media and a model's layers; how the arrays of layers are cut along the token axis.

Where a sequence can be continued follows the rules of mistral.rs (PrefixCacheManagerV2):
- a normal layer: after any of its tokens;
- a rotating layer: after any token until its window has rolled over. After that only at the end, because the tokens
  that other positions need are overwritten;
- a shared layer: anywhere;
- a recurrent layer: only where there is a snapshot of its state.

A layer's arrays are any tree (dict, list, tuple) of numpy arrays or tensors, each with its tokens along `axis`. Scalars
and text in the tree are copied into every block.

Owns: the checks of all three, the choice which layers go into blocks and which into snapshots, and cutting.
Does not own: the arrays, nor how media are folded into tokens (`shm.payloads.prefix`).
Invariants: every part is a view of the caller's arrays. A contiguous buffer of uint32 is never copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...errors import BadPrefix, UsageError, shown
from ...shm.payloads.dtypes import dtype_named
from ...shm.payloads.prefix import LAYOUT_BYTES, TOKEN_BYTES, Media, Tokens, ordered
from ...shm.payloads.tensors import check_tensor, loaded_torch, tensor_leaf
from ..arguments.checks import check_count
from ..gpu.interface import mapped

TOKEN_MAX: Final = (1 << 32) - 1
_POSITION_MAX: Final = 1 << 47
_GIVE: Final = "pass a list, an array, a tensor or bytes, best an array of uint32"
_AXIS_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class NormalLayer:
    """A layer that keeps a part for every token, and can be continued after any token.

    Args:
        tree: arrays with as many tokens along `axis` as the sequence has.
        axis: the token axis; -2 for arrays of shape [batch, heads, tokens, dim].

    Example:
        >>> layer = tensord.NormalLayer({"k": np.zeros((1, 2, 40, 8)), "v": np.zeros((1, 2, 40, 8))})      # 40 tokens
    """

    tree: Any
    axis: int = -2


@dataclass(frozen=True, slots=True)
class RotatingLayer:
    """A layer that keeps the last `window` tokens.

    Up to `window` tokens it is like a normal layer. Beyond that it can be continued only at the sequence's end, and at
    snapshots.

    Args:
        tree: arrays with as many tokens along `axis` as the sequence has, at most `window`, in the sequence's order.
        window: the window's length in tokens.
        axis: as for `NormalLayer`.

    Example:
        >>> layer = tensord.RotatingLayer({"k": np.zeros((1, 2, 128, 8)), "v": np.zeros((1, 2, 128, 8))}, window=128)
    """

    tree: Any
    window: int
    axis: int = -2


@dataclass(frozen=True, slots=True)
class SharedLayer:
    """A layer without arrays of its own, which uses another layer's.

    Example:
        >>> layers = [tensord.NormalLayer(np.zeros((1, 2, 40, 8))), tensord.SharedLayer()]     # it uses the first's
    """


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """A layer that keeps one state for the whole sequence, of which no part can be cut.

    Args:
        state: any payload; None if the state at the sequence's end was not kept.

    Example:
        >>> layer = tensord.RecurrentLayer({"ssm": np.zeros((1, 16, 64), np.float32)})
    """

    state: Any


PrefixLayer = NormalLayer | RotatingLayer | SharedLayer | RecurrentLayer
_KINDS: Final = {NormalLayer: "normal", RotatingLayer: "rotating", SharedLayer: "shared", RecurrentLayer: "recurrent"}
"""The kinds as they are in the digest."""
Snapshots = Mapping[int, Sequence[Any]]
GivenTokens = Any
"""An array, a tensor, a buffer or a list of whole numbers."""
GivenMedia = Iterable[Media | tuple[int, int, str, bytes]]


@dataclass(frozen=True, slots=True)
class Layers:
    """Checked layers of a sequence of `tokens` tokens.

    Attributes:
        digest: 16 bytes over the layers' kinds, and their arrays' places, dtypes and shapes without the token axis.
            Only sequences with the same digest share blocks.
        exact: whether some layer can be continued only at a snapshot.
        axes: each layer's token axis; None for a layer without one.
        trees: each layer's arrays that go into blocks; None for a layer that has none, or goes into snapshots.
        snapshots: by position, in order: for each layer its state, or None for a layer that needs none.
    """

    tokens: int
    digest: bytes
    exact: bool
    axes: list[int | None]
    trees: list[Any]
    snapshots: Mapping[int, list[Any]]

    def block(self, start: int, stop: int) -> list[Any]:
        """Each layer's arrays for the tokens [start, stop), as views; None for a layer without arrays in blocks."""
        return [
            None if tree is None or axis is None else cut(tree, axis, start, stop)
            for tree, axis in zip(self.trees, self.axes, strict=True)
        ]


def layers_of(given: Sequence[PrefixLayer], tokens: int, snapshots: Snapshots, block_tokens: int) -> Layers:
    """Checks the layers of a sequence of `tokens` tokens. `snapshots`: by position before the end, a state for each
    layer that needs one, in the layers' order. Raises BadPrefix, which names the layer or the position, or
    UnsupportedLeaf."""
    try:
        listed = tuple(given)
    except TypeError:
        raise BadPrefix(
            f"layers are a {type(given).__name__}; pass a list with one item for each layer of the model"
        ) from None
    if not listed:
        raise BadPrefix("layers are empty; a sequence needs at least one")
    if not isinstance(snapshots, Mapping):
        raise BadPrefix(f"snapshots are a {type(snapshots).__name__}; pass a dict from position to a list of states")
    described: list[str] = []
    shapes: list[str] = []
    trees: list[Any] = []
    needed: list[int] = []
    for number, layer in enumerate(listed):
        kind = next((name for of, name in _KINDS.items() if isinstance(layer, of)), None)
        if kind is None:
            names = " or ".join(", ".join(of.__name__ for of in _KINDS).rsplit(", ", 1))
            raise BadPrefix(f"layer {number} is a {type(layer).__name__}; pass a {names}")
        window = 0
        if isinstance(layer, RotatingLayer):
            window = check_count(f"layer {number}: window", layer.window, _POSITION_MAX, 1)
        is_whole = kind == "normal" or (kind == "rotating" and tokens <= window)
        trees.append(getattr(layer, "tree", None) if is_whole else None)
        described.append(f"{kind} {window} {is_whole}")
        if is_whole:
            shapes += _shapes(f"layer {number}", layer, tokens)
        elif kind != "shared":
            needed.append(number)
            if kind == "rotating":
                _shapes(f"layer {number}", layer, window)
    digest = _digest(shapes, _digest([str(block_tokens), *described]))
    axes = [getattr(layer, "axis", None) for layer in listed]
    return Layers(tokens, digest, bool(needed), axes, trees, _snapshots(listed, needed, tokens, snapshots))


def cut(tree: Any, axis: int, start: int, stop: int) -> Any:
    """The tokens [start, stop) of each array of a tree, as views."""

    def part(leaf: Any, place: str) -> Any:
        return leaf[(slice(None),) * (axis % len(leaf.shape)) + (slice(start, stop),)] if is_array(leaf) else leaf

    return mapped(tree, part)


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a tree is an array or a tensor, on any device."""
    try:
        return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    except RuntimeError:
        # A nested tensor tells no shape.
        return True


def _digest(lines: list[str], before: bytes = b"") -> bytes:
    """16 bytes."""
    return hashlib.sha256(before + "\n".join(lines).encode()).digest()[:LAYOUT_BYTES]


def _shapes(place: str, layer: Any, tokens: int) -> list[str]:
    """The places, dtypes and shapes of a layer's arrays. Checks that each has `tokens` tokens."""
    axis = layer.axis
    if isinstance(axis, bool) or not isinstance(axis, int) or abs(axis) > _AXIS_MAX:
        raise BadPrefix(f"{place}: axis is {shown(axis)}; it must be a whole number, for example -2")
    kind = type(layer).__name__
    shapes = [f"{place} {axis}"]

    def add(leaf: Any, at: str) -> None:
        if not is_array(leaf):
            return
        at = at.removeprefix("tree")
        check_tensor(leaf, f"{place} ({kind}): its array {at}")
        shape = list(leaf.shape)
        if not -len(shape) <= axis < len(shape):
            raise BadPrefix(f"{place} ({kind}): its array {at} of shape {shape} has no axis {axis}")
        if shape[axis] != tokens:
            raise BadPrefix(
                f"{place} ({kind}): its array {at} has {shape[axis]} tokens along axis {axis}; it must have {tokens}"
            )
        shape[axis] = -1
        shapes.append(f"{at} {str(leaf.dtype).removeprefix('torch.')} {shape}")

    mapped(layer.tree, add)
    if len(shapes) == 1:
        raise BadPrefix(f"{place} ({kind}): it has no array, but the sequence has {tokens} tokens")
    return shapes


def _snapshots(
    listed: Sequence[PrefixLayer], needed: Sequence[int], tokens: int, given: Snapshots
) -> dict[int, list[Any]]:
    """All snapshots by position, in order, the states at the end among them. `needed`: the layers that need one."""
    found: dict[int, list[Any]] = {}
    for position, states in given.items():
        if isinstance(position, bool) or not hasattr(position, "__index__") or not 0 < position < tokens:
            raise BadPrefix(
                f"a snapshot for position {shown(position)}: the position must be from 1 to {tokens - 1}; the layers "
                "themselves have the state at the end"
            )
        if len(states) != len(needed):
            raise BadPrefix(
                f"the snapshot for position {position} has {len(states)} states, but {len(needed)} layers need one: "
                "the recurrent ones, and the rotating ones with more tokens than their window"
            )
        at = int(position)
        found[at] = _spread(needed, states, len(listed))
        for number in needed:
            layer = listed[number]
            if isinstance(layer, RotatingLayer):
                window = RotatingLayer(found[at][number], layer.window, layer.axis)
                _shapes(f"the snapshot for position {at}, layer {number}", window, min(at, layer.window))
            elif found[at][number] is None:
                raise BadPrefix(f"the snapshot for position {at} has no state for layer {number}")
    ends = [getattr(listed[number], "state", getattr(listed[number], "tree", None)) for number in needed]
    without = [number for number, state in zip(needed, ends, strict=True) if state is None]
    if needed and not without:
        found[tokens] = _spread(needed, ends, len(listed))
    elif needed and not found:
        raise BadPrefix(f"layer {without[0]} has no state, and there is no snapshot; give one of the two")
    return dict(sorted(found.items()))


def _spread(needed: Sequence[int], states: Sequence[Any], layers: int) -> list[Any]:
    by_number = dict(zip(needed, states, strict=True))
    return [by_number.get(number) for number in range(layers)]


def tokens_of(given: GivenTokens) -> Tokens:
    """Returns the tokens as uint32 of shape (n,), n ≥ 1, over the memory of `given` if that is a contiguous buffer of
    32-bit words; otherwise converted once. Raises BadPrefix with the position and value of what is no token."""
    try:
        array = _array_of(given)
    except (TypeError, ValueError, OverflowError, BufferError, RuntimeError) as error:
        # Other libraries raise any of these for an array that does not hold numbers, or that the host cannot read.
        raise BadPrefix(f"tokens are a {type(given).__name__}: {error}; {_GIVE}") from None
    if array.ndim != 1:
        raise BadPrefix(f"tokens are a {type(given).__name__} of shape {list(array.shape)}, not (n,); {_GIVE}")
    if not len(array):
        raise BadPrefix("tokens are empty; a sequence has at least one")
    if array.dtype == np.uint32:
        return np.ascontiguousarray(array)
    if array.dtype.kind not in "iu" or not array.dtype.isnative:
        raise BadPrefix(f"tokens are of dtype {array.dtype}; pass whole numbers, best as uint32")
    if (array.dtype.kind == "i" and array.min() < 0) or (array.itemsize > TOKEN_BYTES and array.max() > TOKEN_MAX):
        at = int(np.argmax((array < 0) | (array > TOKEN_MAX)))
        raise BadPrefix(f"token {at} is {array[at]}; a token is a whole number from 0 to {TOKEN_MAX}")
    if array.dtype == np.int32:
        return np.ascontiguousarray(array).view(np.uint32)
    return array.astype(np.uint32)


def _array_of(given: GivenTokens) -> np.ndarray[Any, Any]:
    """The tokens as numpy has them."""
    if isinstance(given, bytes | bytearray | memoryview) and memoryview(given).itemsize == 1:
        return np.frombuffer(given, np.uint32)
    torch = loaded_torch()
    if torch is not None and type(given) is torch.Tensor:
        name, array, _ = tensor_leaf(torch, given, lambda: "it")
        return array.view(dtype_named(name))
    return np.asarray(given)


def media_of(given: GivenMedia, tokens: int, *, may_be_cut: bool) -> tuple[Media, ...]:
    """Returns the items ordered by (start, modality). Raises BadPrefix with an item that is invalid, ends after the
    sequence of `tokens` tokens (unless `may_be_cut`), or overlaps another one of its modality."""
    items: list[Media] = []
    try:
        for start, length, modality, digest in given:
            start = check_count("start", start, _POSITION_MAX)
            length = check_count("length", length, _POSITION_MAX)
            items.append(Media(start, length, modality, memoryview(digest).tobytes()))  # type: ignore[arg-type]
    except (TypeError, ValueError, UsageError) as error:
        raise BadPrefix(f"media are {shown(given):.200}: {error}; pass a list of Media") from None
    return ordered(items, tokens, may_be_cut=may_be_cut) if items else ()
