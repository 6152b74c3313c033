"""The store's counters since the daemon started, kept up to date so that status walks nothing.

Owns the counts. Does not own the events that they count. Invariant: counts only rise.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from .histogram import Histogram
from .removal_history import Removed


@dataclass(slots=True)
class StoreCounters:
    """Monotonic counters. `puts` by outcome, `evictions` by reason, `refusals` by the error's code.

    `claims_unstorable`: claims whose value cannot be stored, by the error's code. `found_corrupt` must stay 0.
    `hits` and `misses` are the lanes' counts. Of the hits, `log_lost` have no record in the access log, and
    `hits_unknown` are of spans without an entry. `put_bytes`: payload bytes of stored puts. `idle_at_eviction_s`: by
    the reason of a removal, the times since the last use. `moves`: entries copied to another place of the ring to make
    room. `prefix_hits`: queries of which some tokens were cached. `prefix_uses_lost`: uses by queries that were not
    reported to the policy. `remote`: fetches from the remote store and writes to it, by outcome (docs/remote.md).
    """

    puts: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    claims: Counter[str] = field(default_factory=Counter)
    claims_unstorable: Counter[str] = field(default_factory=Counter)
    put_bytes: int = 0
    evicted_bytes: int = 0
    scans: int = 0
    moves: int = 0
    moved_bytes: int = 0
    republished: int = 0
    hits: int = 0
    hits_unknown: int = 0
    misses: int = 0
    log_lost: int = 0
    recovered: int = 0
    found_corrupt: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_tokens_asked: int = 0
    prefix_tokens_matched: int = 0
    prefix_uses_lost: int = 0
    remote: Counter[str] = field(default_factory=Counter)
    remote_read_bytes: int = 0
    remote_written_bytes: int = 0
    idle_at_eviction_s: dict[str, Histogram] = field(default_factory=dict)

    def count_idle(self, gone: Removed) -> None:
        """Counts the idle times of removed entries."""
        for reason, at in gone.by_reason().items():
            self.idle_at_eviction_s.setdefault(reason, Histogram()).count_all(gone.idle_s[at])

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for status."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["idle_at_eviction_s"] = {reason: each.as_dict() for reason, each in self.idle_at_eviction_s.items()}
        return {n: dict(v) if isinstance(v, Counter) else v for n, v in values.items()}
