"""Layers of a model's KV cache: how many tokens of a sequence each layer keeps, and to which positions it can rewind.

The rules are those of mistral.rs (PrefixCacheManagerV2):
- a normal layer rewinds to any position that it covers;
- a rotating layer rewinds to any position until its window has rolled over. After that it cannot rewind, because the
  tokens that it needs are overwritten;
- a shared layer rewinds to any position;
- a recurrent layer rewinds only to a position that has a snapshot of it.

Owns: the rules, and the digest by which sequences with equal layers share blocks. Does not own the arrays.

Invariant: all layers of a sequence that are not shared have the same length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import BadPrefix

Kind = Literal["normal", "rotating", "shared", "recurrent"]


@dataclass(frozen=True, slots=True)
class Layer:
    """The cache of one layer for one sequence.

    Args:
        kind: "normal" keeps every token. "rotating" keeps the last `window` tokens. "shared" keeps nothing and uses the
            cache of another layer. "recurrent" keeps one state, which is valid after exactly `length` tokens.
        length: the number of tokens that the layer has processed. A normal layer covers all of them.
        window: the size of a rotating layer's window, in tokens.
        snapshots: the positions at which a recurrent layer's state was saved. They include `length` if the last state
            was saved.
    """

    kind: Kind
    length: int = 0
    window: int = 0
    snapshots: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        """True if the layer still has data for every token. Such a layer can be cut into blocks."""
        return self.kind == "normal" or (self.kind == "rotating" and self.length <= self.window)

    @property
    def exact(self) -> bool:
        """True if the layer can be continued only at a position with a snapshot."""
        return self.kind == "recurrent" or (self.kind == "rotating" and self.length > self.window)


def can_rewind_to(layer: Layer, position: int) -> bool:
    """True if the layer can be continued after its first `position` tokens."""
    match layer.kind:
        case "shared":
            return True
        case "recurrent":
            return position in layer.snapshots
        case "rotating" if layer.length > layer.window:
            return position == layer.length
        case _:
            return position <= layer.length


def layout(layers: Sequence[Layer], block_tokens: int) -> tuple[bytes, bool]:
    """A digest of the layers, and whether the sequence needs snapshots to be continued.

    The digest has 16 bytes. Sequences share blocks only if their digests are equal.

    Raises:
        BadPrefix: two layers have different lengths. The text names the first layer that differs.
    """
    lengths = [layer.length for layer in layers if layer.kind != "shared"]
    for number, layer in enumerate(layers):
        if layer.kind != "shared" and layer.length != lengths[0]:
            raise BadPrefix(
                f"layer {number} ({layer.kind}) has processed {layer.length} tokens, the first layer {lengths[0]}: "
                "give layers of equal length"
            )
    described = [f"{layer.kind} {layer.window} {layer.whole}" for layer in layers]
    digest = hashlib.sha256("\n".join([str(block_tokens), *described]).encode()).digest()[:16]
    return digest, any(layer.exact for layer in layers)
