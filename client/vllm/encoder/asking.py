"""One request whose inputs are looked up.

Owns: which of the request's inputs still have to be encoded or loaded, and how far they are settled. Does not own: what
settles them (scheduler.py).
Invariants: inputs with one identifier are one input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from ...reading.lease import Lease
from .claims import Wanted

State = Literal["asked", "unshared", "found", "missed", "decided"]
"""decided: a missed input that the request waits for no longer."""


class Input:
    """An input of a request. The background thread writes `key`, then `lease`, and `state` last; once `state` is
    "missed", the step's thread does."""

    __slots__ = ("check", "datas", "key", "lease", "modality", "rows", "state", "wanted")

    def __init__(self, modality: str, rows: int, data: object) -> None:
        self.modality = modality
        self.rows = rows
        self.datas = [data]
        self.state: State = "asked"
        self.key: bytes | None = None
        """None in state "missed" if the stored output does not fit: it is settled."""
        self.lease: Lease | None = None
        self.check: bool | None = None
        """Whether the input is encoded anyway and compared with the stored output; None: not decided yet."""
        self.wanted: Wanted | None = None


class Asking:
    """A request. `inputs`: those that still have to be encoded or loaded, by identifier."""

    __slots__ = ("count", "inputs", "settled", "since", "waits_since")

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
        self.settled = False
        self.since = time.monotonic()
        self.waits_since = 0.0
        for found in self.inputs.values():
            found.state = "missed" if found.state == "decided" else found.state

    def unknown(self, features: Sequence[Any], computed: int, is_local: Callable[[str], bool]) -> Iterator[Any]:
        """The features that the request needs from token `computed` on and that have no state here. `is_local`: whether
        the engine's own encoder cache has an input."""
        for feature in features:
            position, name = feature.mm_position, feature.identifier
            if computed < position.offset + position.length and name not in self.inputs and not is_local(name):
                yield feature

    def missed(self) -> list[Input]:
        """The inputs to claim or to wait for, in the order of their keys."""
        missed = [found for found in self.inputs.values() if found.state == "missed" and found.key and not found.lease]
        return sorted(missed, key=lambda found: found.key or b"")


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
