"""What a caller hands to a client is taken, or refused by its name with a UsageError, and with nothing else."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.errors import BadKey, BadNamespace, TensordError, UsageError
from tensord.testing.fake_vram import FakeCard, FakeVram

from ..daemon_process import PATIENCE_S, Daemon
from ..processes import python

KEY = b"k" * 32
NAMESPACE = tensord.Namespace(model="m", revision="1", dtype="float32", processor="none")
MODULES = {"tensord": "tensord.daemon", "tensorctl": "tensord.client.ctl"}
SURROGATE = "\ud800"
"""What a file's name that is no text has in it, and no message can carry."""
NO_TIMES: list[Any] = [math.nan, -1, 1e300, 10**400, "5", b"5", True, np.arange(2)]

Call = Callable[[tensord.Client, Any], object]
TAKE_TIMES: dict[str, Call] = {
    "put": lambda client, time: client.put(KEY, 1, timeout_s=time),
    "put and wait": lambda client, time: client.put(KEY, 1, wait=True, timeout_s=time),
    "put_many": lambda client, time: client.put_many([(KEY, 1)], timeout_s=time),
    "Put.wait": lambda client, time: client.put(KEY, 1).wait(time),
    "commit": lambda client, time: client.reserve(1).commit(KEY, timeout_s=time),
    "get_or_compute": lambda client, time: client.get_or_compute(KEY, lambda: 1, timeout_s=time),
    "wait_connected": lambda client, time: client.wait_connected(time),
    "reserve_device": lambda client, time: client.reserve_device("card", 1, timeout_s=time),
    "ttl_s": lambda client, time: client.put(KEY, 1, ttl_s=time),
    "ttl_s of put_many": lambda client, time: client.put_many([(KEY, 1)], ttl_s=time),
    "ttl_s of a commit": lambda client, time: client.reserve(1).commit(KEY, ttl_s=time),
    "cost_ms": lambda client, time: client.put(KEY, 1, cost_ms=time),
    "pin": lambda client, time: client.pin(KEY, time),
    "for_s": lambda client, time: client.reserve_device("card", 1, time),
    "wait_s": lambda client, time: client.reserve_device("card", 1, wait_s=time),
}
TAKE_KEYS: dict[str, Call] = {
    "get": lambda client, key: client.get(key),
    "get verified": lambda client, key: client.get(key, verify=True),
    "get_many": lambda client, key: client.get_many([key])[0],
    "hold": lambda client, key: client.hold(key),
    "contains": lambda client, key: client.contains(key),
    "peek": lambda client, key: client.peek(key),
    "touch": lambda client, key: client.touch(key),
    "pin": lambda client, key: client.pin(key, 1),
    "put": lambda client, key: client.put(key, 1, wait=True),
    "put_many": lambda client, key: client.put_many([(key, 1)], wait=True),
    "get_or_compute": lambda client, key: client.get_or_compute(key, lambda: 1),
    "evict": lambda client, key: client.evict(key),
}


DOCUMENTED = [
    tuple(cell.strip().removeprefix("`").removesuffix("`") for cell in line.strip("|").split(" | "))
    for line in (Path(__file__).parents[2] / "docs" / "operating.md")
    .read_text()
    .partition("| you write | you get |\n|---|---|\n")[2]
    .partition("\n\n")[0]
    .splitlines()
]
"""(call or command, its message), of the page's table."""
NO_NAMESPACE: dict[str, Call] = {
    "invalidate": lambda client, namespace: client.invalidate(namespace),
    "current": lambda client, namespace: client.current(namespace),
    "clear": lambda client, namespace: client.clear(namespace),
    "VisualCache": lambda client, namespace: tensord.VisualCache(client, namespace),
    "ProcessorCache": lambda client, namespace: tensord.ProcessorCache(client, namespace),
    "PrefixCache": lambda client, namespace: tensord.PrefixCache(client, namespace),
}

