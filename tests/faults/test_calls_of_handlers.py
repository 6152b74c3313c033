"""Signal handlers that call the client, at each instruction of a put that they interrupt: nothing hangs, and what the
put was doing stays whole. And clients that are collected instead of closed while a handler raises.
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
from tensord.client.core import nested
from tensord.testing.fake_card import FakeCard
from tensord.testing.fake_vram import FakeVram

from ..daemon_process import PATIENCE_S, Daemon, until
from ..interruptions import interrupt
from ..processes import Child, Stage
from .payloads import is_payload, key, payload

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
POINTS_MAX: Final = 5000
SMALL = payload(1, 4096)
LARGE = payload(1, 3 << 20)
SLOW_S: Final = 20.0
"""More than a call of these takes on any machine, less than the time limits that a hang would end at: PATIENCE_S."""
WITHIN: Final = ("blocking.py", "puts.py", "in_flight.py", "inbox.py", "inboxes.py", "aside.py", "waiting.py")


def during(number: int, put: Callable[[], tensord.Put], handler: Callable[[], object]) -> tuple[str, tensord.Put]:
    """`put()`, with a signal at its `number`-th point: where that was, and the put."""
    puts: list[tensord.Put] = []
    place = interrupt(number, lambda: puts.append(put()), WITHIN, times=1, handler=handler)
    return place, puts[0]


def closes_within(stage: Stage, path: Path, size: str) -> Any:
    tree, slow = {"small": SMALL, "large": LARGE}[size], []
    for number in range(POINTS_MAX):
        client = tensord.Client(path, timeout_s=PATIENCE_S)
        assert client.wait_connected(PATIENCE_S)
        client.put(key(0), tree)
        began = time.monotonic()
        place, put = during(number, partial(client.put, key(1), tree), client.close)
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


def puts_within(stage: Stage, path: Path, size: str) -> Any:
    tree = {"small": SMALL, "large": LARGE}[size]
    states: set[tuple[str, str]] = set()
    client = tensord.Client(path, timeout_s=PATIENCE_S)
    assert client.wait_connected(PATIENCE_S)
    for number in range(POINTS_MAX):
        inner: list[tensord.Put] = []

        def handler() -> None:
            inner.append(client.put(key(2 * number + 1), SMALL))  # noqa: B023
            inner.extend(client.put_many([(key(100_000 + number), SMALL)]))  # noqa: B023

        place, outer = during(number, partial(client.put, key(2 * number), tree), handler)
        assert outer.wait(PATIENCE_S).state == "stored", (place, outer)
        states.update((put.wait(PATIENCE_S).state, type(put.error).__name__) for put in inner)
        lease = client.get(key(2 * number))
        assert lease is not None and is_payload(lease.tree, 1), place
        client.evict(key(2 * number))
        if not place:
            break
    until(lambda: not client.link.puts.in_flight and not client.link.puts.inboxes.used_bytes, "regions to be free")
    return number, sorted(states)


def calls_within(stage: Stage, path: Path, size: str) -> Any:
    """All calls of a handler at points of a put: those that took long, and what they ended with within the put."""
    tree = {"small": SMALL, "large": LARGE}[size]
    client = tensord.Client(path, timeout_s=PATIENCE_S)
    assert client.wait_connected(PATIENCE_S)
    assert client.put(key(1), SMALL, wait=True).state == "stored"
    namespace = tensord.Namespace(model="m", revision="r", dtype="float32", processor="p")
    kept: list[Any] = [tensord.PrefixCache(client, namespace), None]
    graph = tensord.AgentStepGraph([tensord.AgentStep("planner")])
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: client.get(key(1)),
        "touch": lambda: client.touch(key(1)),
        "evict": lambda: client.evict(key(2)),
        "clear": lambda: client.clear(namespace),
        "invalidate": lambda: client.invalidate(namespace),
        "pin": lambda: client.pin(key(1), 1.0),
        "unpin": lambda: client.unpin(key(1)),
        "reserve": lambda: client.reserve(tensord.Spec((64,), "uint64")).abandon(),
        "claim": lambda: client.claim(key(3)).abandon(),
        "compute": lambda: client.get_or_compute(key(4), lambda: SMALL),
        "reserve_device": lambda: client.reserve_device("card0", 1),
        "workflow": lambda: client.workflow("ticket", graph).end(),
        "modes": client.modes,
        "on_mode": lambda: client.on_mode(lambda _: None).close(),
        "declare_baseline": lambda: client.declare_baseline("card0", 1),
        "match": lambda: kept[0].match([1, 2, 3]),
        "wait_connected": lambda: client.wait_connected(),
    }
    slow: list[tuple[str, str]] = []
    ends: dict[str, set[str]] = {name: set() for name in calls}
    for number in range(0, POINTS_MAX, 3):
        took: dict[str, float] = {}
        kept[1] = client.reserve(tensord.Spec((64,), "uint64"))

        def handler() -> None:
            within = nested.within(client.link.puts)
            if within:
                assert kept[1].commit(key(5)).state == "refused"
            for name, call in calls.items():
                began = time.monotonic()
                try:
                    call()
                    end = ""
                except tensord.TensordError as error:
                    end = type(error).__name__
                if within:
                    ends[name].add(end)
                took[name] = time.monotonic() - began  # noqa: B023

        place, outer = during(number, partial(client.put, key(10 + number), tree), handler)
        slow.extend((name, place) for name, seconds in took.items() if seconds > SLOW_S)
        assert outer.wait(PATIENCE_S).state == "stored", (place, outer)
        assert kept[1].commit(key(5), wait=True).state in ("stored", "existed")
        client.evict(key(10 + number), key(5))
        if not place:
            break
    # They keep regions.
    calls.clear()
    kept.clear()
    until(lambda: not client.link.answers.pending, "all answers")
    until(lambda: not client.link.puts.in_flight and not client.link.puts.inboxes.used_bytes, "regions to be free")
    assert not client.link.claims.held
    return number // 3, slow, ends


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
    until(lambda: not client.link.puts.in_flight, "the puts to be over")
    return number // 3


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_handler_may_close_the_client_at_any_point_of_a_put(daemon: Daemon, size: str) -> None:
    with Child(closes_within, daemon.socket, size) as child:
        number, slow = child.hear(4 * PATIENCE_S)
    assert number > 50
    assert not slow


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_put_of_a_handler_within_a_put_is_refused_and_harms_no_other(daemon: Daemon, size: str) -> None:
    with Child(puts_within, daemon.socket, size) as child:
        number, states = child.hear(4 * PATIENCE_S)
    assert number > 50
    assert ("refused", "LimitReached") in states
    assert {state for state, _ in states} <= {"refused", "stored", "existed"}


WAITED_FOR: Final = {"touch", "evict", "clear", "invalidate", "pin", "unpin", "reserve"} | {
    "reserve_device",
    "workflow",
    "declare_baseline",
}
"""Calls that wait for an answer of the daemon."""


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_handler_within_a_put_is_refused_at_once_what_it_would_have_to_wait_for(daemon: Daemon, size: str) -> None:
    with Child(calls_within, daemon.socket, size) as child:
        number, slow, ends = child.hear(4 * PATIENCE_S)
    assert number > 15
    assert not slow
    # The answer for "modes" may be there from an "on_mode" before.
    ends.pop("modes")
    assert {name for name, how in ends.items() if how == {"LimitReached"}} == WAITED_FOR
    assert {name for name, how in ends.items() if how == {""}} == set(ends) - WAITED_FOR


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
