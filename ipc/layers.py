"""Layers of a model's cache: what each keeps of a sequence, and to which positions it can go back.

Rules (mistral.rs, PrefixCacheManagerV2): a normal layer rewinds anywhere it covers; a rotating window that has rolled
over not at all, since what it would need again was overwritten; a shared layer always; a recurrent one only to where a
snapshot of it stands.

Owns: the rule, and what a sequence's layers make of its blocks. Does not own the arrays.
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
    """What one layer keeps of a sequence.

    Args:
        kind: "normal" keeps every token, "rotating" the last `window`, "shared" has nothing of its own (it uses another
            layer's), "recurrent" a state, which stands for `length` tokens and no other number.
        length: tokens it has seen: what a normal layer covers.
        window: of a rotating layer, in tokens.
        snapshots: positions at which a recurrent layer's state was kept, `length` among them if it was.
    """

    kind: Kind
    length: int = 0
    window: int = 0
    snapshots: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it has something for each token, so that it can be cut into blocks."""
        return self.kind == "normal" or (self.kind == "rotating" and self.length <= self.window)

    @property
    def exact(self) -> bool:
        """Whether it can be continued only where a snapshot stands."""
        return self.kind == "recurrent" or (self.kind == "rotating" and self.length > self.window)


def can_rewind_to(layer: Layer, position: int) -> bool:
    """Whether the layer can be continued after its first `position` tokens."""
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
    """What sequences must have in common to share blocks: 16 bytes, and whether they need snapshots to go on from.

    Raises:
        BadPrefix: layers that disagree on their length; the first that does is named.
    """
    lengths = [layer.length for layer in layers if layer.kind != "shared"]
    for number, layer in enumerate(layers):
        if layer.kind != "shared" and layer.length != lengths[0]:
            raise BadPrefix(f"layer {number} ({layer.kind}) has seen {layer.length} tokens, the first {lengths[0]}")
    described = [f"{layer.kind} {layer.window} {layer.whole}" for layer in layers]
    digest = hashlib.sha256("\n".join([str(block_tokens), *described]).encode()).digest()[:16]
    return digest, any(layer.exact for layer in layers)