TAKE_CLIENTS: dict[str, Callable[[Any], object]] = {
    "VisualCache": lambda client: tensord.VisualCache(client, NAMESPACE),
    "ProcessorCache": lambda client: tensord.ProcessorCache(client, NAMESPACE),
    "PrefixCache": lambda client: tensord.PrefixCache(client, NAMESPACE),
    "DeviceCache": lambda client: tensord.DeviceCache(client, FakeVram(FakeCard(tempfile.mkdtemp(), "card", 1 << 20))),
}


FLAG = np.array([True, False])
REQUEST = tensord.EncoderRequest("r", [tensord.EncoderInput(KEY, 4)])
BUDGET = {"batch_tokens_max": 1, "compute_tokens": 1, "cache_tokens": 1}

Manager = tensord.EncoderCacheManager
ENCODER: dict[str, Callable[[Manager], object]] = {
    "budget": lambda _: tensord.compute_encoder_budget(5, **BUDGET),  # type: ignore[arg-type]
    "budget of pairs": lambda _: tensord.compute_encoder_budget([("image", 5)], **BUDGET),  # type: ignore[arg-type]
    "request": lambda _: tensord.EncoderRequest("r", 1),  # type: ignore[arg-type]
    "request of a number": lambda _: tensord.EncoderRequest(1, []),  # type: ignore[arg-type]
    "request of keys": lambda _: tensord.EncoderRequest("r", [KEY]),  # type: ignore[list-item]
    "client": lambda _: Manager(4, 5),  # type: ignore[arg-type]
    "has_cache": lambda manager: manager.has_cache(None, 0),  # type: ignore[arg-type]
    "has_cache of a text": lambda manager: manager.has_cache(REQUEST, "0"),  # type: ignore[arg-type]
    "can_allocate": lambda manager: manager.can_allocate(None, 0, 1),  # type: ignore[arg-type]
    "can_allocate of no budget": lambda manager: manager.can_allocate(REQUEST, 0, None),  # type: ignore[arg-type]
    "can_allocate of no count": lambda manager: manager.can_allocate(REQUEST, 0, 9, "0"),  # type: ignore[arg-type]
    "ids": lambda manager: manager.get_cached_input_ids(None),  # type: ignore[arg-type]
    "allocate": lambda manager: manager.allocate(None, 0),  # type: ignore[arg-type]
    "lease": lambda manager: manager.lease(None, 0),  # type: ignore[arg-type]
    "store": lambda manager: manager.store(None, 0, 1),  # type: ignore[arg-type]
    "free_encoder_input": lambda manager: manager.free_encoder_input(None, 0),  # type: ignore[arg-type]
    "free_encoder_input of a list": lambda manager: manager.free_encoder_input(REQUEST, []),  # type: ignore[arg-type]
    "free": lambda manager: manager.free(None),  # type: ignore[arg-type]
}

Cache = tensord.ProcessorCache
PROCESSOR: dict[str, Callable[[Cache, Any], object]] = {
    "is_cached": lambda cache, wrong: cache.is_cached(wrong),
    "is_cached of": lambda cache, wrong: cache.is_cached([wrong]),
    "touch": lambda cache, wrong: cache.touch([wrong]),
    "get_and_update": lambda cache, wrong: cache.get_and_update(wrong, ["a"]),
    "get_and_update of hashes": lambda cache, wrong: cache.get_and_update([1], wrong),
    "get_and_update of": lambda cache, wrong: cache.get_and_update([1], [wrong]),
    "held": lambda cache, wrong: cache.held(wrong),
    "invalidate": lambda cache, wrong: cache.invalidate([wrong]),
    "features": lambda cache, wrong: cache.get_and_update_features(wrong),
    "feature": lambda cache, wrong: cache.get_and_update_features([wrong]),
    "feature of": lambda cache, wrong: cache.get_and_update_features([tensord.Feature(wrong, None)]),
    "lends": lambda cache, wrong: cache.lends(wrong),
}

