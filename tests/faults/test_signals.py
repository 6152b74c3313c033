"""Exceptions that signal handlers raise in the middle of calls (Ctrl-C, a time limit): the client is as good as new.
A put that is cut short may cost the connection; the client attaches again at once.

The exception is raised at any instruction of the calling thread at which the interpreter looks for signals, in the
library's code and the standard library's; and by real signals.
"""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tensord
from tensord import PrefixCache
from tensord.client.link import link
from tensord.client.reading import sweep
from tensord.testing.fake_vram import FakeCard, FakeVram

from ..client.prefix.sequences import BLOCK, normal
from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..interruptions import Signal, interrupt
from .payloads import is_payload, key, payload
from .test_prefix_faults import NAMESPACE, conversation

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
POINTS_MAX = 5000
STRIDE = 3
"""One point in so many is taken, others in each run."""
SMALL = payload(1, 4096)
LARGE = payload(2, 5 * MIB)
TOKENS = conversation(0)
LAYERS = normal(TOKENS, layers=1)
THERE = 999_999


class Stand:
    """A client, an entry that is there, and what a call may use."""

    def __init__(self, daemon: Daemon, vram: FakeVram) -> None:
        self.daemon = daemon
        self.client = daemon.client()
        assert self.client.wait_connected(PATIENCE_S)
        assert self.client.put(key(THERE), SMALL, wait=True).state == "stored"
        self.prefixes = PrefixCache(self.client, NAMESPACE, block_tokens=BLOCK)
        assert self.prefixes.put(TOKENS, LAYERS, wait=True, timeout_s=PATIENCE_S).state == "stored"
        self.held = tensord.DeviceCache(self.client, vram)
        self.tensor = vram.upload(SMALL)
        self._checked = 0

    def check(self, place: str) -> None:
        """The next put is stored in time and found; nothing is on its way."""
        self._checked += 1
        until(self.attached, f"the client to be attached: {place}")
        other = 10_000_000 + self._checked
        put = self.client.put(key(other), SMALL, wait=True, timeout_s=PATIENCE_S)
        assert put.state == "stored", (place, put)
        lease = self.client.get(key(other))
        assert lease is not None and is_payload(lease.tree, 1), place
        until(lambda: not self.client.link.puts.waiting, f"no put to be under way: {place}")

    def attached(self) -> bool:
        connection = self.client.link.connection
        return connection is not None and not connection.closed

    def check_end(self) -> None:
        """No claim is held, nothing is pinned and no place is lent; closing is no matter of waiting."""
        gc.collect()

        def swept() -> bool:
            sweep.sweep()
            status = self.daemon.status()
            store = status["store"]
            return not (status["pins"] or store["claims_held"] or store["claims_waiting"] or store["grants"])

        # A client gives half of its unused places back each time.
        with mock.patch.object(link, "_IDLE_S", 0.02):
            until(swept, "claims, pins and places to be gone")
        self.held.close()
        thread = self.client.link._thread
        self.client.close()
        assert thread is not None and not thread.is_alive()


@pytest.fixture
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    """The daemon has the test's `write_in_place`."""
    with (
        Daemon(write_in_place=getattr(request, "param", "owner")) as daemon,
        FakeCard(daemon.folder / "card", "fake0", 64 * MIB) as card,
    ):
        yield Stand(daemon.start(), FakeVram(card))


def reserve(stand: Stand, number: int) -> None:
    reservation = stand.client.reserve({"a": tensord.Spec((100,), "uint8")})
    reservation.tree["a"][:] = 7
    if number % 2:
        reservation.abandon()
    else:
        reservation.commit(key(number))


def match(stand: Stand, number: int) -> None:
    found = stand.prefixes.match(TOKENS, timeout_s=PATIENCE_S)
    if found is not None:
        found.release()


def store_prefix(stand: Stand, number: int) -> None:
    # Two blocks: each instruction of a put is another round.
    tokens = np.arange(2 * BLOCK, dtype=np.uint32) + 10_000 * number
    stand.prefixes.put(tokens, normal(tokens, layers=1), timeout_s=PATIENCE_S)


def on_device(stand: Stand, number: int) -> None:
    stand.held.put(key(number), stand.tensor)
    with stand.held.get(key(number)) or stand.client.get(key(THERE)):  # type: ignore[union-attr]
        pass
    stand.held.delete(key(number))


WAYS: dict[str, Callable[[Stand, int], object]] = {
    "put": lambda stand, number: stand.client.put(key(number), SMALL),
    "put and wait": lambda stand, number: stand.client.put(key(number), SMALL, wait=True),
    "large put": lambda stand, number: stand.client.put(key(number), LARGE, wait=True),
    "reserve": reserve,
    "get_or_compute": lambda stand, number: stand.client.get_or_compute(key(number), lambda: SMALL),
    "claim": lambda stand, number: stand.client.claim(key(number)).abandon(),
    "touch": lambda stand, number: stand.client.touch(key(THERE)),
    "evict": lambda stand, number: stand.client.evict(key(number)),
    "prefix put": store_prefix,
    "prefix match": match,
    "device": on_device,
}


