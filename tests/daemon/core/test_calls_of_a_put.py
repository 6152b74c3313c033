"""What a put costs the daemon, in calls of Python and C. A count is the same on every machine; a time is not."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any

import pytest

from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import span_bytes

from .stand import Stand, key

PAYLOAD = 64 << 10
CONTENT = bytes(PAYLOAD)
BATCH = 64
RING = 1 << 29
CALLS_MAX = 60


def counted(function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    """Counts the calls of Python and C while the function runs."""

    def count(frame: FrameType, event: str, what: Any) -> None:
        if event in ("call", "c_call"):
            calls[frame.f_code.co_qualname if event == "call" else what.__qualname__] += 1

    def wrapped(*args: Any) -> Any:
        sys.setprofile(count)
        try:
            return function(*args)
        finally:
            sys.setprofile(None)

    return wrapped


def put(stand: Stand, numbers: count[int], batches: int) -> None:
    """Puts so many batches, each into places that were asked for in one message. No payload is written: that is the
    client's work."""
    for _ in range(batches):
        while len(stand.places[1]) < BATCH:
            before = len(stand.places[1])
            sizes = [span_bytes(PAYLOAD)] * (BATCH - before)
            stand.send(1, messages.AskForGrants(stand.next_request(), sizes))
            stand.settle()
            assert len(stand.places[1]) > before
        records = []
        for place in stand.places[1][:BATCH]:
            place.view.content = CONTENT
            records.append(stand.record(1, place, key(next(numbers)), tree=64, tokens=10, cost_ms=5.0))
        stand.now += 0.001
        stand.submit(1, *records)
        stand.answers[1].clear()
        stand.told.clear()
    assert not stand.refused[1]


@pytest.mark.parametrize("policy", ["hazard", "lru"])
def test_a_put_costs_the_daemon_few_calls_with_the_ring_full(policy: str) -> None:
    stand, numbers, calls = Stand(RING, policy=policy, max_entries=60_000), count(1), Counter[str]()
    stand.join(1, 2)
    store = stand.store
    store.parts.outbox.is_watched = lambda: False
    put(stand, numbers, RING // span_bytes(PAYLOAD) // BATCH + 20)
    evicted = store.counters.evictions["capacity"]
    assert evicted, "the ring is full"
    store.handle = counted(store.handle, calls)  # type: ignore[method-assign]
    store.submitted = counted(store.submitted, calls)  # type: ignore[method-assign]
    batches = 40
    put(stand, numbers, batches)
    a_put = calls.total() / batches / BATCH
    assert store.counters.evictions["capacity"] - evicted >= (batches - 10) * BATCH, "room is included"
    dearest = [f"{number / batches / BATCH:.2f} {name}" for name, number in calls.most_common(30)]
    assert a_put <= CALLS_MAX, dearest
