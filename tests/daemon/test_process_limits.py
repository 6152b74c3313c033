"""Work that a daemon can do without, where the process can start no thread for it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tensord.daemon.memory import learned
from tensord.daemon.memory.scrub import Scrub


def no_thread_more(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def checks() -> None:
    slot = SimpleNamespace(published=True, unverified=True)
    memory: Any = SimpleNamespace(
        recovered=True, index=SimpleNamespace(slots=lambda: [slot]), summed=lambda slot: (True, 1)
    )
    tell: Any = None
    scrub = Scrub(memory, tell, lambda: 0.0)
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
    ("work", "says"),
    [
        (checks, "cannot check entries"),
        (saves, "cannot save the policy's learned state"),
    ],
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
