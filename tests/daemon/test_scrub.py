"""What the scrub says of payloads, and what it looks at."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tensord.daemon.memory.scrub import BUSY_SHARE, Scrub, Scrubbed


class Memory:
    """Slots that are published or not, verified or not; the sum of each is its number."""

    recovered = True

    def __init__(self, *slots: tuple[bool, bool]) -> None:
        self._slots = [
            SimpleNamespace(number=number, span_id=100 + number, published=published, unverified=unverified)
            for number, (published, unverified) in enumerate(slots)
        ]
        self.index = SimpleNamespace(slots=lambda: list(self._slots), read=self._slots.__getitem__)

    def summed(self, slot: Any) -> tuple[bool, int]:
        return slot.number != 3, slot.number


async def _looks_at(recovered: bool, added: list[int], looked_at: list[int]) -> None:
    memory: Any = Memory((True, False), (True, True), (False, True), (True, True))
    memory.recovered = recovered
    told: list[Scrubbed] = []

    async def tell(message: Scrubbed) -> None:
        told.append(message)
        if len(told) == len(looked_at):
            done.set()

    done = asyncio.Event()
    scrub = Scrub(memory, tell, lambda: 0.0)
    scrub.add(added)
    scrub.begin()
    running = asyncio.create_task(scrub.run())
    await done.wait()
    running.cancel()
    assert told == [Scrubbed(n, 100 + n, n != 3, n) for n in looked_at]


@pytest.mark.parametrize(
    ("recovered", "added", "looked_at"),
    [(True, [], [1, 3]), (False, [0, 2], [0]), (True, [0], [1, 3, 0])],
)
def test_it_looks_at_recovered_entries_and_then_at_those_without_a_checksum(
    recovered: bool, added: list[int], looked_at: list[int]
) -> None:
    asyncio.run(_looks_at(recovered, added, looked_at))


LOOK_S = 0.002


async def _looks_while_puts_come() -> tuple[int, float]:
    memory: Any = Memory(*[(True, False)] * 100)
    memory.recovered = False
    looks = 0

    def summed(slot: Any) -> tuple[bool, int]:
        nonlocal looks
        looks += 1
        time.sleep(LOOK_S)
        return True, slot.number

    async def tell(message: Scrubbed) -> None:
        pass

    memory.summed = summed
    scrub = Scrub(memory, tell, time.monotonic)
    begun = time.monotonic()
    running = asyncio.create_task(scrub.run())
    for number in range(100):
        scrub.add([number])
        await asyncio.sleep(LOOK_S)
    running.cancel()
    return looks, time.monotonic() - begun


def test_while_puts_come_it_takes_a_small_part_of_the_time() -> None:
    looks, took_s = asyncio.run(_looks_while_puts_come())
    assert 0 < looks <= took_s / (BUSY_SHARE * LOOK_S) + 2
