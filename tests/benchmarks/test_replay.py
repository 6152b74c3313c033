"""What a replay counts, of traces so small that every figure can be reckoned by hand."""

from __future__ import annotations

import json
from random import Random

import pytest
from replaying import policies, traces
from replaying.traces import Trace

pytest.importorskip("libcachesim")

BLOCK = 512


def chats(*requests: list[int], first_s: float = 0.0) -> bytes:
    """A file of the conversations' format, a request a second."""
    lines = [
        {"timestamp": (first_s + at) * 1e3, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for at, ids in enumerate(requests)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def conversation(*requests: list[int], warm: int = 0) -> Trace:
    """A trace of sequences, whose first `warm` requests are not counted."""
    lines = chats(*requests).splitlines()
    return traces.mooncake("conversation", lines[:warm], lines[warm:])


def prefix_hits(name: str, trace: Trace, blocks: int, policy: str = "lru") -> int:
    return int(policies.replay(name, trace, blocks * BLOCK, policy).prefix_hits)


# Two sequences that share a beginning, in a cache of three blocks: what each policy has of the last request.
SHARED = ([0, 1, 2], [0, 3], [0, 1, 2])
# 0 is used three times, then others pass by.
POPULAR = ([0], [0], [0], [1], [2], [3], [0])


@pytest.mark.parametrize(
    ("name", "requests", "blocks", "hits"),
    [
        # 3 takes the place of 2, the end of what was used before: then 0 and 1 are there.
        ("tensord-ideal", SHARED, 3, 1 + 2),
        # The store keeps no place ahead that is a third of the ring.
        ("tensord", SHARED, 3, 1 + 2),
        ("tensord+steps", SHARED, 3, 1 + 2),
        # The ends of sequences are told first, so a flat policy forgets 2 as well.
        ("lru", SHARED, 3, 1 + 2),
        ("arc", SHARED, 3, 1 + 2),
        # 3 is not needed again: it is not taken in.
        ("belady", SHARED, 3, 1 + 3),
        ("tensord", POPULAR, 2, 2),
        ("lru", POPULAR, 2, 2),
        ("gdsf", POPULAR, 2, 2 + 1),
        # Its small queue, a tenth, has to hold one.
        ("s3-fifo", POPULAR, 11, 2 + 1),
        ("belady", POPULAR, 1, 2 + 1),
    ],
)
def test_hits_are_those_reckoned_by_hand(name: str, requests: tuple[list[int], ...], blocks: int, hits: int) -> None:
    assert prefix_hits(name, conversation(*requests), blocks) == hits


def test_the_store_keeps_nearly_what_an_ideal_cache_keeps_where_nothing_fragments() -> None:
    chance = Random(5)
    requests: list[list[int]] = [[]]
    for _ in range(400):
        # Trees: a prefix of a former request goes on with blocks of its own.
        former = chance.choice(requests[-12:])
        kept = former[: chance.randrange(len(former) + 1)]
        own = max((block for request in requests for block in request), default=0) + 1
        requests.append([*kept, *range(own, own + chance.randrange(4))])
    trace = conversation(*requests[1:])
    real, ideal, lru = (policies.replay(name, trace, 20 * BLOCK, "lru") for name in ("tensord", "tensord-ideal", "lru"))
    assert ideal == lru
    # One place in twenty is free ahead.
    assert 0.95 * ideal.prefix_hits < real.prefix_hits <= ideal.prefix_hits < ideal.blocks
