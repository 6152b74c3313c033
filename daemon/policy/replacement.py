"""Which entry goes first when the store needs room: the interface, and the policies by name.

A policy owns an order of the spans it was told of, nothing else: not whether one is pinned, nor how much must go.
Policies name spans, not keys, because the access log that readers keep does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from ...errors import BadConfiguration
from .lfu import LFU
from .lru import LRU


class Replacement(Protocol):
    """An order from cold to warm over the spans that are stored."""

    @property
    def name(self) -> str:
        """The policy's name in the configuration."""
        ...

    def __len__(self) -> int: ...

    def inserted(self, span_id: int, key: bytes, size_bytes: int, tokens: int, now: float) -> None:
        """A new span, not known so far; its publication is its first use."""
        ...

    def accessed(self, span_id: int, now: float) -> None:
        """A use of a known span."""
        ...

    def removed(self, span_id: int) -> None:
        """A known span is gone, whether as a victim or otherwise."""
        ...

    def coldest(self) -> Iterator[int]:
        """Every known span, coldest first. Lazy: valid until the next change."""
        ...

    def rank(self, span_id: int) -> tuple[float, ...]:
        """A known span's place in the order: lower is colder, and no two are equal."""
        ...

    def check_invariants(self) -> None:
        """Asserts what the policy's own structures promise each other."""
        ...


POLICIES: Final[dict[str, type[Replacement]]] = {"lru": LRU, "lfu": LFU}


def by_name(name: str) -> Replacement:
    """A new, empty policy.

    Raises:
        BadConfiguration: no policy has that name; the message lists those that exist.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise BadConfiguration(f"replacement = {name!r} is no policy; choose one of {', '.join(sorted(POLICIES))}")
    return policy()
