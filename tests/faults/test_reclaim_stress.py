"""Readers in processes of their own, a ring that is overwritten all the time, and every byte they see checked.

The reader runs client/reading/view.py as it stands. tests/client/reading/test_view.py holds it between the reading of a
slot and its pin.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from mmap import mmap
from typing import Any, Final

import numpy as np

from tensord.client.reading.lease import Lease
from tensord.client.reading.view import View

from ..daemon_process import PATIENCE_S
from ..memory_bench import MemoryBench, key

RING_BYTES: Final = 8 << 20
KEYS: Final = 400
HELD: Final = 20
READERS: Final = 3
LAPS: Final = 60
SECONDS_MAX: Final = 4 * PATIENCE_S
"""How long a slow machine may take for LAPS."""
LAPS_AT, STOP_AT = 0, 1
"""Of the words that all processes see: how often the ring was overwritten, and whether to stop."""
FORK: Final = multiprocessing.get_context("fork")


# ---- the writer


def payload(number: int, generation: int) -> np.ndarray[Any, Any]:
    """f(key, generation): 8 to 100 KiB of one word that names both."""
    words = 1024 + (number * 7919 + generation * 104_729) % 12_000
    return np.full(words, number << 32 | generation, np.uint64)


def overwrite(bench: MemoryBench, shared: memoryview, going_on: Callable[[], bool]) -> None:
    """Evicts, moves and writes, at random, for as long as anybody reads."""
    chance = random.Random(1)
    stored: list[int] = []
    written_bytes = generation = 0
    while going_on():
        for _ in range(min(8, len(stored))):
            at = chance.randrange(len(stored))
            stored[at], stored[-1] = stored[-1], stored[at]
            bench.evict(key(stored.pop()))
        bench.reclaim()
        for number in chance.sample(stored, min(4, len(stored))):
            bench.move(key(number))
        for _ in range(16):
            number = chance.randrange(KEYS)
            if number in stored:
                continue
            generation += 1
            slot = bench.write(key(number), payload(number, generation))
            if slot is None:
                break
            bench.slots.publish(slot.number)
            stored.append(number)
            written_bytes += slot.payload_bytes
        shared[LAPS_AT] = written_bytes // RING_BYTES


# ---- readers


def is_right(number: int, tree: Any) -> bool:
    """Whether this is some generation of key `number`, whole."""
    return bool(tree.size >= 1024 and tree[0] >> np.uint64(32) == number and (tree == tree[0]).all())


def read_at_random(view: View, shared: memoryview, seed: int) -> Counter[str]:
    """Takes leases by every way, holds some, and checks each when it is taken and again before it goes."""
    chance = random.Random(seed)
    held: deque[tuple[int, Any]] = deque()
    counted: Counter[str] = Counter()
    while not shared[STOP_AT] and shared[LAPS_AT] < LAPS:
        numbers = [chance.randrange(KEYS) for _ in range(6)]
        leases: list[tuple[int, Lease | None]] = [(number, view.get(key(number))) for number in numbers[:4]]
        leases.append((numbers[4], view.verified(key(numbers[4]))))
        together = np.frombuffer(b"".join(map(key, numbers)), np.uint8).reshape(-1, 32)
        leases += zip(numbers[4:], list(view.get_many(together))[4:], strict=True)
        for number, lease in leases:
            if lease is not None:
                counted["hits"] += 1
                tree = lease.tree
                counted["bad"] += not is_right(number, tree)
                held.append((number, tree))
        while len(held) > HELD:
            number, tree = held.popleft()
            counted["bad"] += not is_right(number, tree)
    counted["bad"] += sum(not is_right(number, tree) for number, tree in held)
    return counted


def begin(bench: MemoryBench, shared: memoryview, answers: Any, seed: int) -> Any:
    """A process that reads through a lane of its own. It inherits the memory, and puts what it counted into `answers`.

    Our mapping of its lane is closed, as the daemon closes its own."""
    lane = bench.lane()
    reader = FORK.Process(target=lambda: answers.put(read_at_random(bench.view(lane), shared, seed)))
    reader.start()
    return reader


def test_readers_of_a_ring_overwritten_all_the_time_see_nothing_wrong() -> None:
    shared = memoryview(mmap(-1, 4096)).cast("Q")
    deadline = time.monotonic() + SECONDS_MAX
    with MemoryBench(RING_BYTES, buckets=128) as bench:
        answers = [FORK.SimpleQueue() for _ in range(READERS)]
        readers = [begin(bench, shared, answer, seed) for seed, answer in enumerate(answers)]
        try:
            overwrite(
                bench, shared, lambda: time.monotonic() < deadline and any(reader.is_alive() for reader in readers)
            )
        finally:
            shared[STOP_AT] = 1
            for reader in readers:
                reader.join()
    assert [reader.exitcode for reader in readers] == [0] * READERS, "a reader failed"
    counted: Counter[str] = sum((answer.get() for answer in answers), Counter())
    assert counted["bad"] == 0, counted
    assert counted["hits"] > 500, counted
    assert shared[LAPS_AT] > 5, counted
