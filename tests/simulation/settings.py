"""The settings that a seed draws for its first daemon and for each restarted daemon."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Final

from tensord.daemon.forms.limits import StoreLimits
from tensord.daemon.replacement import POLICIES
from tensord.ipc.messages.schema import ClientLimits

_POLICIES: Final = (*POLICIES, "hazard")
"""The default one more often than the others."""


@dataclass(frozen=True)
class Settings:
    """Configuration of one daemon."""

    policy: str
    ring_bytes: int
    index_entries: int
    namespaces_max: int
    limits: dict[str, Any]

    def store_limits(self, ring_bytes: int) -> StoreLimits:
        """The store's limits for a ring of `ring_bytes`."""
        return StoreLimits(ring_bytes=ring_bytes, max_bytes=ring_bytes, object_bytes_max=ring_bytes // 2, **self.limits)

    def client_limits(self, ring_bytes: int) -> ClientLimits:
        """The limits that Welcome sends to a client."""
        return ClientLimits(
            object_bytes_max=ring_bytes // 2,
            claim_s=self.limits["claim_s"],
        )


def drawn(chance: random.Random) -> Settings:
    """Draws the settings of the first daemon."""
    index_entries = chance.choice([10, 20, 40])
    return Settings(
        policy=chance.choice(_POLICIES),
        ring_bytes=chance.choice([1 << 14, 1 << 15, 1 << 16, 3 << 15]),
        index_entries=index_entries,
        namespaces_max=chance.choice([1, 8]),
        limits=_limits(chance, index_entries),
    )


def redrawn(chance: random.Random, before: Settings) -> Settings:
    """Draws the settings of the next daemon: the same, or another policy, ring size and limits."""
    if chance.random() < 0.5:
        return before
    return replace(
        before,
        policy=chance.choice(_POLICIES),
        ring_bytes=chance.choice([before.ring_bytes, 1 << 14, 1 << 15, 1 << 16]),
        index_entries=chance.choice([before.index_entries, 20]),
        limits=_limits(chance, before.index_entries),
    )


def _limits(chance: random.Random, index_entries: int) -> dict[str, Any]:
    """Draws small limits, so that runs reach them. Entries may take all slots, so that buckets run full."""
    return {
        "max_entries": chance.choice([index_entries // 2, index_entries, index_entries * 3 // 2]),
        "max_tokens": chance.choice([None, None, 120]),
        "default_ttl_s": chance.choice([None, 60.0]),
        "claims_per_client_max": chance.choice([2, 8]),
        "claim_s": 4.0,
        "claim_s_max": 20.0,
        "pins_per_client_max": 2,
        "pinned_bytes_max": chance.choice([0, 1 << 13]),
        "remote_s": chance.choice([0.0, 1.0, 50.0, 50.0]),
        "remote_writes": chance.random() < 0.8,
    }
