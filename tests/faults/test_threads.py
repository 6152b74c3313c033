"""One client, many threads: every get is right under eviction, every pin is released, however its view ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from random import Random
from typing import Any

import pytest

from tensord.errors import StoreFull

from ..daemon_process import MIB, PATIENCE_S, Daemon
from .payloads import is_payload, key, payload

RING_BYTES = 4 * MIB
NUMBERS = 200  # of entries: several times what the ring holds
SIZES = [8 << 10, 40 << 10, 96 << 10]


@pytest.fixture
def small() -> Iterator[Daemon]:
    with Daemon(ring_bytes=RING_BYTES) as running:
        yield running.start()


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def test_gets_are_right_while_other_threads_put_and_release(small: Daemon) -> None:
    client, shared, hits = small.client(), list[tuple[int, Any]](), count()

    def writes(random: Random) -> None:
        for _ in range(400):
            number = random.randrange(NUMBERS)
            put = client.put(key(number), payload(number, size_of(number)), timeout_s=PATIENCE_S)
            # What is pinned and on its way may fill the ring for a moment; then it says so.
            assert put.state in ("sent", "stored", "existed") or isinstance(put.error, StoreFull), put

    def reads(random: Random) -> None:
        """Drops some of what it got, and passes others on to the thread that releases."""
        held: list[tuple[int, Any]] = []
        for _ in range(1500):
            number = random.randrange(NUMBERS)
            lease = client.get(key(number))
            if lease is not None:
                assert is_payload(lease.tree, number)
                next(hits)
                held.append((number, lease.tree))
            if len(held) > 8:
                known, view = held.pop(random.randrange(len(held)))
                assert is_payload(view, known)
                if len(shared) < 20:
                    shared.append((known, view))

    def releases(random: Random) -> None:
        for _ in range(1500):
            if len(shared) > 10:
                known, view = shared.pop(random.randrange(10))
                assert is_payload(view, known)

    def batches(random: Random) -> None:
        for _ in range(60):
            numbers = random.sample(range(NUMBERS), 20)
            with client.get_many([key(number) for number in numbers]) as batch:
                for number, lease in zip(numbers, batch, strict=True):
                    assert lease is None or is_payload(lease.tree, number)

    writes(Random(77))
    acts = [writes, writes, reads, reads, reads, releases, batches]
    with ThreadPoolExecutor(len(acts)) as pool:
        for done in [pool.submit(act, Random(seed)) for seed, act in enumerate(acts)]:
            done.result(2 * PATIENCE_S)
    assert next(hits) > 100
    assert small.store("evictions")["capacity"] > 100
    shared.clear()
    gc.collect()
    small.until(lambda s: not s["pins"], "every pin to be released")
    assert small.store("found_corrupt") == 0
