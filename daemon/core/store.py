"""The store's core: the only mutator of entries, ring, index and claims. Being built; the signatures are final."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...shm.index import IndexWriter
from ...shm.layout import SpanHeader
from ...shm.ring import Ring
from ..policy.replacement import Replacement
from .effects import Effect
from .events import Event
from .limits import StoreLimits


@dataclass(frozen=True, slots=True)
class Recovered:
    """One allocated slot that a former daemon left. `header` is None where the span's first bytes are no header."""

    slot: int
    header: SpanHeader | None
    published: bool


class Store:
    """Events in, effects out. `unix_at_zero_s` is the Unix time at monotonic time 0."""

    def __init__(
        self,
        index: IndexWriter,
        ring: Ring,
        policy: Replacement,
        limits: StoreLimits,
        epoch: int,
        unix_at_zero_s: float = 0.0,
    ) -> None:
        raise NotImplementedError

    def handle(self, event: Event, now: float) -> list[Effect]:
        raise NotImplementedError

    def next_timer(self) -> float | None:
        """When a Tick is due; in the past where the store has work left that it put off."""
        raise NotImplementedError

    def recover(self, records: Iterable[Recovered], now: float) -> None:
        """Takes over what a former daemon left; before the first event, in one or more calls."""
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        raise NotImplementedError

    def entries(self, after: bytes | None, count: int, namespace: bytes | None = None) -> list[dict[str, Any]]:
        raise NotImplementedError

    def entry(self, key: bytes) -> dict[str, Any] | None:
        raise NotImplementedError

    def check_invariants(self) -> None:
        raise NotImplementedError
