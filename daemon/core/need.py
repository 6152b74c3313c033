"""The amounts that a put takes of the store: bytes, entries and tokens. Owns the fields only. Invariant: a need is
immutable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """The amounts that a put takes. An empty need, without a key, stands for bringing the store back under its
    budgets. `has_span`: the put needs a slot only, since its payload is in a span of the ring, counted already."""

    key: bytes | None = None
    span_bytes: int = 0
    tokens: int = 0
    uid: int = 0
    has_span: bool = False

    @property
    def entries(self) -> int:
        return 0 if self.key is None or self.has_span else 1
