"""Other policies on the same traces: those of libcachesim, and an optimum that knows the future.

Does not own: the store's own policies (ideal.py, real.py).

libcachesim's policies know no sequences. They receive a request's blocks children first, so that they evict the end of
a sequence first. In the other order LRU evicts the beginning of a sequence, and the rest becomes unreachable.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Final

from replaying.counts import Counts
from replaying.traces import Trace

Replay = Callable[[Trace, int], Counts]
"""Replays a trace through a cache of so many bytes."""

_HASH_POWER: Final = 18
"""The exponent of libcachesim's initial hash table: 2 ** this entries. The default takes 128 MB."""


def missing() -> str | None:
    """The reason why libcachesim cannot be used here; None if it can."""
    try:
        import libcachesim  # noqa: F401
    except ImportError as error:
        return f"{error}: pip install 'tensord[bench]'"
    return None


def libcachesim(name: str) -> Replay:
    """A policy of libcachesim, by the name of its class."""

    def replay(trace: Trace, capacity_bytes: int) -> Counts:
        import libcachesim as library

        # The C cache beneath the Python class: one call less for each of millions of requests.
        cache = getattr(library, name)(capacity_bytes, hashpower=_HASH_POWER)._cache
        return _flat(trace, cache, library.Request(obj_id=1, obj_size=1), capacity_bytes)

    return replay


def _flat(trace: Trace, cache: Any, asked: Any, capacity_bytes: int) -> Counts:
    counts, sizes = Counts(), trace.sizes
    find, get = cache.find, cache.get
    equal = len(set(sizes)) == 1
    asked.obj_size = sizes[0] if sizes else 1
    for request in trace.requests():
        blocks: list[int] = request.blocks.tolist()
        if request.counted:
            there = []
            for block in blocks:
                asked.obj_id = block + 1
                there.append(find(asked, False) is not None)
            prefix = there.index(False) if False in there else len(there)
            beyond = [block for block, found in zip(blocks[prefix:], there[prefix:], strict=True) if found]
            counts.count(trace, request, blocks, prefix, beyond)
        for block in reversed(blocks):
            asked.obj_id = block + 1
            if not equal:
                if sizes[block] > capacity_bytes:
                    continue  # libcachesim prints a warning for each such request
                asked.obj_size = sizes[block]
            get(asked)
    return counts


def belady(trace: Trace, capacity_bytes: int) -> Counts:
    """Belady: evicts the block that is needed last, or rejects a new block that is needed later than all cached ones.

    The end of a sequence goes first. With blocks of equal size this is optimal, for sequences too: no block is needed
    before its parent.
    """
    counts, sizes = Counts(), trace.sizes
    requests = list(trace.requests())
    never = len(requests)
    coming = [never] * len(sizes)
    after: list[list[int]] = []
    for number in range(never - 1, -1, -1):
        blocks = requests[number].blocks.tolist()
        after.append([coming[block] for block in blocks])
        for block in blocks:
            coming[block] = number
    after.reverse()
    # The cached blocks with the time of their next use, as one number: the last needed and deepest block is the least.
    needed: dict[int, int] = {}
    order: list[int] = []
    free_bytes = capacity_bytes
    for request, uses in zip(requests, after, strict=True):
        blocks = request.blocks.tolist()
        prefix = next((place for place, block in enumerate(blocks) if block not in needed), len(blocks))
        counts.count(trace, request, blocks, prefix, [block for block in blocks[prefix:] if block in needed])
        for depth, (block, use) in enumerate(zip(blocks, uses, strict=True)):
            if block not in needed:
                free_bytes -= sizes[block]
            needed[block] = place = -(((use << _DEPTH_BITS) + depth) << _BLOCK_BITS) - block
            heappush(order, place)
        while free_bytes < 0:
            place = heappop(order)
            block = -place & ((1 << _BLOCK_BITS) - 1)
            if needed.get(block) == place:
                del needed[block]
                free_bytes += sizes[block]
        if len(order) > 4 * len(needed) + 10_000:
            order = list(needed.values())
            heapify(order)
    return counts


_DEPTH_BITS: Final = 16
_BLOCK_BITS: Final = 32

PEERS: Final[dict[str, Replay]] = {
    "lru": libcachesim("LRU"),
    "s3-fifo": libcachesim("S3FIFO"),
    "arc": libcachesim("ARC"),
    "gdsf": libcachesim("GDSF"),
    "belady": belady,
}
