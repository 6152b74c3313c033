"""Histograms of times, the store's counters since the daemon started, kept up to date so that status walks nothing, and
how long requests took.

Owns the counts, and the list of slow requests. Does not own the events that they count, when a request begins and ends
(the sessions), nor the clock. Invariants: counts only rise. An amount is counted in exactly one bucket of a histogram,
and in its sum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Final

import numpy as np

from .removal_history import REASONS, Array

BOUNDS_S: Final = (0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 6 * 3600.0, 86400.0, 7 * 86400.0)
"""Upper bounds of buckets in seconds. They include the idle times at which modes evict (30 s, 2 min, 10 min)."""
BOUNDS_REQUEST_S: Final = (*(digit * 10.0**power for power in range(-5, 1) for digit in (1, 2, 5)), 10.0)
"""Upper bounds of buckets: 10 µs to 10 s."""

SLOW_MAX: Final = 128
"""How many slow requests are kept; the oldest goes first."""


class Histogram:
    """Counts amounts by size. A bucket holds the amounts up to its bound; one more bucket holds those above the last
    bound."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS_S) -> None:
        assert all(low < high for low, high in pairwise(bounds)), "bounds must rise"
        self._bounds = bounds
        self._edges = np.array(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def count(self, amount: float) -> None:
        """Counts one amount; a negative one counts as 0."""
        amount = max(0.0, amount)
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def count_all(self, amounts: Array) -> None:
        amounts = np.maximum(amounts, 0.0)
        found = np.searchsorted(self._edges, amounts, "left")
        for bucket, many in enumerate(np.bincount(found, minlength=len(self._counts)).tolist()):
            self._counts[bucket] += many
        self._sum += float(amounts.sum())

    def as_dict(self) -> dict[str, Any]:
        """`counts` of each bucket, not cumulative, the last above every bound; `sum` of all amounts."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}


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

    def removed(self, gone: Array) -> None:
        for number in set(gone["reason"].tolist()):
            reason, idle_s = REASONS[number], gone["idle_s"][gone["reason"] == number]
            self.evictions[reason] += len(idle_s)
            self.idle_at_eviction_s.setdefault(reason, Histogram()).count_all(idle_s)
        self.evicted_bytes += int(gone["span_bytes"].sum())

    def as_dict(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["idle_at_eviction_s"] = {reason: each.as_dict() for reason, each in self.idle_at_eviction_s.items()}
        return {n: dict(v) if isinstance(v, Counter) else v for n, v in values.items()}


class RequestTimes:
    """The times of all requests of all clients. One that takes longer than `slow_s` is kept as a slow one."""

    def __init__(self, slow_s: float) -> None:
        self.slow_s = slow_s
        self._slow: deque[dict[str, Any]] = deque(maxlen=SLOW_MAX)
        self._by_kind: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(BOUNDS_REQUEST_S))
        self._lag = Histogram(BOUNDS_REQUEST_S)

    def took(self, kind: str, took_s: float, **about: Any) -> None:
        """Counts an answered request. `about`: what is told of a slow one besides."""
        self._by_kind[kind].count(took_s)
        if took_s > self.slow_s:
            self._slow.append({"kind": kind, "took_s": took_s, **about})

    def lagged(self, late_s: float) -> None:
        self._lag.count(late_s)

    def as_dict(self) -> dict[str, Any]:
        """`kinds`: a histogram in seconds for each kind; `event_loop_lag`: that of the loop; `slow`: the requests that
        took longer than `slow_s`, the latest first."""
        return {
            "kinds": {kind: histogram.as_dict() for kind, histogram in sorted(self._by_kind.items())},
            "event_loop_lag": self._lag.as_dict(),
            "slow_s": self.slow_s,
            "slow": list(reversed(self._slow)),
        }
