"""Readers in processes of their own, a ring that is overwritten all the time, and every byte they see checked.

What holds the ring's bytes under a view is the pin, published before the slot's seq is looked at again. Each of the
two is also switched off here, and must then be missed: else this test could not fail. Pauses make that certain: the
reader is held between reading the slot and publishing its pin, or with a lease in its hand, until the ring has been
overwritten twice.

The reader runs client/reading/view.py as it stands. Pauses and switches sit in the lane and the index that it is given,
whose parts are properties here.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from mmap import mmap
from typing import Any, Final

import numpy as np
import pytest

from tensord.client.reading.lease import Lease
from tensord.client.reading.view import View
from tensord.shm.index.index import IndexReader
from tensord.shm.lanes.lane import Lane
from tensord.shm.ring.layout import LANE_BYTES

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


class Shared:
    """Words that all processes see: how often the ring was overwritten, and whether to stop."""

    def __init__(self) -> None:
        self.words = memoryview(mmap(-1, 4096)).cast("Q")

    @property
    def stopping(self) -> bool:
        return bool(self.words[STOP_AT])

    def stop(self) -> None:
        self.words[STOP_AT] = 1

    def await_laps(self, laps: int) -> None:
        """Returns once the ring was overwritten so often from now on."""
        until = self.words[LAPS_AT] + laps + 1
        while self.words[LAPS_AT] < until and not self.stopping:
            os.sched_yield()


# ---- the writer


def payload(number: int, generation: int) -> np.ndarray[Any, Any]:
    """f(key, generation): 8 to 100 KiB of one word that names both."""
    words = 1024 + (number * 7919 + generation * 104_729) % 12_000
    return np.full(words, number << 32 | generation, np.uint64)


def overwrite(bench: MemoryBench, shared: Shared, going_on: Callable[[], bool]) -> None:
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
        shared.words[LAPS_AT] = written_bytes // RING_BYTES


# ---- readers


def is_right(number: int, tree: Any) -> bool:
    """Whether this is some generation of key `number`, whole."""
    return bool(tree.size >= 1024 and tree[0] >> np.uint64(32) == number and (tree == tree[0]).all())


class Agreed:
    """Words that are always as they were: the second look at seq, switched off."""

    def __getitem__(self, at: int) -> Any:
        return self

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class NeverLooksAgain(IndexReader):
    __slots__ = ()

    @property
    def words(self) -> Any:  # type: ignore[override]
        return Agreed()


class PausedLane(Lane):
    """A lane whose words are asked for between the reading of a slot and the publishing of the pin."""

    __slots__ = ("pause", "real_words")

    pause: Callable[[], object]
    real_words: memoryview

    @property
    def words(self) -> memoryview:  # type: ignore[override]
        self.pause()
        return self.real_words


def as_kind(kind: type[Any], made: Any) -> Any:
    """A copy of `made` as a subclass of its type, whose properties stand in for some of its parts."""
    copy = object.__new__(kind)
    for name in set(type(made).__slots__) - {"__weakref__"}:
        member = type(made).__dict__[name]
        member.__set__(copy, member.__get__(made))
    return copy


def read_at_random(view: View, shared: Shared, seed: int) -> Counter[str]:
    """Takes leases by every way, holds some, and checks each when it is taken and again before it goes."""
    chance = random.Random(seed)
    held: deque[tuple[int, Any]] = deque()
    counted: Counter[str] = Counter()
    while not shared.stopping and shared.words[LAPS_AT] < LAPS:
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


def read_with_pauses(
    view: View, shared: Shared, seed: int, *, pin: bool = True, look_again: bool = True
) -> Counter[str]:
    """Takes one lease at a time; the ring is overwritten between slot and pin, or, without pins, under the lease."""
    chance = random.Random(seed)
    counted: Counter[str] = Counter()
    lane = as_kind(PausedLane, view.lane)
    lane.real_words = Lane.__dict__["words"].__get__(view.lane)
    pauses = [0]

    def pause() -> None:
        if pauses[0]:
            pauses[0] -= 1
            shared.await_laps(2)

    lane.pause = pause
    if not pin:
        lane.real_words = memoryview(bytearray(LANE_BYTES)).cast("Q")
    if not look_again:
        view._index = as_kind(NeverLooksAgain, view._index)
    view.lane = lane
    # Without its protections a reader tries for as long as there is time: which of them is hit is chance.
    laps = LAPS if pin and look_again else sys.maxsize
    while not shared.stopping and shared.words[LAPS_AT] < laps and not counted["bad"]:
        number = chance.randrange(KEYS)
        if not view.contains(key(number)):
            continue
        pauses[0] = int(pin)
        try:
            lease = view.get(key(number))
            if lease is not None:
                counted["hits"] += 1
                if not pin:
                    shared.await_laps(2)
                counted["bad"] += not is_right(number, lease.tree)
        except Exception:
            # A header that is none any more is as wrong as wrong numbers.
            counted["bad"] += 1
    return counted


class Reader:
    """A process that reads through a lane of its own, and tells what it counted."""

    def __init__(self, bench: MemoryBench, work: Callable[[View], Counter[str]]) -> None:
        lane = bench.lane()
        told, tell = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                os.write(tell, json.dumps(work(bench.view(lane))).encode())
                code = 0
            finally:
                os._exit(code)
        # Our mapping of the child's lane: closed, as the daemon closes its own.
        del lane
        os.close(tell)
        self._told = told

    @property
    def done(self) -> bool:
        return bool(select.select([self._told], [], [], 0)[0])

    def counted(self) -> Counter[str]:
        with open(self._told) as told:
            text = told.read()
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0, "a reader failed"
        return Counter(json.loads(text))


def stress(
    work: Callable[[View, Shared, int], Counter[str]],
    seconds_max: float = SECONDS_MAX,
    over: Callable[[Iterable[bool]], bool] = all,
) -> Counter[str]:
    """What all readers counted together while the ring was overwritten, until those are done of whom `over` asks."""
    shared = Shared()
    deadline = time.monotonic() + seconds_max
    with MemoryBench(RING_BYTES, buckets=128) as bench:
        readers = [
            Reader(bench, lambda view, seed=seed: work(view, shared, seed))  # type: ignore[misc]
            for seed in range(READERS)
        ]
        try:
            overwrite(bench, shared, lambda: time.monotonic() < deadline and not over(r.done for r in readers))
        finally:
            shared.stop()
            total: Counter[str] = sum((reader.counted() for reader in readers), Counter())
    total["laps"] = shared.words[LAPS_AT]
    return total


def test_readers_of_a_ring_overwritten_all_the_time_see_nothing_wrong() -> None:
    counted = stress(read_at_random)
    assert counted["bad"] == 0, counted
    assert counted["hits"] > 500, counted
    assert counted["laps"] > 5, counted


def test_a_reader_held_between_slot_and_pin_sees_nothing_wrong() -> None:
    counted = stress(read_with_pauses)
    assert counted["bad"] == 0, counted
    assert counted["laps"] > 5, counted


@pytest.mark.parametrize("off", ["pin", "look_again"])
def test_without_the_pin_or_the_second_check_of_seq_wrong_bytes_are_seen(off: str) -> None:
    counted = stress(lambda view, shared, seed: read_with_pauses(view, shared, seed, **{off: False}), over=any)
    assert counted["bad"] > 0, counted
