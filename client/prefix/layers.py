"""A model's layers as their owner has them: what each keeps of a sequence, and how arrays are cut along their tokens.

Owns: the check that layers fit their sequence, which of them go into blocks and which into snapshots, cutting. Does not
own the rule of where a layer rewinds to (`ipc.layers`), nor the arrays: every part is a view of them.

A layer's arrays are any tree of numpy arrays or tensors (dict, list, tuple around them), each with its tokens along
`axis`. Scalars and text in the tree go into every block as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...errors import BadPrefix
from ...ipc.layers import Layer, layout
from ..core.fields import check_count
from ..device.interface import mapped

_AXIS_MAX: Final = 32
_WINDOW_MAX: Final = 1 << 47


@dataclass(frozen=True, slots=True)
class NormalLayer:
    """Keeps something of every token, and so can be continued anywhere.

    Args:
        tree: arrays with as many tokens along `axis` as the sequence has.
        axis: -2 where they are [batch, heads, tokens, dim].

    Example:
        >>> layer = tensord.NormalLayer({"k": np.zeros((1, 2, 40, 8)), "v": np.zeros((1, 2, 40, 8))})      # 40 tokens
    """

    tree: Any
    axis: int = -2


@dataclass(frozen=True, slots=True)
class RotatingLayer:
    """Keeps the last `window` tokens. Until it has rolled over it is as a normal one; then it can be continued only
    where it stands, and where there is a snapshot.

    Args:
        tree: arrays with as many tokens along `axis` as the sequence has, `window` at most, in their order in the
            sequence.

    Example:
        >>> layer = tensord.RotatingLayer({"k": np.zeros((1, 2, 128, 8)), "v": np.zeros((1, 2, 128, 8))}, window=128)
    """

    tree: Any
    window: int
    axis: int = -2


@dataclass(frozen=True, slots=True)
class SharedLayer:
    """Has nothing of its own: it uses another layer's.

    Example:
        >>> layers = [tensord.NormalLayer(np.zeros((1, 2, 40, 8))), tensord.SharedLayer()]     # it uses the first's
    """


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """Keeps a state, which stands for the whole sequence and no part of it.

    Args:
        state: any payload; None where the state at the sequence's end was not kept.

    Example:
        >>> layer = tensord.RecurrentLayer({"ssm": np.zeros((1, 16, 64), np.float32)})
    """

    state: Any


PrefixLayer = NormalLayer | RotatingLayer | SharedLayer | RecurrentLayer
Snapshots = Mapping[int, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that fit a sequence of `tokens` tokens, and each other.

    Attributes:
        digest: 16 bytes: sequences that share blocks have it in common. Their arrays have the same places, dtypes and
            shapes but for the tokens, too: no match is put together of two models' blocks.
        exact: whether some of them can be continued only where a snapshot stands.
        whole: those that go into blocks.
        snapshots: by position, for each layer its state, None for those that need none. In the order of positions.
    """

    tokens: int
    given: tuple[PrefixLayer, ...]
    digest: bytes
    exact: bool
    whole: tuple[bool, ...]
    snapshots: Mapping[int, list[Any]]

    @property
    def axes(self) -> list[int | None]:
        """Along which each has its tokens; None for those without."""
        return [getattr(layer, "axis", None) for layer in self.given]

    def block(self, start: int, stop: int) -> list[Any]:
        """What each layer has of the tokens [start, stop): views; None for those that go into snapshots."""
        return [
            cut(layer.tree, layer.axis, start, stop)
            if whole and isinstance(layer, NormalLayer | RotatingLayer)
            else None
            for layer, whole in zip(self.given, self.whole, strict=True)
        ]


def layers_of(given: Sequence[PrefixLayer], tokens: int, snapshots: Snapshots, block_tokens: int) -> Layers:
    """The layers of a sequence of so many tokens, checked.

    Args:
        snapshots: by position before the sequence's end, a state for each layer that needs one, in the layers' order.

    Raises:
        BadPrefix: a layer without arrays, or with another number of tokens; a snapshot at a position outside, or for
            another number of layers; a state missing at the end, or anywhere. The layer or the position is named.
    """
    try:
        listed = tuple(given)
    except TypeError:
        raise BadPrefix(
            f"layers are a {type(given).__name__}: give a list of them, one for each of the model's"
        ) from None
    if not listed:
        raise BadPrefix("layers are empty: a sequence has at least one, or there is nothing to continue it with")
    if not isinstance(snapshots, Mapping):
        raise BadPrefix(f"snapshots are a {type(snapshots).__name__}: give a dict, by position a state for each layer")
    described: list[Layer] = []
    shapes: list[str] = []
    for number, layer in enumerate(listed):
        described.append(_described(number, layer, tokens))
        if described[-1].whole:
            shapes += _shapes(f"layer {number}", layer, tokens)
        elif isinstance(layer, RotatingLayer):
            _shapes(f"layer {number}", layer, layer.window)
    digest, exact = layout(described, block_tokens)
    digest = hashlib.sha256(digest + "\n".join(shapes).encode()).digest()[: len(digest)]
    whole = tuple(layer.whole for layer in described)
    return Layers(tokens, listed, digest, exact, whole, _snapshots(listed, described, tokens, snapshots))


