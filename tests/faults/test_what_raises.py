"""Which calls raise because the daemon is away, and which never do: each public call of each class stands in one list.

A new call fails the first test until it stands in one of the lists; docs/reliability.md names those that raise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.caches.processor.loans import Reference
from tensord.errors import DaemonUnavailable, TensordError
from tensord.testing.fake_vram import FakeCard, FakeVram

from ..daemon_process import Daemon, until
from .payloads import key, payload

NAMESPACE = tensord.Namespace(model="away", revision="1", dtype="uint64", processor="none")
KEY = key(1)
TOKENS = np.arange(40, dtype=np.uint32)
LAYERS = [tensord.NormalLayer(np.zeros((1, 40, 8), np.uint64))]
INPUT = tensord.EncoderRequest("request", [tensord.EncoderInput(KEY, 4)])
DEVICE = "card"

Call = Callable[[Any], object]


def graph() -> tensord.AgentStepGraph:
    steps = tensord.AgentStepGraph()
    steps.add_step(tensord.AgentStep("planner", depends_on=(), step_index=0))
    return steps


# How each call is made. A property is read.
CLIENT_NEVER: dict[str, Call] = {
    "claim": lambda c: c.claim(KEY),
    "close": lambda c: c.close(),
    "connected": lambda c: c.connected,
    "contains": lambda c: c.contains(KEY),
    "current": lambda c: c.current(NAMESPACE),
    "get": lambda c: c.get(KEY, verify=True),
    "get_into": lambda c: c.get_into(KEY, np.zeros(3)),
    "get_many": lambda c: c.get_many([KEY]),
    "get_or_compute": lambda c: c.get_or_compute(KEY, lambda: payload(1)),
    "hold": lambda c: c.hold(KEY),
    "on_mode": lambda c: c.on_mode(lambda change: None),
    "peek": lambda c: c.peek(KEY),
    "put": lambda c: c.put(KEY, payload(1), wait=True),
    "put_many": lambda c: c.put_many([(KEY, payload(1))], wait=True),
    "request_arrived": lambda c: c.request_arrived(DEVICE),
    "request_completed": lambda c: c.request_completed(DEVICE, 0.1, 1),
    "reserve": lambda c: c.reserve(tensord.Spec((8,), "uint64")),
    "ring": lambda c: c.ring(),
    "store": lambda c: c.store(KEY, payload(1), tokens=0, ttl_s=None, claim=None),
    "wait_connected": lambda c: c.wait_connected(0.01),
    "workflow": lambda c: c.workflow("ticket", graph()),
}
CLIENT_RAISES: dict[str, Call] = {
    "clear": lambda c: c.clear(),
    "evict": lambda c: c.evict(KEY),
    "invalidate": lambda c: c.invalidate(NAMESPACE),
    "modes": lambda c: c.modes(),
    "pin": lambda c: c.pin(KEY, 1.0),
    "reserve_device": lambda c: c.reserve_device(DEVICE, 1024),
    "status": lambda c: c.status(),
    "touch": lambda c: c.touch(KEY),
    "unpin": lambda c: c.unpin(KEY),
}

NEVER: dict[type[Any], dict[str, Call]] = {
    tensord.Client: CLIENT_NEVER,
    tensord.DeviceCache: {
        "clear": lambda c: c.clear(),
        "close": lambda c: c.close(),
        "closed": lambda c: c.closed,
        "contains": lambda c: c.contains(KEY),
        "delete": lambda c: c.delete(KEY),
        "error": lambda c: c.error,
        "get": lambda c: c.get(KEY, promote=True),
        "mode": lambda c: c.mode,
        "offload": lambda c: c.offload(KEY, wait=True),
        "put": lambda c: c.put(KEY, {"a": c.device.upload(payload(1, 4096))}, wait=True),
        "size_bytes": lambda c: c.size_bytes,
    },
    tensord.PrefixCache: {
        "finished": lambda c: c.finished("planner"),
        "match": lambda c: c.match(TOKENS),
        "put": lambda c: c.put(TOKENS, LAYERS, wait=True),
        "turn_ended": lambda c: c.turn_ended("planner"),
    },
    tensord.ProcessorCache: {
        "close": lambda c: c.close(),
        "forget": lambda c: c.forget(),
        "get_and_update": lambda c: c.get_and_update([payload(1)], ["picture"]),
        "get_and_update_features": lambda c: c.get_and_update_features([tensord.Feature("picture", payload(1))]),
        "held": lambda c: c.held("picture"),
        "held_bytes": lambda c: c.held_bytes,
        "invalidate": lambda c: c.invalidate(["picture"]),
        "is_cached": lambda c: c.is_cached(["picture"]),
        "lends": lambda c: c.lends(Reference(bytes(32))),
        "lent_bytes": lambda c: c.lent_bytes,
        "make_stats": lambda c: c.make_stats(),
        "owed_s": lambda c: c.owed_s,
        "pass_through": lambda c: c.pass_through("unsupported"),
        "release": lambda c: c.release(),
        "touch": lambda c: c.touch(["picture"]),
    },
    tensord.VisualCache: {
        "key": lambda c: c.key("image", b"picture"),
        "lookup": lambda c: c.lookup("image", b"picture"),
        "statistics": lambda c: c.statistics(),
        "store": lambda c: c.store("image", b"picture", payload(1)).wait(30.0),
    },
    tensord.EncoderCacheManager: {
        "allocate": lambda c: c.allocate(INPUT, 0),
        "can_allocate": lambda c: c.can_allocate(INPUT, 0, 100),
        "free": lambda c: c.free(INPUT),
        "free_encoder_input": lambda c: c.free_encoder_input(INPUT, 0),
        "free_tokens": lambda c: c.free_tokens,
        "freeable_tokens": lambda c: c.freeable_tokens,
        "get_cached_input_ids": lambda c: c.get_cached_input_ids(INPUT),
        "get_freed_ids": lambda c: c.get_freed_ids(),
        "has_cache": lambda c: c.has_cache(INPUT, 0),
        "lease": lambda c: (c.allocate(INPUT, 0), c.lease(INPUT, 0)),
        "reset": lambda c: c.reset(),
        "store": lambda c: (c.allocate(INPUT, 0), c.store(INPUT, 0, payload(1))),
        "used_tokens": lambda c: c.used_tokens,
    },
}
# It asks on the status socket, which a closed client may do as well.
OF_STATUS = {"status"}
RAISES: dict[type[Any], dict[str, Call]] = {
    tensord.Client: CLIENT_RAISES,
    tensord.DeviceCache: {},
    tensord.PrefixCache: {},
    tensord.ProcessorCache: {"clear": lambda c: c.clear()},
    tensord.VisualCache: {"clear": lambda c: c.clear()},
    tensord.EncoderCacheManager: {},
}


def public(of: type[Any]) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")}


@pytest.mark.parametrize("of", list(NEVER), ids=lambda of: of.__name__)
def test_every_public_call_is_in_one_list(of: type[Any]) -> None:
    never, raises = set(NEVER[of]), set(RAISES[of])
    assert not never & raises
    assert public(of) == never | raises


def test_every_call_of_an_async_client_is_one_of_a_client() -> None:
    assert public(tensord.AsyncClient) <= set(CLIENT_NEVER) | set(CLIENT_RAISES)


@pytest.fixture(scope="module")
def serving() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon.start()


@pytest.fixture(params=["never started", "gone", "client closed"])
def place(request: pytest.FixtureRequest, serving: Daemon, tmp_path: Path) -> tuple[str, Daemon, Path]:
    return request.param, serving, tmp_path


def away(place: tuple[str, Daemon, Path]) -> tensord.Client:
    """A client without a daemon."""
    how, daemon, folder = place
    if how == "never started":
        return tensord.Client(folder / "nobody.sock", timeout_s=0.5)
    client = tensord.Client(daemon.socket, timeout_s=0.5)
    assert client.wait_connected(30.0)
    if how == "client closed":
        client.close()
        return client
    daemon.kill()
    until(lambda: not client.connected, "the client to notice")
    return client


def raising(of: type[Any], place: tuple[str, Daemon, Path]) -> dict[str, Call]:
    """The calls that must raise."""
    closed = place[0] == "client closed"
    return {name: call for name, call in RAISES[of].items() if not (closed and name in OF_STATUS)}


@pytest.fixture
def client(place: tuple[str, Daemon, Path]) -> Iterator[tensord.Client]:
    away_from = away(place)
    yield away_from
    away_from.close()
    if not place[1].running:
        place[1].start()


def instance(of: type[Any], client: tensord.Client, folder: Path) -> Any:
    if of is tensord.Client:
        return client
    if of is tensord.DeviceCache:
        return tensord.DeviceCache(client, FakeVram(FakeCard(folder, DEVICE, 1 << 20)))
    if of is tensord.EncoderCacheManager:
        return tensord.EncoderCacheManager(100, client)
    if of is tensord.PrefixCache:
        return tensord.PrefixCache(client, NAMESPACE, block_tokens=16)
    return of(client, NAMESPACE)


@pytest.mark.parametrize("of", list(NEVER), ids=lambda of: of.__name__)
def test_calls_raise_that_the_daemon_is_away_or_never_do(
    of: type[Any], client: tensord.Client, place: tuple[str, Daemon, Path], tmp_path: Path
) -> None:
    called, raises = instance(of, client, tmp_path), raising(of, place)
    calls = {**raises, **NEVER[of]}
    for name in sorted(calls, key=lambda name: (name == "close", name)):
        raised: TensordError | None = None
        try:
            calls[name](called)
        except TensordError as error:
            raised = error
        assert isinstance(raised, DaemonUnavailable if name in raises else type(None)), f"{of.__name__}.{name}"


async def test_an_async_client_raises_in_the_same_calls(
    client: tensord.Client, place: tuple[str, Daemon, Path]
) -> None:
    async def result_of(call: Call) -> None:
        made = call(called)
        if inspect.isawaitable(made):
            await made

    called = tensord.AsyncClient(client.link.path, timeout_s=0.5)
    if place[0] == "client closed":
        await called.close()
    calls = public(tensord.AsyncClient)
    for name in sorted(calls & set(CLIENT_NEVER) - {"close"}):
        await result_of(CLIENT_NEVER[name])
    for name in sorted(calls & set(raising(tensord.Client, place))):
        with pytest.raises(DaemonUnavailable):
            await result_of(CLIENT_RAISES[name])
    await called.close()
