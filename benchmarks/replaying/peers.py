"""Other policies on the same traces: libcachesim's, and an optimum that knows what comes.

Does not own: the store's own policies (ideal.py, real.py).

libcachesim's know nothing of sequences. They are told of a request's blocks last piece first, so that what they drop of
it first is its end: the other way round a least recently used block is a beginning, and what follows it worthless.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Final

from replaying.counts import Counts
from replaying.traces import Trace

Replay = Callable[[Trace, int], Counts]
"""What a cache of so many bytes makes of a trace."""

_HASH_POWER: Final = 18
"""libcachesim's table of objects begins with 2 ** this places; its default takes 128 MB."""


def missing() -> str | None:
    """Why libcachesim cannot be used here; None if it can."""
    try:
        import libcachesim  # noqa: F401
    except ImportError as error:
        return f"{error}: pip install 'tensord[bench]'"
    return None


def libcachesim(name: str) -> Replay:
    """One of libcachesim's policies, by its class there."""

    def replay(trace: Trace, capacity_bytes: int) -> Counts:
        import libcachesim as library

        # Beneath the class of Python stands the cache itself; a call less for each of millions.
        more = {"window_size": _window(trace, capacity_bytes)} if name == "WTinyLFU" else {}
        cache = getattr(library, name)(capacity_bytes, hashpower=_HASH_POWER, **more)._cache
        return _flat(trace, cache, library.Request(obj_id=1, obj_size=1), capacity_bytes)

    return replay


def _window(trace: Trace, capacity_bytes: int) -> float:
    """The share of W-TinyLFU's window: 1 %, as is usual, or a block's where all are equal and it would hold none."""
    block_bytes = 1.1 * trace.sizes[0] if len(set(trace.sizes)) == 1 else 0.0
    return min(max(0.01, block_bytes / max(capacity_bytes, 1)), 0.5)


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
                    continue  # it would say so each time
                asked.obj_size = sizes[block]
            get(asked)
    return counts


def belady(trace: Trace, capacity_bytes: int) -> Counts:
    """Whatever is needed last goes first, and is not taken in where that is itself. Of a sequence the end goes first.

    For blocks of equal size it is the optimum, of sequences too: no block is needed before its predecessor.
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
    # What is there, with when it is needed next; as one number, the last needed and deepest is least.
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
    "lfu": libcachesim("LFU"),
    "s3-fifo": libcachesim("S3FIFO"),
    "arc": libcachesim("ARC"),
    "gdsf": libcachesim("GDSF"),
    "sieve": libcachesim("Sieve"),
    "w-tinylfu": libcachesim("WTinyLFU"),
    "belady": belady,
}
