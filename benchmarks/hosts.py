"""Replays recorded traces over several hosts with a shared store behind them: which share of the bytes is computed.

    python benchmarks/hosts.py --traces DIR

Each request goes to a host at random, as behind a load balancer that knows nothing of caches. A block is served by the
host's own ring, else read from the store, else computed, and then stored in both. Rings and store evict the least
recently used. The rings of all hosts together have RINGS_SHARE of the bytes of all blocks, whatever the number of
hosts, so that the table shows what dividing the load costs. Nothing is timed.
"""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness import table
from replaying.traces import SOURCES, Trace, load

HOSTS: Final = (1, 3, 10, 30, 100)
STORES: Final = (0.0, 0.1, 0.4, 1.0)
"""Sizes of the store, as shares of the bytes of all blocks."""
RINGS_SHARE: Final = 0.1
TRACES: Final = ("conversation", "web-images", "adaptsize")
SEED: Final = 1


class Lru:
    """The blocks of one cache, with at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def get(self, block: int) -> bool:
        """Whether the block is there. Counts as a use."""
        if block not in self._sizes:
            return False
        self._sizes.move_to_end(block)
        return True

    def put(self, block: int, size_bytes: int) -> None:
        """Stores a block that is not there. One that is larger than the cache is not stored."""
        if size_bytes > self._limit_bytes:
            return
        self._sizes[block] = size_bytes
        self._bytes += size_bytes
        while self._bytes > self._limit_bytes:
            self._bytes -= self._sizes.popitem(last=False)[1]


@dataclass(slots=True)
class Served:
    """Bytes by where they came from."""

    ring: int = 0
    store: int = 0
    computed: int = 0

    def share(self, size_bytes: int) -> str:
        return f"{100 * size_bytes / max(self.ring + self.store + self.computed, 1):.1f} %"


def replayed(trace: Trace, hosts: int, store_share: float) -> Served:
    """The counted bytes of a trace over so many hosts."""
    chance = random.Random(SEED)
    rings = [Lru(trace.share_bytes(RINGS_SHARE / hosts)) for _ in range(hosts)]
    store, served = Lru(trace.share_bytes(store_share)), Served()
    for request in trace.requests():
        ring = rings[chance.randrange(hosts)]
        missing = False
        for block in request.blocks.tolist():
            size_bytes = trace.sizes[block]
            # A block of a sequence is of use only after the one before it.
            in_ring = ring.get(block) and not missing
            in_store = store.get(block) and not missing
            if in_ring:
                served.ring += size_bytes * request.counted
                continue
            if in_store:
                served.store += size_bytes * request.counted
            else:
                served.computed += size_bytes * request.counted
                missing = trace.kind == "prefix"
                if not store.get(block):
                    store.put(block, size_bytes)
            if not ring.get(block):
                ring.put(block, size_bytes)
    return served


def main() -> None:
    """Prints a table for each trace that the folder has."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="the folder of the traces")
    asked = parser.parse_args()
    sources = [source for source in SOURCES if source.name in TRACES]
    try:
        found = [trace for source in sources if (trace := load(source, asked.traces)) is not None]
    except ValueError as error:
        parser.error(str(error))
    if not found:
        parser.error(f"{asked.traces} has none of the traces")
    for trace in found:
        heads = [f"{trace.name}: computed", *(f"{hosts} hosts" for hosts in HOSTS), "from the store, 10 hosts"]
        lines = []
        for share in STORES:
            each = [replayed(trace, hosts, share) for hosts in HOSTS]
            ten = each[HOSTS.index(10)]
            name = f"store of {share:.0%}" if share else "no store"
            lines.append([name, *(served.share(served.computed) for served in each), ten.share(ten.store)])
        print(f"{table(heads, lines)}\n")


if __name__ == "__main__":
    main()
