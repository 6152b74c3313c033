"""The goals of the store's policy, as distances to other policies in the same run. A goal is never asserted.

Owns: the goals, and the comparison of rows with each. Does not own: the replay.

An absolute goal holds for one part of the trace. On another part the goal is a share of the way from LRU to Belady.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from replaying.counts import Row

CHAT_LEAST: Final = {0.01: (10.5, 26.0), 0.05: (23.5, 16.0), 0.10: (30.5, 16.0)}
"""By size: prefix hits in percent on the judged part; percent of the way from LRU to Belady on other parts."""
AGENTS_OVER_LRU: Final = {0.0005: 7.0, 0.001: 7.0, 0.002: 2.0}
STEPS_WAY: Final = {0.0005: 45.0, 0.001: 45.0, 0.002: 30.0}
NO_LESS: Final = 0.3
MADE_UP: Final = {
    "fresh-in-full": 95.0,
    "fresh-beside-use": 95.0,
    "once-after-5": 100.0,
    "once-after-10": 100.0,
    "once-after-25": 90.0,
    "loop": 88.0,
    "one-hit-wonders": 75.0,
    "churn": 70.0,
    # At most 11, 22 and 29 of the ten requests for each new picture may miss.
    "new-pictures-10": 89.0,
    "new-pictures-20": 89.0,
    "new-pictures-26": 88.8,
}
"""Percent of objects that are cached (`synthetic`)."""
DISTURBED: Final = ("night", "faster", "slower", "restart", "another-set")
DISTURBED_MOST: Final = 2.0
OBJECTS: Final = ("web-images", "adaptsize")
FRAGMENTATION: Final = 1.5


@dataclass(frozen=True, slots=True)
class Goal:
    """`value` is at least `least`, in percent or points."""

    trace: str
    size: float
    what: str
    value: float
    least: float

    @property
    def reached(self) -> bool:
        return self.value >= self.least


def way(value: float, lru: float, belady: float) -> float:
    """Percent of the way from LRU to Belady; 100 if the two are equal."""
    return 100 * (value - lru) / (belady - lru) if belady > lru else 100.0


def goals(rows: Iterable[Row], *, judged: bool) -> list[Goal]:
    """Every goal that the rows can decide. `judged`: the counted part is the one of the absolute goals."""
    by = {(row.trace, row.size, row.policy): row for row in rows}
    found: list[Goal] = []
    for trace, size in dict.fromkeys((trace, size) for trace, size, _ in by):
        at = {policy: row for (t, s, policy), row in by.items() if (t, s) == (trace, size)}
        found += _goals(trace, size, at, judged)
    ours = {row.trace: row for row in by.values() if row.policy == "tensord"}
    for row in ours.values():
        if row.trace in DISTURBED and "steady" in ours:
            value = row.object_hit - ours["steady"].object_hit
            found.append(Goal(row.trace, row.size, "object hit − undisturbed", value, -DISTURBED_MOST))
    return found


def _goals(trace: str, size: float, at: dict[str, Row], judged: bool) -> Iterator[Goal]:
    ours, lru, belady = at.get("tensord"), at.get("lru"), at.get("belady")
    if ours is not None and lru is not None:
        if trace == "conversation" and size in CHAT_LEAST:
            hits, share = CHAT_LEAST[size]
            if judged:
                yield Goal(trace, size, "prefix hit", ours.prefix_hit, hits)
            elif belady is not None:
                value = way(ours.prefix_hit, lru.prefix_hit, belady.prefix_hit)
                yield Goal(trace, size, "of the way from LRU to Belady", value, share)
        elif trace == "conversation":
            yield Goal(trace, size, "prefix hit − LRU", ours.prefix_hit - lru.prefix_hit, -NO_LESS)
        if trace == "agents-16":
            least = AGENTS_OVER_LRU.get(size, -NO_LESS)
            yield Goal(trace, size, "prefix hit − LRU", ours.prefix_hit - lru.prefix_hit, least)
    steps = at.get("tensord+steps")
    if trace == "agents-16" and size in STEPS_WAY and steps and lru and belady:
        value = way(steps.prefix_hit, lru.prefix_hit, belady.prefix_hit)
        yield Goal(trace, size, "steps: of the way from LRU to Belady", value, STEPS_WAY[size])
    if trace == "synthetic" and ours and at.keys() >= {"lru", "arc", "gdsf"}:
        best = max(at[name].prefix_hit for name in ("lru", "arc", "gdsf"))
        yield Goal(trace, size, "prefix hit − best of LRU, ARC, GDSF", ours.prefix_hit - best, -0.5)
    if trace in MADE_UP and ours is not None:
        yield Goal(trace, size, "object hit", ours.object_hit, MADE_UP[trace])
    if trace in OBJECTS and ours:
        if "gdsf" in at:
            yield Goal(trace, size, "object hit − GDSF", ours.object_hit - at["gdsf"].object_hit, -1.0)
        if "s3-fifo" in at:
            yield Goal(trace, size, "byte hit − S3-FIFO", ours.byte_hit - at["s3-fifo"].byte_hit, -1.0)
    ideal = at.get("tensord-ideal")
    for name in ("tensord", "tensord-pinned"):
        real = at.get(name)
        if ideal is not None and real is not None:
            value = min(getattr(real, hit) - getattr(ideal, hit) for hit in ("object_hit", "byte_hit", "prefix_hit"))
            yield Goal(trace, size, f"{name} − ideal, worst ratio", value, -FRAGMENTATION)
