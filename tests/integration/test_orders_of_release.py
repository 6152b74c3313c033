"""What belongs to its process: a pin ends with the last object that shows its bytes, whichever of client, lease, tree,
view and tensor ends first; and none of these objects is pickled or copied.

numpy releases what an array lies over before or after the array's weak references, depending on its version, and the
releases of pins hang on such references. Nothing here may wait for the cycle collector, nor for the end of the lane.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.shm.lanes.lane import LOG_AT, PINS_AT
from tensord.testing import FakeCard

from ..client.device.card import CARD, key, watching
from ..daemon_process import PATIENCE_S, Daemon, some, until

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
    lease = some(client.get(key, verify=verify))
    if isinstance(lease.tree, np.ndarray):
        return {"lease": lease, "array": lease.tree, "view": lease.tree[10:]}
    return {"lease": lease, "tree": lease.tree, "view": lease.tree["a"][10:]}


def of_many(client: tensord.Client, key: bytes) -> Things:
    batch = client.get_many([key, bytes(32)])
    lease = some(batch[0])
    return {"batch": batch, "lease": lease, "view": lease.tree["a"][10:]}


def tensor(client: tensord.Client, key: bytes) -> Things:
    lease = some(client.get(key))
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


@pytest.mark.parametrize("how", FAILING)
def test_a_call_that_fails_keeps_nothing_of_the_function_that_made_it(shared: Daemon, how: str) -> None:
    client = shared.client()

    def call() -> weakref.ref[Any]:
        large = np.zeros(10)
        with pytest.raises((tensord.TensordError, ArithmeticError, ValueError)):
            FAILING[how](client)
        return weakref.ref(large)

    kept = call()
    # The thread that made an error may be about to let go of it.
    until(lambda: kept() is None, "the function's array to be freed")


NAMESPACE = tensord.Namespace(model="m", revision="r", dtype="f", processor="p")
TOKENS = np.arange(64, dtype=np.uint32)


@pytest.fixture
def client(card: FakeCard) -> Iterator[tensord.Client]:
    with watching(card) as daemon:
        client = daemon.start().client()
        daemon.until(lambda status: CARD in str(status["governor"]), "the card to be known")
        yield client


def matched(client: tensord.Client) -> Any:
    prefixes = tensord.PrefixCache(client, NAMESPACE, block_tokens=16)
    prefixes.put(TOKENS, [tensord.NormalLayer(np.zeros((1, 1, len(TOKENS), 1)))], wait=True)
    return prefixes.match(TOKENS)


def graph() -> tensord.AgentStepGraph:
    return tensord.AgentStepGraph([tensord.AgentStep("planner")])


OPENED: dict[str, Callable[[tensord.Client], Any]] = {
    "Batch": lambda client: client.get_many([key(1)]),
    "Claim": lambda client: client.claim(key(2)),
    "Client": lambda client: client,
    "DeviceReservation": lambda client: client.reserve_device(CARD, 4096),
    "Lease": lambda client: client.get(key(1)),
    "PrefixCache": lambda client: tensord.PrefixCache(client, NAMESPACE),
    "PrefixMatch": matched,
    "Reservation": lambda client: client.reserve(tensord.Spec((3,), "uint8")),
    "RingReader": lambda client: client.ring(),
    "Subscription": lambda client: client.on_mode(print),
    "VisualCache": lambda client: tensord.VisualCache(client, NAMESPACE),
    "Workflow": lambda client: client.workflow("of one step", graph()),
}


def test_what_belongs_to_this_process_is_neither_pickled_nor_copied(client: tensord.Client) -> None:
    client.put(key(1), np.arange(5), wait=True)
    for name, open_it in OPENED.items():
        opened = open_it(client)
        assert type(opened).__name__.endswith(name)
        copies: list[Callable[[Any], object]] = [pickle.dumps, copy.deepcopy]
        for copied in copies:
            with pytest.raises(TypeError, match="belongs to this process, so it cannot be pickled or copied: "):
                copied(opened)


def test_what_a_put_came_to_and_a_namespace_are_pickled(client: tensord.Client) -> None:
    put = client.put(key(1), np.arange(5), wait=True)
    assert pickle.loads(pickle.dumps(put)).state == "stored"
    assert pickle.loads(pickle.dumps(NAMESPACE)) == NAMESPACE
