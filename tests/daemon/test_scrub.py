"""What the scrub says of payloads, and what it looks at; work that a daemon without threads to spare leaves out."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tensord.daemon.memory import learned
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


@pytest.mark.parametrize(
    ("recovered", "added", "looked_at"), [(True, [], [1, 3]), (False, [0, 2], [0]), (True, [0], [1, 3, 0])]
)
async def test_it_looks_at_recovered_entries_and_then_at_those_without_a_checksum(
    recovered: bool, added: list[int], looked_at: list[int]
) -> None:
    memory: Any = Memory((True, False), (True, True), (False, True), (True, True))
    memory.recovered = recovered
    told: list[Scrubbed] = []

    def tell(message: Scrubbed) -> None:
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


LOOK_S = 0.002


async def test_while_puts_come_it_takes_a_small_part_of_the_time() -> None:
    memory: Any = Memory(*[(True, False)] * 100)
    memory.recovered = False
    looks = 0

    def summed(slot: Any) -> tuple[bool, int]:
        nonlocal looks
        looks += 1
        time.sleep(LOOK_S)
        return True, slot.number

    memory.summed = summed
    scrub = Scrub(memory, lambda scrubbed: None, time.monotonic)
    begun, puts = time.monotonic(), 0
    running = asyncio.create_task(scrub.run())
    while puts < 100 or not looks:  # on a busy machine the first look comes late
        scrub.add([puts % 100])
        puts += 1
        await asyncio.sleep(LOOK_S)
    running.cancel()
    assert looks <= (time.monotonic() - begun) / (BUSY_SHARE * LOOK_S) + 2


def no_thread_more(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def checks() -> None:
    memory: Any = Memory((True, True))
    scrub = Scrub(memory, lambda scrubbed: None, lambda: 0.0)
    scrub.begin()
    await scrub.run()


async def saves() -> None:
    turns = 0

    def parts() -> list[bytes]:
        nonlocal turns
        turns += 1
        if turns == 2:
            raise asyncio.CancelledError
        return []

    memory: Any = None
    policy: Any = SimpleNamespace(learned=parts, name="lru")
    with pytest.raises(asyncio.CancelledError):
        await learned.keep_saving(memory, policy)


@pytest.mark.parametrize(
    ("work", "says"), [(checks, "cannot check entries"), (saves, "cannot save the policy's learned state")]
)
def test_work_for_which_no_thread_is_left_is_logged_and_left_out(
    work: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(threading.Thread, "start", no_thread_more)

    async def run() -> None:
        await work()
        # Ending the loop starts a thread if there is an executor.
        monkeypatch.undo()

    with capture_logs() as lines:
        asyncio.run(run())
    assert [(line["event"].partition(";")[0], line["why"]) for line in lines] == [(says, "can't start new thread")]