@pytest.mark.parametrize(
    ("stand", "way"), [*(("owner", way) for way in WAYS), ("off", "put and wait")], indirect=["stand"]
)
def test_an_exception_at_any_point_of_a_call_leaves_the_client_as_good_as_new(stand: Stand, way: str) -> None:
    call = WAYS[way]
    call(stand, 0)
    until(lambda: not stand.client.link.puts.waiting, "the first call to be over")
    for number in range(1 + random.randrange(STRIDE), POINTS_MAX, STRIDE):
        place = interrupt(number - 1, lambda number=number: call(stand, number))  # type: ignore[misc]
        stand.check(f"{way}, point {number}: {place}")
        if not place:
            break
    else:
        pytest.fail("it never came to its end")
    assert number > 10
    stand.check_end()


def test_real_signals_at_random_moments_of_calls_leave_the_client_as_good_as_new(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest keeps exceptions that come in finalizers, and with them all frames below, until the test has ended.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    chance = random.Random(7)
    raised, armed = 0, False

    def handler(*_: object) -> None:
        if armed:
            raise Signal

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for number in range(1, 301):
            armed = True
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 0.002))
                list(WAYS.values())[number % len(WAYS)](stand, number)
                armed = False
            except Signal:
                armed = False
                raised += 1
            armed = False
            # A cut put may have cost the connection, and calls that ask the daemon do not wait for the next one. If the
            # exception came in a finalizer, it is not raised here.
            until(stand.attached, f"the client to be attached: call {number}")
            if number % 30 == 0:
                signal.setitimer(signal.ITIMER_REAL, 0)
                stand.check(f"call {number}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert raised
    stand.check_end()


@pytest.mark.parametrize("size_bytes", [MIB // 2, 24 * MIB], ids=["small", "large"])
@pytest.mark.parametrize("call", ["put", "put_many", "get_or_compute"])
async def test_the_array_of_a_cancelled_put_is_the_tasks_again_and_never_stored_with_what_comes_after(
    call: str, size_bytes: int
) -> None:
    with Daemon(ring_bytes="64MiB") as large:
        async with tensord.AsyncClient(large.start().socket, timeout_s=PATIENCE_S) as client:
            assert await client.wait_connected(PATIENCE_S)
            array = np.empty(size_bytes, np.uint8)
            calls: dict[str, Callable[[bytes], Any]] = {
                "put": lambda name: client.put(name, array, wait=True),
                "put_many": lambda name: client.put_many([(name, array)], wait=True),
                "get_or_compute": lambda name: client.get_or_compute(name, lambda: array),
            }
            for number in range(30):
                name = key(number)
                array.fill(1)
                task = asyncio.create_task(calls[call](name))
                await asyncio.sleep(0.0005 * number)
                task.cancel()
                await asyncio.wait([task])
                array.fill(2)
                until(lambda: not client.client.link.puts.waiting, "the put to be carried out")
                lease = await client.get(name)
                assert lease is None or (lease.tree == 1).all()


async def test_a_cancelled_get_into_writes_nothing_more_into_the_tasks_array() -> None:
    with Daemon(ring_bytes="64MiB") as large:
        async with tensord.AsyncClient(large.start().socket, timeout_s=PATIENCE_S) as client:
            assert await client.wait_connected(PATIENCE_S)
            array = np.ones(24 * MIB, np.uint8)
            assert (await client.put(key(1), array, wait=True)).state == "stored"
            for number in range(30):
                task = asyncio.create_task(client.get_into(key(1), array))
                await asyncio.sleep(0.0003 * number)
                task.cancel()
                await asyncio.wait([task])
                array.fill(2)
                # As long as it takes to copy the entry.
                assert await client.get_into(key(1), np.empty_like(array))
                assert (array == 2).all()


async def test_tasks_cancelled_at_any_moment_leave_an_async_client_as_good_as_new(daemon: Daemon) -> None:
    """Each task is cancelled after so many turns of the loop; a claim is given back though nobody has it."""
    client = tensord.AsyncClient(daemon.socket, timeout_s=PATIENCE_S)
    assert await client.wait_connected(PATIENCE_S)

    async def compute() -> Any:
        await asyncio.sleep(0)
        return SMALL

    async def act(number: int) -> None:
        await client.put(key(number), SMALL)
        await client.get_or_compute(key(1000 + number), compute)
        await client.claim(key(2000 + number))
        (await client.reserve({"a": tensord.Spec((100,), "uint8")})).abandon()

    for turns in range(40):
        task = asyncio.create_task(act(turns))
        for _ in range(turns):
            # As long as it takes for something to happen in the loop or in its threads.
            await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.wait([task])
    put = await client.put(key(5000), SMALL, wait=True)
    assert put.state == "stored"
    gc.collect()
    until(lambda: not client.client.link.puts.waiting, "the puts to be over")
    await asyncio.to_thread(
        until,
        lambda: not (daemon.status()["store"]["claims_held"] or daemon.status()["store"]["claims_waiting"]),
        "claims to be given back",
    )
    await client.close()