def cut(tree: Any, axis: int, start: int, stop: int) -> Any:
    """The tokens [start, stop) of each array of a tree: views."""

    def part(leaf: Any, place: str) -> Any:
        return leaf[_index(leaf, axis, start, stop)] if is_array(leaf) else leaf

    return mapped(tree, part)


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a tree is an array or a tensor, on whatever device."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _described(number: int, layer: object, tokens: int) -> Layer:
    match layer:
        case NormalLayer():
            return Layer("normal", tokens)
        case RotatingLayer():
            return Layer("rotating", tokens, check_count(f"layer {number}: window", layer.window, _WINDOW_MAX, 1))
        case SharedLayer():
            return Layer("shared")
        case RecurrentLayer():
            return Layer("recurrent", tokens)
        case _:
            raise BadPrefix(
                f"layer {number} is a {type(layer).__name__}: give a NormalLayer, RotatingLayer, SharedLayer or "
                "RecurrentLayer"
            )


def _shapes(place: str, layer: NormalLayer | RotatingLayer | Any, tokens: int) -> list[str]:
    """The places, dtypes and shapes of a layer's arrays, checked to have so many tokens."""
    axis = layer.axis
    if isinstance(axis, bool) or not isinstance(axis, int) or abs(axis) > _AXIS_MAX:
        raise BadPrefix(f"{place}: axis is {axis!r}; it is a whole number, as -2")
    kind = type(layer).__name__
    shapes = [f"{place} {axis}"]

    def add(leaf: Any, at: str) -> None:
        if not is_array(leaf):
            return
        at = at.removeprefix("tree")
        shape = list(leaf.shape)
        if not -len(shape) <= axis < len(shape):
            raise BadPrefix(f"{place} ({kind}): its array {at} of shape {shape} has no axis {axis}")
        if shape[axis] != tokens:
            raise BadPrefix(
                f"{place} ({kind}): its array {at} has {shape[axis]} tokens along axis {axis}, and should have {tokens}"
            )
        shape[axis] = -1
        shapes.append(f"{at} {str(leaf.dtype).removeprefix('torch.')} {shape}")

    mapped(layer.tree, add)
    if len(shapes) == 1:
        raise BadPrefix(f"{place} ({kind}): it has no array, so nothing of the sequence's {tokens} tokens")
    return shapes


def _snapshots(
    listed: Sequence[PrefixLayer], described: Sequence[Layer], tokens: int, given: Snapshots
) -> dict[int, list[Any]]:
    needed = [number for number, layer in enumerate(described) if layer.exact]
    found: dict[int, list[Any]] = {}
    for position, states in given.items():
        if isinstance(position, bool) or not hasattr(position, "__index__") or not 0 < position < tokens:
            raise BadPrefix(
                f"a snapshot for position {position!r}: it is after a first token and before the sequence's end at "
                f"{tokens}; the layers have that of the end"
            )
        if len(states) != len(needed):
            raise BadPrefix(
                f"the snapshot for position {position} has {len(states)} states, and {len(needed)} layers need one: "
                "those that are recurrent, and those whose window has rolled over"
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
    ends = [_end_state(listed[number]) for number in needed]
    without = [number for number, state in zip(needed, ends, strict=True) if state is None]
    if needed and not without:
        found[tokens] = _spread(needed, ends, len(listed))
    elif needed and not found:
        raise BadPrefix(f"layer {without[0]} has no state, and there is no snapshot: nothing could be continued")
    return dict(sorted(found.items()))


def _end_state(layer: PrefixLayer) -> Any:
    return layer.state if isinstance(layer, RecurrentLayer) else getattr(layer, "tree", None)


def _spread(needed: Sequence[int], states: Sequence[Any], layers: int) -> list[Any]:
    by_number = dict(zip(needed, states, strict=True))
    return [by_number.get(number) for number in range(layers)]


def _index(leaf: Any, axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (slice(None),) * (axis % len(leaf.shape)) + (slice(start, stop),)
