"""Compares `tensorctl advise` with an exact replay: estimated and exact hit ratios of rings of nine sizes.

    python benchmarks/curve.py --traces DIR

For each recorded trace and for three present sizes of the ring, the sample of reuse distances follows the requests as
in the daemon. An exact cache of each size, which evicts the least recently used entry, follows them too. Prints the
largest difference, the largest error that the estimate tells, and the time of a request. Exit status 1 if a difference
is above POINTS_MAX points.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from harness import table
from replaying.traces import SOURCES, Trace, load

from tensord.daemon.reports.distances import KEYS_MAX, ReuseDistances
from tensord.daemon.reports.hit_curve import MULTIPLES, HitCurve

POINTS_MAX: Final = 2.0
REQUESTS_MAX: Final = 300_000
"""Requests of one trace; the agents' traces have more."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A trace at one present size. Ratios are shares; `request_us` is processor time."""

    trace: str
    share: float
    factor: int
    difference: float
    told: float
    request_us: float


def main() -> int:
    """Compares all traces of a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="the folder of the traces")
    asked = parser.parse_args()
    found = []
    for source in SOURCES:
        try:
            trace = load(source, asked.traces)
        except ValueError as error:
            parser.error(str(error))
        if trace is not None:
            found += [compared(trace, share) for share in source.shares[::2] if trace.fits(share)]
    if not found:
        parser.error(f"{asked.traces} has none of the traces, or none that is large enough for a ring")
    print(
        table(
            ("trace", "share", "1 key of", "points off", "points told", "us"),
            [
                (
                    each.trace,
                    f"{each.share:.2%}",
                    str(each.factor),
                    f"{100 * each.difference:.2f}",
                    f"{100 * each.told:.2f}",
                    f"{each.request_us:.2f}",
                )
                for each in found
            ],
        )
    )
    return int(any(100 * each.difference > POINTS_MAX for each in found))


def compared(trace: Trace, share: float) -> Compared:
    """The estimates beside exact caches. `share`: the present size, as a share of all distinct blocks."""
    requests = list(islice((int(block) for request in trace.requests() for block in request.blocks), REQUESTS_MAX))
    capacity_bytes = trace.share_bytes(share)
    numbers = [
        int.from_bytes(hashlib.sha256(b"%d" % block).digest()[16:24], "little") for block in range(len(trace.sizes))
    ]
    distances, curve = ReuseDistances(KEYS_MAX), HitCurve()
    present = hits_of(requests, trace.sizes, capacity_bytes)
    began_s = time.process_time()
    for block, here in zip(requests, present, strict=True):
        curve.asked(1, here=here)
        distance_bytes = distances.asked(numbers[block], trace.sizes[block], capacity_bytes)
        if distance_bytes is not None:
            curve.sampled(bytes(8), numbers[block], distance_bytes, distances.factor, here=here)
    took_s = time.process_time() - began_s
    points = curve.as_dict(capacity_bytes, distances.factor)["curves"][0]["points"]
    exact = [sum(hits_of(requests, trace.sizes, int(size * capacity_bytes))) / len(requests) for size in MULTIPLES]
    return Compared(
        trace.name,
        share,
        distances.factor,
        max(abs(ratio - real) for (_, ratio, _), real in zip(points, exact, strict=True)),
        max(error for _, _, error in points),
        1e6 * took_s / len(requests),
    )


def hits_of(requests: Sequence[int], sizes: Sequence[int], capacity_bytes: int) -> list[bool]:
    """Whether each request is a hit in an exact cache that evicts the least recently used."""
    held: OrderedDict[int, int] = OrderedDict()
    held_bytes, hits = 0, []
    for block in requests:
        hits.append(block in held)
        if block in held:
            held.move_to_end(block)
            continue
        held[block] = sizes[block]
        held_bytes += sizes[block]
        while held_bytes > capacity_bytes:
            held_bytes -= held.popitem(last=False)[1]
    return hits


if __name__ == "__main__":
    sys.exit(main())
