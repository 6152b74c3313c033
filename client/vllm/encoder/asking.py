"""One request whose inputs are looked up.

Owns: which of the request's inputs still have to be encoded or loaded, and how far they are settled. Does not own: what
settles them (scheduler.py).
Invariants: inputs with one identifier are one input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .lookups import Input


class Asking:
    """A request. `inputs`: those that still have to be encoded or loaded, by identifier."""

    __slots__ = ("count", "end", "inputs", "order", "reached", "settled", "since", "waits_since")

    def __init__(self) -> None:
        self.inputs: dict[str, Input] = {}
        self.begin([])

    @property
    def claims(self) -> bool:
        """Whether the request has a claim, or waits for one, on an input that is not allocated yet."""
        return any(found.wanted is not None for found in self.inputs.values())

    def begin(self, features: Sequence[Any]) -> None:
        """Starts to settle the inputs in `features` from now on."""
        self.count = len(features)
        self.end = end_of(features) if features else 0
        self.order: list[str] | None = None
        self.reached = 0
        self.settled = False
        self.since = time.monotonic()
        self.waits_since = 0.0

    def unknown(self, features: Sequence[Any], computed: int, is_local: Callable[[str], bool]) -> Iterator[Any]:
        """The features that the request needs from token `computed` on and that have no state here. `is_local`: whether
        the engine's own encoder cache has an input."""
        for feature in features:
            position, name = feature.mm_position, feature.identifier
            if computed < position.offset + position.length and name not in self.inputs and not is_local(name):
                yield feature

    def missed(self) -> list[str]:
        """The identifiers of missed inputs, in the order of their keys. A missed input without a key is settled: the
        stored output does not fit, or another engine stores it."""
        missed = [
            (found.key, name)
            for name, found in self.inputs.items()
            if found.state == "missed" and found.key is not None
        ]
        return [name for _, name in sorted(missed)]


def inputs_of(features: Iterable[Any]) -> dict[str, Input]:
    """The inputs of these features, by identifier."""
    inputs: dict[str, Input] = {}
    for feature in features:
        rows = feature.mm_position.get_num_embeds()
        known = inputs.setdefault(feature.identifier, Input(feature.modality, rows, feature.data))
        if known.datas[-1] is not feature.data or known.rows != rows:
            # Several inputs have one name. If their contents differ, none of them is shared.
            known.datas.append(feature.data if known.rows == rows else None)
    return inputs


def end_of(features: Sequence[Any]) -> int:
    """The position after the last feature. Features are in the order of their offsets."""
    last = features[-1].mm_position
    end: int = last.offset + last.length
    return end
