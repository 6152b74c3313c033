"""The store's budgets and limits, each under its name in the configuration and in refusals.

Owns the values, and which are in force. Does not own where they come from, nor the amounts taken. Invariant:
`put_bytes_max` is at most `max_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bytes, counts and seconds. `ring_bytes`: the ring's final size. `max_bytes`: of all that is taken in the ring,
    span headers and alignment included. `pinned_bytes_max`: of what all clients together pin by message. `remote_s`:
    the longest wait for the remote store; 0: there is none."""

    ring_bytes: int
    max_bytes: int
    max_entries: int
    object_bytes_max: int
    max_tokens: int | None = None
    default_ttl_s: float | None = None
    claims_per_client_max: int = 1024
    claim_s: float = 10.0
    claim_s_max: float = 120.0
    pins_per_client_max: int = 1024
    pin_s_max: float = 3600.0
    pinned_bytes_max: int = 0
    prefix_tokens_max: int = 1 << 20
    prefix_wait_s: float = 1.0
    remote_s: float = 0.0
    remote_writes: bool = False


@dataclass(slots=True)
class RingBudget:
    """The present limits. `resident_bytes_max`: the bytes of the ring that are in memory, or will be once it has
    shrunk. Puts stay within it. No entry is evicted for it alone, since only whole pages return memory to the system.
    """

    max_entries: int
    max_bytes: int
    max_tokens: int | None
    resident_bytes_max: int | None = None

    @property
    def put_bytes_max(self) -> int:
        """The limit on the bytes taken once a put has its span."""
        resident = self.resident_bytes_max
        return self.max_bytes if resident is None else min(self.max_bytes, resident)
