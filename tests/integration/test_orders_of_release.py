"""A pin ends with the last object that shows its bytes, whichever of client, lease, tree, view and tensor ends first.

numpy releases what an array lies over before or after the array's weak references, depending on its version, and the
releases of pins hang on such references. Nothing here may wait for the cycle collector, nor for the end of the lane.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.shm.lanes.lane import LOG_AT, PINS_AT

from ..daemon_process import PATIENCE_S, Daemon

Things = dict[str, Any]


@pytest.fixture(autouse=True)
def _no_cycle_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def pins(lane_fd: int) -> int:
    return int(np.count_nonzero(np.frombuffer(os.pread(lane_fd, LOG_AT * 8, 0), np.uint64)[PINS_AT:]))


def one(client: tensord.Client, key: bytes, verify: bool = False) -> Things:
    lease = client.get(key, verify=verify)
    assert lease is not None
    if isinstance(lease.tree, np.ndarray):
        return {"lease": lease, "array": lease.tree, "view": lease.tree[10:]}
    return {"lease": lease, "tree": lease.tree, "view": lease.tree["a"][10:]}


def of_many(client: tensord.Client, key: bytes) -> Things:
    batch = client.get_many([key, bytes(32)])
    lease = batch[0]
    assert lease is not None
    return {"batch": batch, "lease": lease, "view": lease.tree["a"][10:]}


def tensor(client: tensord.Client, key: bytes) -> Things:
    lease = client.get(key)
    assert lease is not None
    tree = lease.torch(copy=False)
    return {"lease": lease, "tensors": tree, "view": tree["a"][10:]}


def checked(client: tensord.Client, key: bytes) -> Things:
    return one(client, key, verify=True)


TREE = {"a": np.arange(100), "b": [np.ones(3), "x"]}


@pytest.mark.parametrize(
    ("payload", "got"), [(TREE, one), (np.arange(100), one), (TREE, of_many), (TREE, tensor), (TREE, checked)]
)
def test_a_pin_ends_with_the_last_of_what_shows_it_in_every_order(
    shared: Daemon, payload: Any, got: Callable[[tensord.Client, bytes], Things]
) -> None:
    if got is tensor:
        pytest.importorskip("torch")
    key = os.urandom(32)
    with shared.client() as writer:
        writer.put(key, payload, wait=True)
        names = list(got(writer, key))
    for number, order in enumerate(permutations(["client", *names])):
        lanes = set(shared.lanes())
        client = tensord.Client(shared.socket)
        assert client.wait_connected(PATIENCE_S)
        (lane,) = set(shared.lanes()) - lanes
        with lane.open("rb") as words:
            things = {"client": client, **got(client, key)}
            reader = client.ring() if number % 2 else None  # with which the lane stays
            del client
            for name in order:
                del things[name]
                shown = any(name != "client" for name in things)
                assert bool(pins(words.fileno())) == shown, f"{set(things)} are left, {order}"
            del reader


def bad() -> int:
    raise ArithmeticError


def committed_twice(client: tensord.Client) -> None:
    reservation = client.reserve(tensord.Spec((10,), "u1"))
    reservation.commit(os.urandom(32))
    reservation.commit(os.urandom(32))


FAILING: dict[str, Callable[[tensord.Client], object]] = {
    "compute raises": lambda client: client.get_or_compute(os.urandom(32), bad),
    "a type that no payload has": lambda client: client.get_or_compute(os.urandom(32), lambda: {1}),
    "a reservation that is too large": lambda client: client.reserve(tensord.Spec((1 << 30,), "u1")),
    "a reservation that is committed twice": committed_twice,
    "a card that is not there": lambda client: client.reserve_device("none", 5, for_s=1.0),
}


def kept(frame_ended: weakref.ref[Any]) -> bool:
    """Whether the object is still there. The thread that made an error may be about to let go of it."""
    deadline = time.monotonic() + PATIENCE_S
    while frame_ended() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    return frame_ended() is not None


@pytest.mark.parametrize("how", FAILING)
def test_a_call_that_fails_keeps_nothing_of_the_function_that_made_it(shared: Daemon, how: str) -> None:
    client = shared.client()

    def call() -> weakref.ref[Any]:
        large = np.zeros(10)
        with pytest.raises((tensord.TensordError, ArithmeticError, ValueError)):
            FAILING[how](client)
        return weakref.ref(large)

    assert not kept(call())
