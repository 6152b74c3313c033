"""The counts of a replay, and the row that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replaying.traces import Request, Trace


@dataclass(slots=True)
class Counts:
    """The counted requests: blocks, bytes and tokens that they ask for, and those that are cached.

    A hit is a cached block. A prefix hit is a cached block before the first block that is not cached.
    """

    blocks: int = 0
    hits: int = 0
    prefix_hits: int = 0
    bytes: int = 0
    hit_bytes: int = 0
    tokens: int = 0
    tokens_saved: int = 0

    @property
    def object_hit(self) -> float:
        """Percent of blocks that are cached."""
        return 100 * self.hits / max(self.blocks, 1)

    @property
    def byte_hit(self) -> float:
        """Percent of bytes that are cached."""
        return 100 * self.hit_bytes / max(self.bytes, 1)

    @property
    def prefix_hit(self) -> float:
        """Percent of blocks that are cached as a prefix."""
        return 100 * self.prefix_hits / max(self.blocks, 1)

    def count(self, trace: Trace, request: Request, blocks: list[int], prefix: int, beyond: list[int]) -> None:
        """Counts one request: its blocks, the length of the cached prefix, and the cached blocks after it."""
        if not request.counted:
            return
        sizes, tokens = trace.sizes, trace.tokens
        there = blocks[:prefix] + beyond
        self.blocks += len(blocks)
        self.hits += len(there)
        self.prefix_hits += prefix
        self.bytes += sum([sizes[block] for block in blocks])
        self.hit_bytes += sum([sizes[block] for block in there])
        self.tokens += sum([tokens[block] for block in blocks])
        self.tokens_saved += sum([tokens[block] for block in blocks[:prefix]])


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one trace with one size of the cache. Hits are percents; `tokens_saved` counts tokens."""

    trace: str
    policy: str
    size: float
    object_hit: float
    byte_hit: float
    prefix_hit: float
    tokens_saved: int
    tokens: int

    @classmethod
    def of(cls, trace: str, policy: str, size: float, counts: Counts) -> Row:
        return cls(
            trace,
            policy,
            size,
            round(counts.object_hit, 3),
            round(counts.byte_hit, 3),
            round(counts.prefix_hit, 3),
            counts.tokens_saved,
            counts.tokens,
        )

    def as_json(self) -> dict[str, Any]:
        """The fields of the row, for a JSON file."""
        names = ("trace", "policy", "size", "object_hit", "byte_hit", "prefix_hit", "tokens_saved")
        return {name: getattr(self, name) for name in names}
