"""A signal handler raises at each instruction of a put: once the client is connected again, a put is stored."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

import tensord

from ..daemon_process import PATIENCE_S, Daemon
from ..interruptions import interrupt
from ..processes import Child, Stage
from .payloads import key, payload

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
POINTS_MAX: Final = 5000
SMALL = payload(1, 4096)
LARGE = payload(1, 3 << 20)
WITHIN: Final = (
    "put.py",
    "puts.py",
    "arena.py",
    "memory.py",
    "outcomes.py",
    "records.py",
    "blocking.py",
    "aside.py",
    "waiting.py",
)


def puts_after_exceptions(stage: Stage, path: Path, size: str) -> Any:
    """Puts, cut short at each point by an exception. What the calls right after it ended with."""
    tree = {"small": SMALL, "large": LARGE}[size]
    client = tensord.Client(path, timeout_s=PATIENCE_S)
    assert client.wait_connected(PATIENCE_S)
    ends: set[tuple[bool, int, str]] = set()
    for number in range(POINTS_MAX):
        place = interrupt(number, partial(client.put, key(number), tree), WITHIN, times=1)
        if number % 2:
            client.touch(key(0))
        connected = client.wait_connected()
        ends.add((connected, number % 2, client.put(key(100_000 + number), SMALL, wait=True).state))
        client.evict(key(number), key(100_000 + number))
        if not place:
            break
    return number, sorted(ends)


@pytest.mark.parametrize("size", ["small", "large"])
def test_once_a_client_is_connected_again_after_an_exception_a_put_is_stored(daemon: Daemon, size: str) -> None:
    with Child(puts_after_exceptions, daemon.socket, size) as child:
        number, ends = child.hear(4 * PATIENCE_S)
    assert number > 50
    assert {(connected, state) for connected, _, state in ends} == {(True, "stored")}
