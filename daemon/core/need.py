"""The amounts that a put takes of the store: bytes, entries and tokens. Owns the fields only. Invariant: a need is
immutable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """The amounts that a put takes. An empty need, without a key, stands for bringing the store back under its
    budgets."""

    key: bytes | None = None
    span_bytes: int = 0
    tokens: int = 0
    uid: int = 0

    @property
    def entries(self) -> int:
        return 0 if self.key is None else 1
