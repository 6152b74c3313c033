"""What the tests of the connector share: what is awaited of an engine that is reduced to its steps."""

from __future__ import annotations

from typing import Any

from tests.daemon_process import until

from ..conftest import fresh
from ..step_bench import Steps, request, right

NOTHING_HELD = {"requests": 0, "inputs": 0, "leases": 0, "claims": 0, "steps": 0}


def settled(engine: Steps, asked: Any) -> None:
    """Returns when the connector lets the request be scheduled; nothing is scheduled yet."""
    until(lambda: engine.connector.ensure_cache_available(asked, 0), "an answer")


def nothing_left(engine: Steps) -> None:
    until(lambda: engine.step() is not None and engine.held == NOTHING_HELD, f"nothing to be held: {engine.held}")


def encode(engine: Steps, *pictures: int) -> int:
    """Has the engine encode them, or a fresh one, and returns the first of them when all can have them."""
    pictures = pictures or (fresh(),)
    before = engine.counts.get("saves", 0)
    asked = request(*pictures)
    assert right([asked], engine.run(asked), engine.dtype)
    until(lambda: engine.step() is not None and engine.counts.get("saves", 0) >= before + len(pictures), "saves")
    return pictures[0]


def finds(engine: Steps, *pictures: Any) -> bool:
    """Has the engine answer a request with these pictures, and rightly. Whether it found all of them, instead of
    encoding them."""
    before = list(engine.encoded)
    asked = request(*pictures)
    assert right([asked], engine.run(asked), engine.dtype)
    return engine.encoded == before


def counted(engine: Steps, name: str) -> float:
    engine.step()
    return engine.counts.get(name, 0)


def connected(engine: Steps) -> bool:
    assert engine.connector._scheduler is not None
    return engine.connector._scheduler._background.connected
