"""One client, many threads: every get is right under eviction, every pin is released, however its view ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

import tensord
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


def together(*acts: Callable[[], object]) -> None:
    """Runs each in a thread, and raises what any of them raised."""
    failed: list[BaseException] = []

    def run(act: Callable[[], object]) -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S * 2)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


class Crowd:
    """Threads that put, get, check, hold and pass on, over entries that keep being evicted."""

    def __init__(self, client: tensord.Client) -> None:
        self.client = client
        self.hits = 0
        self.shared: list[tuple[int, Any]] = []

    def writes(self, seed: int) -> None:
        random = Random(seed)
        for _ in range(400):
            number = random.randrange(NUMBERS)
            put = self.client.put(key(number), payload(number, size_of(number)), timeout_s=PATIENCE_S)
            # What is pinned and on its way may fill the ring for a moment; then it says so.
            assert put.state in ("sent", "stored", "existed") or isinstance(put.error, StoreFull), put

    def reads(self, seed: int) -> None:
        random = Random(seed)
        held: list[tuple[int, Any]] = []
        for _ in range(1500):
            number = random.randrange(NUMBERS)
            lease = self.client.get(key(number))
            if lease is not None:
                assert is_payload(lease.tree, number)
                self.hits += 1
                held.append((number, lease.tree))
            if len(held) > 8:
                known, view = held.pop(random.randrange(len(held)))
                assert is_payload(view, known)
                if len(self.shared) < 20:
                    self.shared.append((known, view))

    def releases(self, seed: int) -> None:
        """Drops what the readers held, in another thread than they got it in."""
        random = Random(seed)
        for _ in range(1500):
            if len(self.shared) > 10:
                known, view = self.shared.pop(random.randrange(10))
                assert is_payload(view, known)

    def batches(self, seed: int) -> None:
        random = Random(seed)
        for _ in range(60):
            numbers = random.sample(range(NUMBERS), 20)
            with self.client.get_many([key(number) for number in numbers]) as batch:
                for number, lease in zip(numbers, batch, strict=True):
                    assert lease is None or is_payload(lease.tree, number)


def test_gets_are_right_while_other_threads_put_and_release(small: Daemon) -> None:
    crowd = Crowd(small.client())
    crowd.writes(77)
    acts = [crowd.writes, crowd.writes, crowd.reads, crowd.reads, crowd.reads, crowd.releases, crowd.batches]
    together(*(lambda act=act, seed=seed: act(seed) for seed, act in enumerate(acts)))
    assert crowd.hits > 100
    assert small.store("evictions")["capacity"] > 100
    crowd.shared.clear()
    gc.collect()
    small.until(lambda s: not s["pins"], "every pin to be released")
    assert small.store("found_corrupt") == 0
