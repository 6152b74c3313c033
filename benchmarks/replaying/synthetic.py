"""Synthetic workloads, each of which tests one property of a policy: streams of objects, in the form of `traces`.

All objects have one size, and a ring holds RING of them. Each workload marks its counted requests: for a promise, the
requests for objects that were put; after a disturbance, the next RING requests. "steady" has no disturbance.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final

import numpy as np

from replaying.traces import SEED, Request, Restart, Step, Trace

RING: Final = 1000
PICTURES: Final = 27
ENTRY_BYTES: Final = 64 << 10
PAUSE_S: Final = 0.1
NIGHT_S: Final = 8 * 3600.0
FASTER: Final = 1000.0

Asked = Iterator[tuple[float, int, bool] | None]
"""Seconds since the last request, the object, and whether the request is counted; None is a restart."""
Workload = Callable[[random.Random], Asked]


def fresh_in_full(chance: random.Random) -> Asked:
    """Puts two rings without a read, then a quarter of a ring. Counts whether the quarter is cached."""
    fresh = range(2 * RING, 2 * RING + RING // 4)
    for number in range(fresh.stop):
        yield PAUSE_S, number, False
    for number in fresh:
        yield PAUSE_S, number, True


def fresh_beside_use(chance: random.Random) -> Asked:
    """A set in use that nearly fills the ring, and puts without a read. Counts whether a last tenth is cached."""
    popular = _zipf(chance, RING * 19 // 20)
    for number in range(40 * RING):
        yield PAUSE_S, popular(), False
        if not number % 20:
            yield PAUSE_S, 2 * RING + number, False
    fresh = range(50 * RING, 50 * RING + RING // 10)
    for number in fresh:
        yield PAUSE_S, number, False
        yield PAUSE_S, popular(), False
    for number in fresh:
        yield PAUSE_S, number, True


def once_after(share: float) -> Workload:
    """Puts two rings without a read; then reads each new object once, that share of a ring later."""

    def asked(chance: random.Random) -> Asked:
        behind = int(share * RING)
        for number in range(4 * RING):
            yield PAUSE_S, number, False
            if number >= 2 * RING + behind:
                yield PAUSE_S, number - behind, True

    return asked


def loop(chance: random.Random) -> Asked:
    """1.1 rings, over and over."""
    many = RING * 11 // 10
    for number in range(20 * many):
        yield PAUSE_S, number % many, number >= 10 * many


def one_hit_wonders(chance: random.Random) -> Asked:
    """Seven of ten requests ask for an object that is never asked for again; the others are counted."""
    popular = _zipf(chance, 2 * RING)
    for number in range(40 * RING):
        if chance.random() < 0.7:
            yield PAUSE_S, 2 * RING + number, False
        else:
            yield PAUSE_S, popular(), number >= 20 * RING


def churn(chance: random.Random) -> Asked:
    """Every twentieth request replaces one of the objects in use by another."""
    popular = _zipf(chance, 4 * RING)
    names = list(range(4 * RING))
    for number in range(40 * RING):
        if chance.random() < 0.05:
            names[chance.randrange(len(names))] = 4 * RING + number
        yield PAUSE_S, names[popular()], number >= 20 * RING


def in_use(
    *, night: bool = False, before: float = 1.0, after: float = 1.0, changed: int = 0, restart: bool = False
) -> Workload:
    """A set in use. After 16 rings of requests comes a night, a faster rate (a factor), or a restart.

    `changed`: so many requests before that, all objects in use are replaced.
    """

    def asked(chance: random.Random) -> Asked:
        popular = _zipf(chance, 2 * RING)
        for number in range(17 * RING):
            counted = number >= 16 * RING
            pause_s = PAUSE_S / (after if counted else before)
            other = changed and number >= 16 * RING - changed
            if restart and number == 16 * RING:
                yield None
            yield NIGHT_S if night and number == 16 * RING else pause_s, popular() + 2 * RING * other, counted

    return asked


def new_pictures(many: int) -> Workload:
    """Two engines share a ring of PICTURES. After 600 requests of a set that fills it, both see `many` new pictures.

    Each new picture is asked for five times by each engine; its first request has to miss.
    """

    def asked(chance: random.Random) -> Asked:
        for _ in range(600):
            yield PAUSE_S, chance.randrange(PICTURES), False
        for _ in range(5):
            for number in range(many):
                for _engine in range(2):
                    yield PAUSE_S, PICTURES + number, True

    return asked


WORKLOADS: Final[dict[str, Workload]] = {
    "fresh-in-full": fresh_in_full,
    "fresh-beside-use": fresh_beside_use,
    "once-after-5": once_after(0.05),
    "once-after-10": once_after(0.10),
    "once-after-25": once_after(0.25),
    "loop": loop,
    "one-hit-wonders": one_hit_wonders,
    "churn": churn,
    "steady": in_use(),
    "night": in_use(night=True),
    "faster": in_use(after=FASTER),
    "slower": in_use(before=FASTER),
    "restart": in_use(restart=True),
    "new-pictures-10": new_pictures(10),
    "new-pictures-20": new_pictures(20),
    "new-pictures-26": new_pictures(26),
    "another-set": in_use(changed=4 * RING),
}


def made(name: str) -> Trace:
    """The workload of that name; it never changes."""
    numbers: dict[int, int] = {}
    events: list[Request | Step | Restart] = []
    at = 0.0
    for asked in WORKLOADS[name](random.Random(SEED)):
        if asked is None:
            events.append(Restart(at))
            continue
        pause_s, which, counted = asked
        at += pause_s
        number = numbers.setdefault(which, len(numbers))
        events.append(Request(at, "", np.array([number], np.int64), counted))
    return Trace(name, "object", events, [ENTRY_BYTES] * len(numbers), [0] * len(numbers))


def share(trace: Trace) -> float:
    """The size of a cache that holds RING objects, or PICTURES, as a share of all objects."""
    many = PICTURES if trace.name.startswith("new-pictures") else RING
    return many * ENTRY_BYTES / trace.total_bytes


def _zipf(chance: random.Random, many: int, skew: float = 0.9) -> Callable[[], int]:
    """Draws from `many` objects; the n-th has a frequency of 1 / n ** skew."""
    sums = list(accumulate(1 / (number + 1) ** skew for number in range(many)))
    return lambda: bisect_left(sums, chance.random() * sums[-1])
