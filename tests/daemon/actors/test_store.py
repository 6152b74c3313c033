"""The store actor over a real core: whoever asks is answered between two slices of long work."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from tensord.daemon.actors.messages import Queried
from tensord.daemon.actors.store import StoreActor
from tensord.daemon.config.config import Config
from tensord.ipc.messages import control as messages

from ...daemon_process import PATIENCE_S
from ..core.stand import SPAN, Stand


def actor_of(stand: Stand) -> StoreActor:
    """An actor over the stand's core and index, without lanes."""
    nothing = np.empty(0, np.uint64)
    memory: Any = SimpleNamespace(
        ring=np.frombuffer(stand.bytes, np.uint8),
        index=SimpleNamespace(held=lambda: (nothing, nothing), span_ids=stand.index.span_ids),
        readers=[],
        lanes=[],
        fence_is_quick=True,
        fence=lambda: None,
        forget_abandoned=lambda: 0,
    )
    return StoreActor(stand.store, memory, Config.load([], {}), clock=lambda: stand.now, tell_watchers=lambda _: None)


def test_a_time_to_live_ends_although_messages_never_stop_coming() -> None:
    stand = Stand(SPAN * 8)
    stand.join(1)
    assert stand.put(0, ttl_s=1.0) == "stored"
    expires_at = stand.now + 1.0

    async def scene() -> None:
        actor = actor_of(stand)
        questions = messages.EntriesQuery(1, None, 1)
        serving = asyncio.create_task(actor.run())
        async with asyncio.timeout(PATIENCE_S):
            while stand.store.status()["entries"]:
                while len(actor.inbox) < 100:
                    actor.inbox.tell_now(Queried(questions, asyncio.get_running_loop().create_future()))
                stand.now += 0.01
                await asyncio.sleep(0)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(scene())
    assert expires_at <= stand.now < expires_at + 0.1
