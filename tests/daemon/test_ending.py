"""The end of a daemon: it waits for what has arrived, and no longer than it may."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tensord.daemon import app


class Part:
    """Settled from the `looks`-th look on."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.deaf = False

    def stop_reading(self) -> None:
        self.deaf = True

    @property
    def settled(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_the_end_waits_for_the_store_and_every_session() -> None:
    sessions: list[Any] = [Part(0), Part(3)]
    store: Any = Part(2)
    asyncio.run(app.settle(sessions, store))
    assert all(session.deaf for session in sessions)
    assert store.looks < 0 and all(session.looks < 0 for session in sessions)


def test_the_end_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ENDING_S_MAX", 0.02)
    store: Any = Part(1 << 30)
    asyncio.run(app.settle([], store))
    assert store.looks > 0
