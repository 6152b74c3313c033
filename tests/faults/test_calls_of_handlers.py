"""Signal handlers that close the client or fork, at each instruction of a put that they interrupt: nothing hangs, and
what the put was doing stays whole. And clients that are collected instead of closed while a handler raises.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

import tensord
from tensord.testing.fake_card import FakeCard
from tensord.testing.fake_vram import FakeVram

from ..daemon_process import PATIENCE_S, Daemon, until
from ..interruptions import interrupt
from ..processes import Child, Stage
from .payloads import key, payload

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
POINTS_MAX: Final = 5000
SMALL = payload(1, 4096)
LARGE = payload(1, 3 << 20)
SLOW_S: Final = 20.0
"""More than a call of these takes on any machine, less than the time limits that a hang would end at: PATIENCE_S."""
CLOSE_S: Final = 0.5
"""A client's timeout: as long as `close` waits for a thread that a lock of the interrupted put keeps."""
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


def during(number: int, put: Callable[[], tensord.Put], handler: Callable[[], object]) -> tuple[str, tensord.Put]:
    """`put()`, with a signal at its `number`-th point: where that was, and the put."""
    puts: list[tensord.Put] = []
    place = interrupt(number, lambda: puts.append(put()), WITHIN, times=1, handler=handler)
    return place, puts[0]


def closes_within(stage: Stage, path: Path, size: str) -> Any:
    tree, slow = {"small": SMALL, "large": LARGE}[size], []
    for number in range(POINTS_MAX):
        client = tensord.Client(path, timeout_s=CLOSE_S)
        assert client.wait_connected(PATIENCE_S)
        client.put(key(0), tree, timeout_s=PATIENCE_S)
        began = time.monotonic()
        place, put = during(number, partial(client.put, key(1), tree, timeout_s=PATIENCE_S), client.close)
        if time.monotonic() - began > SLOW_S:
            slow.append(place)
        assert put.wait(PATIENCE_S).state != "sent"
        if not place:
            client.close()
            break
        assert client.link.closed
    gc.collect()
    until(lambda: not counts()[0], "threads to end")
    return number, slow


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


def forks_within(stage: Stage, path: Path, size: str) -> Any:
    tree = {"small": SMALL, "large": LARGE}[size]
    client = tensord.Client(path, timeout_s=PATIENCE_S)
    assert client.wait_connected(PATIENCE_S)
    assert client.put(key(0), SMALL, wait=True).state == "stored"

    def handler() -> None:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)

    for number in range(0, POINTS_MAX, 3):
        lease = client.get(key(0))
        assert lease is not None
        place, put = during(number, partial(client.put, key(1 + number), tree), handler)
        # A put that loses its connection, as one may after a fork, has fewer points.
        if not place and put.wait(PATIENCE_S).state == "stored":
            break
        until(lambda: client.get(key(0)) is not None, "the client to be attached")
        del lease
    until(lambda: not client.link.puts.waiting, "the puts to be over")
    return number // 3


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_handler_may_close_the_client_at_any_point_of_a_put(daemon: Daemon, size: str) -> None:
    with Child(closes_within, daemon.socket, size) as child:
        number, slow = child.hear(4 * PATIENCE_S)
    assert number > 50
    assert not slow


@pytest.mark.parametrize("size", ["small", "large"])
def test_once_a_client_is_connected_again_after_an_exception_a_put_is_stored(daemon: Daemon, size: str) -> None:
    with Child(puts_after_exceptions, daemon.socket, size) as child:
        number, ends = child.hear(4 * PATIENCE_S)
    assert number > 50
    assert {(connected, state) for connected, _, state in ends} == {(True, "stored")}


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_handler_may_fork_at_any_point_of_a_put_while_views_are_held(daemon: Daemon, size: str) -> None:
    with Child(forks_within, daemon.socket, size) as child:
        assert child.hear(4 * PATIENCE_S) > 20


def counts() -> tuple[int, int]:
    links = sum(thread.name == "tensord-link" for thread in threading.enumerate())
    return links, len(os.listdir("/proc/self/fd"))


def collected(stage: Stage, path: Path) -> Any:
    def drop() -> None:
        del clients[:]

    clients = [tensord.Client(path, timeout_s=PATIENCE_S)]
    clients[0].put(key(0), SMALL, wait=True)
    drop()
    gc.collect()
    until(lambda: not counts()[0], "the first client to be gone")
    before = counts()
    for number in range(POINTS_MAX):
        clients.append(tensord.Client(path, timeout_s=PATIENCE_S))
        clients[0].put(key(0), SMALL, wait=True)
        place = interrupt(number, drop)
        drop()
        if not place:
            break
    gc.collect()
    until(lambda: not counts()[0], "all threads to be gone")
    return number, before, counts()


def caches_collected(stage: Stage, path: Path, folder: Path) -> Any:
    client = tensord.Client(path, timeout_s=PATIENCE_S)
    caches: list[tensord.DeviceCache] = []

    def drop() -> None:
        del caches[:]

    with FakeCard(folder / "card", "fake0", 1 << 20) as card:
        for number in range(POINTS_MAX):
            caches.append(tensord.DeviceCache(client, FakeVram(card), uses_every_s=0.05))
            place = interrupt(number, drop)
            drop()
            until(lambda: not devices(), f"the thread to end: {place}")
            if not place:
                break
    return number


def devices() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tensord-device")]


def test_a_device_cache_that_is_collected_while_a_handler_raises_leaves_no_thread(daemon: Daemon) -> None:
    with Child(caches_collected, daemon.socket, daemon.folder) as child:
        assert child.hear(4 * PATIENCE_S) > 5


def test_a_client_that_is_collected_while_a_handler_raises_leaves_nothing(daemon: Daemon) -> None:
    with Child(collected, daemon.socket) as child:
        number, before, after = child.hear()
    assert number > 5
    assert after == before
    daemon.until(lambda status: not status["clients"] and not status["lanes"], "the daemon to see them gone")
