"""Every call of the storage that is under way, crossed with every disturbance.

1. the call is under way: in a thread, which stands where the disturbance finds it
2. the disturbance
3. the call returns within its bound, and what it says is true, byte by byte
4. the daemon serves: pages are stored and found again, and nothing of the call is left pinned
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tensord.client.sglang import exchange
from tensord.client.sglang.pages import copy_into

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from .rank import Rank
from .test_faults import bound_s, damage


class Call:
    """One call of a rank in a thread. The pages are stored before, unless it `stores` them."""

    stores = False

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.hashes, self.indices = rank.filled()
        self.expected = [rank.page(self.indices, number) for number in range(3)]
        if not self.stores:
            assert rank.storage.batch_set_v1(self.hashes, self.indices) == [True] * 3
        self.answer: Any = None
        self.raised: BaseException | None = None
        self.took_s = self.resumed_at = 0.0
        self.room = rank.filled()[1]
        self.before = [rank.page(self.room, number) for number in range(3)]

    def call(self) -> Any:
        raise NotImplementedError

    @contextmanager
    def under_way(self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        raise NotImplementedError

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.answer = self.call()
        except BaseException as error:
            self.raised = error
        # The time that the test lets it stand is not the storage's.
        self.took_s = max(self.took_s, time.monotonic() - max(began, self.resumed_at))

    @contextmanager
    def in_thread(self, go_on: Callable[[], object] = lambda: None) -> Iterator[None]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            go_on()
            thread.join(PATIENCE_S)
        assert not thread.is_alive()

    def true(self) -> None:
        """Asserts that what the call says is so."""


class Set(Call):
    """Three pages on their way: the daemon was stopped before it read the first."""

    stores = True

    def call(self) -> Any:
        return self.rank.storage.batch_set_v1(self.hashes, self.indices)

    @contextmanager
    def under_way(self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        daemon.pause()
        puts = self.rank.storage._exchange.client.link.puts
        with self.in_thread():
            until(lambda: puts.waiting or self.answer is not None, "a put to be in flight")
            yield

    def true(self) -> None:
        assert isinstance(self.answer, list)
        assert len(self.answer) == 3


class Get(Call):
    """A page on its way into the host pool: pinned, and its first byte not copied."""

    def call(self) -> Any:
        return self.rank.storage.batch_get_v1(self.hashes, self.room)

    @contextmanager
    def under_way(self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        reached, go_on = threading.Event(), threading.Event()

        def stands(*arguments: Any) -> bool:
            reached.set()
            assert go_on.wait(PATIENCE_S)
            return copy_into(*arguments)

        def resume() -> None:
            self.resumed_at = time.monotonic()
            go_on.set()

        monkeypatch.setattr(exchange, "copy_into", stands)
        with self.in_thread(resume):
            assert reached.wait(PATIENCE_S)
            yield

    def true(self) -> None:
        for number, done in enumerate(self.answer):
            assert self.rank.page(self.room, number) == (self.expected if done else self.before)[number]


class Exists(Call):
    """A lookup again and again, before, during and after the disturbance."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self.end, self.begun = threading.Event(), threading.Event()
        self.answers: set[int] = set()

    def run(self) -> None:
        while not self.end.is_set() and self.raised is None:
            super().run()
            self.answers.add(self.answer)
            self.begun.set()

    @contextmanager
    def under_way(self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with self.in_thread(self.end.set):
            assert self.begun.wait(PATIENCE_S)
            yield

    def call(self) -> Any:
        return self.rank.storage.batch_exists(self.hashes)

    def true(self) -> None:
        assert self.answers <= {0, 1, 2, 3}


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
    if not isinstance(call, Set):
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
@pytest.mark.parametrize("state", [Set, Get, Exists])
def test_a_call_that_is_disturbed_returns_soon_and_says_what_is_so(
    own_daemon: Daemon, state: type[Call], disturb: Disturb, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(own_daemon.socket)
    call = state(rank)
    with call.under_way(own_daemon, monkeypatch):
        disturb(call, own_daemon)
    own_daemon.resume()
    assert call.raised is None
    assert call.took_s < bound_s()
    call.true()
    # The daemon serves again. A page of the call is there and right, or not there.
    until(lambda: rank.storage.batch_set_v1(call.hashes, call.indices) == [True] * 3, "the pages to be stored")
    assert rank.storage.batch_exists(call.hashes) == 3
    got = rank.storage.batch_get_v1(call.hashes, call.room)
    assert all(rank.page(call.room, number) == call.expected[number] for number, done in enumerate(got) if done)
    if disturb is damaged:
        assert rank.storage.batch_set_v1(call.hashes, call.indices) == [True] * 3
        got = rank.storage.batch_get_v1(call.hashes, call.room)
    assert got == [True] * 3
    own_daemon.until(lambda status: status["pins"] == 0, "pins to end")
    assert own_daemon.store("found_corrupt") == 0
