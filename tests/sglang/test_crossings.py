"""Every call of the storage that is under way, crossed with every disturbance.

1. the call is under way: in a thread, which stands where the disturbance finds it
2. the disturbance
3. the call returns within its bound, and what it says is true, byte by byte
4. the daemon serves: pages are stored and found again, and nothing of the call is left pinned
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tensord.client.sglang import exchange
from tensord.client.sglang.exchange import copy_into

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from .rank import Rank
from .test_faults import bound_s, damage


class Call:
    """Three pages of a rank, and a call about them in a thread. `stored`: whether the pages are stored before."""

    answer: Any = None

    def __init__(self, rank: Rank, *, stored: bool) -> None:
        self.rank, self.stored = rank, stored
        self.hashes, self.indices = rank.stored() if stored else rank.filled()
        self.expected = rank.pages(self.indices)
        self.room = rank.filled()[1]
        self.before = rank.pages(self.room)

    @contextmanager
    def under_way(self, call: Callable[[], Any], go_on: Callable[[], object] = lambda: None) -> Iterator[Future[Any]]:
        """Runs a call while the block does. It returns soon after that, and raises nothing."""
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(call)
            try:
                yield future
            finally:
                go_on()
            self.answer = future.result(bound_s())


# ---- calls under way, and what they say afterwards


@contextmanager
def setting(rank: Rank, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """Three pages on their way: the daemon was stopped before it read the first."""
    call = Call(rank, stored=False)
    daemon.pause()
    puts = rank.storage._exchange.client.link.puts
    with call.under_way(lambda: rank.storage.batch_set_v1(call.hashes, call.indices)) as future:
        until(lambda: puts.waiting or future.done(), "a put to be in flight")
        yield call
    assert len(call.answer) == 3


@contextmanager
def getting(rank: Rank, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """A page on its way into the host pool: pinned, and its first byte not copied."""
    call = Call(rank, stored=True)
    reached, go_on = threading.Event(), threading.Event()

    def stands(*arguments: Any) -> bool:
        reached.set()
        assert go_on.wait(PATIENCE_S)
        return copy_into(*arguments)

    monkeypatch.setattr(exchange, "copy_into", stands)
    with call.under_way(lambda: rank.storage.batch_get_v1(call.hashes, call.room), go_on.set):
        assert reached.wait(PATIENCE_S)
        yield call
    pages = zip(call.answer, call.expected, call.before, strict=True)
    assert rank.pages(call.room) == [expected if done else before for done, expected, before in pages]


@contextmanager
def looking(rank: Rank, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """A lookup again and again, before, during and after the disturbance."""
    call = Call(rank, stored=True)
    end, begun = threading.Event(), threading.Event()

    def look() -> set[int]:
        answers = set()
        while not end.is_set():
            answers.add(rank.storage.batch_exists(call.hashes))
            begun.set()
        return answers

    with call.under_way(look, end.set):
        assert begun.wait(PATIENCE_S)
        yield call
    assert call.answer <= {0, 1, 2, 3}


# ---- disturbances


Disturb = Callable[[Call, Daemon], None]


def killed_and_restarted(call: Call, daemon: Daemon) -> None:
    daemon.kill()
    daemon.start()


def stopped(call: Call, daemon: Daemon) -> None:
    daemon.pause()
    # The call goes on meanwhile: the daemon is resumed when it has returned.


def filled(call: Call, daemon: Daemon) -> None:
    """Other clients overwrite the ring until none of the call's pages is left that nobody holds."""
    daemon.resume()
    client = daemon.client()
    for _ in range(24):
        key = os.urandom(32)
        client.put(key, np.zeros(MIB, np.uint8), wait=True)


def invalidated(call: Call, daemon: Daemon) -> None:
    daemon.resume()
    for namespace in list(call.rank.storage._namespaces.values()):
        daemon.client().invalidate(namespace)


def damaged(call: Call, daemon: Daemon) -> None:
    daemon.resume()
    if call.stored:
        # The second page: the first may be in the middle of being copied, which no checksum can follow.
        damage(daemon, call.expected[1])


def forked(call: Call, daemon: Daemon) -> None:
    child = os.fork()
    if not child:
        # The child gets what is stored, with a connection of its own, and leaves the parent's call alone.
        try:
            daemon.resume()
            found = call.rank.storage.batch_exists(call.hashes)
            os._exit(0 if found in (0, 3) else 1)
        except BaseException:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.fixture
def own_daemon() -> Iterator[Daemon]:
    with Daemon(ring_bytes=16 * MIB, gauges_host="none") as daemon:
        yield daemon.start()


@pytest.mark.parametrize("disturb", [killed_and_restarted, stopped, filled, invalidated, damaged, forked])
@pytest.mark.parametrize("under_way", [setting, getting, looking])
def test_a_call_that_is_disturbed_returns_soon_and_says_what_is_so(
    own_daemon: Daemon, under_way: Callable[..., Any], disturb: Disturb, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(own_daemon.socket)
    with under_way(rank, own_daemon, monkeypatch) as call:
        disturb(call, own_daemon)
    own_daemon.resume()
    # The daemon serves again. A page of the call is there and right, or not there.
    until(lambda: rank.storage.batch_set_v1(call.hashes, call.indices) == [True] * 3, "the pages to be stored")
    assert rank.storage.batch_exists(call.hashes) == 3
    got = rank.storage.batch_get_v1(call.hashes, call.room)
    pages = zip(got, rank.pages(call.room), call.expected, strict=True)
    assert all(page == expected for done, page, expected in pages if done)
    if disturb is damaged:
        assert rank.storage.batch_set_v1(call.hashes, call.indices) == [True] * 3
        got = rank.storage.batch_get_v1(call.hashes, call.room)
    assert got == [True] * 3
    own_daemon.until(lambda status: status["pins"] == 0, "pins to end")
    assert own_daemon.store("found_corrupt") == 0