CALLS: dict[str, Callable[[tensord.Client], object]] = {
    "borrow": lambda client: client.ring().borrow(None),  # type: ignore[arg-type,union-attr]
    "copied": lambda client: client.ring().copied(5),  # type: ignore[arg-type,union-attr]
    "put_many": lambda client: client.put_many(np.array("x")),
    "reserve_device": lambda client: client.reserve_device("card", 0),
    "request_arrived": lambda client: client.request_arrived("card", -1),
    "request_arrived of half": lambda client: client.request_arrived("card", 1.5),  # type: ignore[arg-type]
    "request_arrived at a long name": lambda client: client.request_arrived("x" * 65),
    "request_completed": lambda client: client.request_completed("card", math.nan, 3),
    "request_completed of blocks": lambda client: client.request_completed("card", 0.1, -3),
    "copy": lambda client: Cache(client, NAMESPACE, copy=FLAG),  # type: ignore[arg-type]
    "store": lambda client: client.store(KEY, 1, tokens=0, ttl_s=None, claim="x"),  # type: ignore[arg-type]
}


@pytest.fixture
def client(shared: Daemon) -> Iterator[tensord.Client]:
    """A client of a daemon that has nothing."""
    with shared.client() as made:
        made.clear()
        yield made


@pytest.mark.parametrize("call", TAKE_TIMES)
def test_an_invalid_time_is_refused_with_its_value(client: tensord.Client, call: str) -> None:
    for wrong in NO_TIMES:
        with pytest.raises(UsageError) as caught:
            TAKE_TIMES[call](client, wrong)
        assert repr(wrong) in str(caught.value)


def test_client_arguments_that_fit_no_message_are_refused(shared: Daemon) -> None:
    for field, wrong in (
        *(("timeout_s", time) for time in NO_TIMES),
        *(("attach_s", time) for time in NO_TIMES),
        *(("name", name) for name in ("", SURROGATE, "x" * 129, 5, 0, np.zeros(2))),
    ):
        with pytest.raises(UsageError, match=field):
            tensord.Client(shared.socket, **{field: wrong})
    for socket in ("", "a\0b", f"/tmp/{SURROGATE}", 5):
        with pytest.raises(UsageError, match="socket"):
            tensord.Client(socket, timeout_s=PATIENCE_S)  # type: ignore[arg-type]
    with tensord.Client(shared.socket, timeout_s=math.inf) as patient:
        assert patient.status()["store"]


@pytest.mark.parametrize("call", TAKE_KEYS)
@pytest.mark.parametrize("stored", [True, False])
def test_every_call_takes_the_same_for_a_key(client: tensord.Client, call: str, stored: bool) -> None:
    if stored:
        client.put(KEY, 1, wait=True)
    array = np.frombuffer(KEY, np.uint8)
    for wrong in (array, array.view("f4"), np.frombuffer(KEY * 2, np.uint8)[::2], "k" * 32, KEY[:31], None, 5):
        with pytest.raises(BadKey):
            TAKE_KEYS[call](client, wrong)
    released = memoryview(KEY)
    released.release()
    for view in (memoryview(KEY).cast("I"), memoryview(KEY * 2)[::4], memoryview(KEY * 4).cast("B", (8, 16)), released):
        with pytest.raises(BadKey):
            TAKE_KEYS[call](client, view)
    for right in (bytearray(KEY), memoryview(KEY), memoryview(KEY * 2)[::2], memoryview(KEY)[::-1], KEY):
        TAKE_KEYS[call](client, right)
    assert client.contains(KEY) is ((stored and call != "evict") or call in ("put", "put_many", "get_or_compute"))


def test_what_cannot_be_called_is_no_compute_stored_or_not(client: tensord.Client, shared: Daemon) -> None:
    wrong: Any

    async def compute(wrong: Any) -> None:
        async with tensord.AsyncClient(shared.socket, timeout_s=PATIENCE_S) as waiting:
            await waiting.get_or_compute(KEY, wrong)

    for _ in ("missing", "stored"):
        for wrong in (None, 5, "x", np.zeros(2)):
            with pytest.raises(UsageError, match="compute is"):
                client.get_or_compute(KEY, wrong)
            with pytest.raises(UsageError, match="compute is"):
                asyncio.run(compute(wrong))
        client.put(KEY, 1, wait=True)


