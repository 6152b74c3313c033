"""What the tests of the connector share: what is awaited of an engine that is reduced to its steps."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

from tensord.client.vllm.engine.background import CLIENTS
from tests.daemon_process import Daemon, until

from ..step_bench import Steps, request, right

_numbers = count(1000)


NOTHING_HELD = {"requests": 0, "inputs": 0, "leases": 0, "claims": 0, "steps": 0}


def fresh() -> int:
    """A picture that nobody asked for before."""
    return next(_numbers)


def settled(engine: Steps, asked: Any) -> None:
    """Returns when the connector lets the request be scheduled; nothing is scheduled yet."""
    until(lambda: engine.connector.ensure_cache_available(asked, 0), "an answer")


def nothing_left(engine: Steps) -> None:
    until(lambda: engine.step() is not None and engine.held == NOTHING_HELD, f"nothing to be held: {engine.held}")


def encode(engine: Steps, *pictures: int) -> None:
    """Has the engine encode them, and returns when all can have them."""
    before = engine.counts.get("saves", 0)
    asked = request(*pictures)
    assert right([asked], engine.run(asked))
    until(lambda: engine.step() is not None and engine.counts.get("saves", 0) >= before + len(pictures), "saves")


def counted(engine: Steps, name: str) -> float:
    engine.step()
    return engine.counts.get(name, 0)


def keys(daemon: Daemon) -> set[bytes]:
    from tensord.ipc.messages import control as messages

    rows = daemon.ask(partial(messages.EntriesQuery, count=1000))["entries"]
    return {bytes.fromhex(row["key"]) for row in rows}


def connected(engine: Steps) -> bool:
    assert engine.connector._scheduler is not None
    socket = engine.connector._scheduler._background._socket
    return CLIENTS._clients[socket][0].connected
