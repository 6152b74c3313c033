"""What a cancelled task leaves behind."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tensord

from ...daemon_process import PATIENCE_S


def test_a_reservation_that_a_cancelled_task_would_have_got_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on, released = threading.Event(), threading.Event(), threading.Event()

    def reserve(*_: Any, **__: Any) -> Any:
        asked.set()
        go_on.wait(PATIENCE_S)
        return SimpleNamespace(release=released.set)

    async def cancelled(client: tensord.AsyncClient) -> None:
        task = asyncio.create_task(client.reserve_device("card", 1))
        await asyncio.to_thread(asked.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    client = tensord.AsyncClient(tmp_path / "none.sock", timeout_s=0.2)
    monkeypatch.setattr(client.client, "reserve_device", reserve)
    asyncio.run(cancelled(client))
    assert released.wait(PATIENCE_S)
    client.client.close()