@pytest.mark.parametrize("call", NO_NAMESPACE)
def test_what_is_no_namespace_is_refused(client: tensord.Client, call: str) -> None:
    for wrong in ("model", b"12345678", 5, {"model": "m"}):
        with pytest.raises(BadNamespace, match="namespace is"):
            NO_NAMESPACE[call](client, wrong)


@pytest.mark.parametrize("cache", TAKE_CLIENTS)
def test_what_is_no_client_is_refused(client: tensord.Client, shared: Daemon, cache: str) -> None:
    TAKE_CLIENTS[cache](client)
    for wrong in (None, 5, "x", object(), tensord.Client, tensord.AsyncClient(shared.socket, timeout_s=PATIENCE_S)):
        with pytest.raises(UsageError, match=re.escape(f" is {wrong!r}; it must be a tensord.Client")):
            TAKE_CLIENTS[cache](wrong)


def test_what_is_no_device_is_refused(client: tensord.Client) -> None:
    for wrong in (None, 5, "cuda:0", object(), client):
        with pytest.raises(UsageError, match=re.escape(f"device is {wrong!r}; it must be a device, such as a Torch")):
            tensord.DeviceCache(client, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", DOCUMENTED, ids=lambda row: row[0])
def test_each_documented_mistake_has_the_message_of_the_page(
    client: tensord.Client, shared: Daemon, row: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written, message = row
    key, ns = KEY, tensord.Namespace(model="m", revision="1", dtype="float32", processor="none")
    client.put(key, np.zeros(3, np.float32), wait=True)
    if written.startswith(("tensord ", "tensorctl ")):
        monkeypatch.setenv("TENSORD_RING_BYTES", "1MiB")
        program, *words = written.split(" ")
        # In a process of its own: a daemon sets up the log of its process.
        ran = python("-m", MODULES[program], *words)
        assert ran.returncode != 0
        assert f'why="{message}"' in ran.stderr or ran.stderr == f"{program}: {message}\n"
        return
    if "torch" in written:
        monkeypatch.setitem(sys.modules, "torch", None)
    known = {"tensord": tensord, "np": np, "client": client, "key": key, "ns": ns, "lease": client.get(key)}
    with pytest.raises(TensordError) as caught:
        exec(written, known)
    assert f"{caught.value.code}: {caught.value}" == message


def test_the_page_documents_calls_and_commands() -> None:
    assert len(DOCUMENTED) > 5


def test_an_array_that_the_entry_cannot_be_copied_into_is_refused(client: tensord.Client) -> None:
    client.put(KEY, np.zeros(3), wait=True)
    client.put(bytes(32), [1, 2], wait=True)
    out = np.zeros(3)
    with pytest.raises(UsageError, match="the entry is list"):
        client.get_into(bytes(32), out)
    with pytest.raises(UsageError, match=r"out is float64\[2\]"):
        client.get_into(KEY, out[:2])
    out.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        client.get_into(KEY, out)


@pytest.mark.parametrize("call", ENCODER)
def test_the_encoder_cache_refuses_objects_of_another_type(call: str) -> None:
    manager = Manager(4)
    with pytest.raises(UsageError, match=r" is .*; it must be|; it must be EncoderInputs"):
        ENCODER[call](manager)
    assert manager.free_tokens == 4


@pytest.mark.parametrize("call", PROCESSOR)
def test_the_processor_cache_refuses_objects_of_another_type(shared: Daemon, client: tensord.Client, call: str) -> None:
    cache = Cache(client, NAMESPACE)
    for wrong in (None, 5, np.array("x")):
        with pytest.raises(UsageError):
            PROCESSOR[call](cache, wrong)
    assert shared.store("entries") == 0


@pytest.mark.parametrize("call", CALLS)
def test_a_client_refuses_objects_of_another_type(shared: Daemon, client: tensord.Client, call: str) -> None:
    with pytest.raises(UsageError):
        CALLS[call](client)
    client.put(b"z" * 32, 1, wait=True)
    assert shared.store("entries") == 1
