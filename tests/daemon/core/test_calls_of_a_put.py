"""What a put costs the daemon, in calls of Python and C. A count is the same on every machine; a time is not."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
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


class Calls:
    """Counts calls while functions run that are wrapped by `counted`."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            sys.setprofile(self._count)
            try:
                return function(*args)
            finally:
                sys.setprofile(None)

        return wrapped

    def _count(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            self.of[f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            self.of[getattr(what, "__qualname__", str(what))] += 1


class BackToBack:
    """One client that puts payloads of 64 KB without a pause. No payload is written: that is the client's work."""

    def __init__(self, policy: str) -> None:
        self.stand = Stand(RING, policy=policy, max_entries=60_000)
        self.stand.join(1, 2)
        self.puts = 0

    def put(self, batches: int) -> None:
        """Puts so many batches, each into places that were asked for in one message."""
        stand, size = self.stand, span_bytes(PAYLOAD)
        stored = stand.store.parts.commits.stored
        for _ in range(batches):
            while len(stand.places[1]) < BATCH:
                before = len(stand.places[1])
                stand.send(1, messages.AskForGrants(stand.next_request(), [size] * (BATCH - before)))
                stand.settle()
                assert len(stand.places[1]) > before
            records = []
            for place in stand.places[1][:BATCH]:
                self.puts += 1
                place.view.content = CONTENT
                records.append(stand.record(1, place, key(self.puts), tree=64, tokens=10, cost_ms=5.0))
            stand.now += 0.001
            stand.submit(1, *records)
            stand.answers[1].clear()
            stand.told.clear()
        assert stand.store.parts.commits.stored == stored + batches * BATCH


@pytest.mark.parametrize("policy", ["hazard", "lru"])
def test_a_put_costs_the_daemon_few_calls_with_the_ring_full(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    clients, calls = BackToBack(policy), Calls()
    store = clients.stand.store
    store.parts.outbox.is_watched = lambda: False
    clients.put(RING // span_bytes(PAYLOAD) // BATCH + 20)
    evicted = store.counters.evictions["capacity"]
    assert evicted, "the ring is full"
    store.handle = calls.counted(store.handle)  # type: ignore[method-assign]
    store.submitted = calls.counted(store.submitted)  # type: ignore[method-assign]
    batches = 40
    clients.put(batches)
    a_put = calls.of.total() / batches / BATCH
    with capsys.disabled():
        print(f" {policy}: {a_put:.1f} calls a put", end=" ")
    assert store.counters.evictions["capacity"] - evicted >= (batches - 10) * BATCH, "room is included"
    dearest = [f"{count / batches / BATCH:.2f} {name}" for name, count in calls.of.most_common(30)]
    assert a_put <= CALLS_MAX, dearest
