"""What a policy is told of a new span."""

from __future__ import annotations

from msgspec import Struct


class Candidate(Struct, frozen=True):
    """A span that was published.

    Args:
        size_bytes: of the ring.
        tokens: that it stands for, 0 where nobody said.
        cost_ms: what computing it took, 0 where nobody said.
        depth: how many blocks come before it in its cached sequence; 0 for an entry that is of use by itself.
        before_bytes: what those take of the ring.
        agent: on whose behalf it was stored.
        owner: the uid that stored it.
    """

    span_id: int
    key: bytes
    size_bytes: int
    tokens: int = 0
    cost_ms: float = 0.0
    depth: int = 0
    before_bytes: int = 0
    agent: str = ""
    owner: int = 0
