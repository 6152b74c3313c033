"""The description of a new span for a policy.

Owns: its fields. Does not own the span. Imports no policy.
"""

from __future__ import annotations

from msgspec import Struct


class Candidate(Struct, frozen=True):
    """A span that was published, or is about to be.

    Args:
        size_bytes: the size of the span in the ring.
        tokens: the number of tokens that it represents; 0 if not known.
        cost_ms: the time that computing it took; 0 if not known.
        depth: the number of blocks before it in its cached sequence; 0 for any other entry.
        before_bytes: the size of these blocks in the ring.
        agent: the agent for which it was stored.
        owner: the uid that stored it.
        uses: the number of its uses under earlier daemons, without its put; 0 for a new entry.
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
    uses: int = 0
