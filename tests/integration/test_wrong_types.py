"""Objects of a wrong type are refused with a UsageError that names the argument, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.errors import UsageError

from ..daemon_process import Daemon

KEY = b"k" * 32
NAMESPACE = tensord.Namespace(model="m", revision="1", dtype="float32", processor="none")
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
    "put": lambda client: client.put(KEY, 1, wait=FLAG),  # type: ignore[arg-type]
    "put_many and wait": lambda client: client.put_many([(KEY, 1)], wait=FLAG),  # type: ignore[arg-type]
    "commit": lambda client: client.reserve(1).commit(KEY, wait=FLAG),  # type: ignore[arg-type]
    "verify": lambda client: client.get(KEY, verify=FLAG),  # type: ignore[arg-type]
    "required": lambda _: tensord.Client(required=FLAG),  # type: ignore[arg-type]
    "lend": lambda client: Cache(client, NAMESPACE, lend=FLAG),  # type: ignore[arg-type]
    "copy": lambda client: Cache(client, NAMESPACE, copy=FLAG),  # type: ignore[arg-type]
    "prefix": lambda client: tensord.PrefixCache(client, NAMESPACE).put(b"\0" * 8, [], wait=FLAG),  # type: ignore[arg-type]
    "store": lambda client: client.store(KEY, 1, tokens=0, ttl_s=None, claim="x"),  # type: ignore[arg-type]
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running.start()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[tensord.Client]:
    """A client of a daemon that has nothing."""
    with daemon.client() as made:
        made.clear()
        yield made


@pytest.mark.parametrize("call", ENCODER)
def test_the_encoder_cache_refuses_objects_of_another_type(call: str) -> None:
    manager = Manager(4)
    with pytest.raises(UsageError, match=r" is .*; it must be|; it must be EncoderInputs"):
        ENCODER[call](manager)
    assert manager.free_tokens == 4


@pytest.mark.parametrize("call", PROCESSOR)
def test_the_processor_cache_refuses_objects_of_another_type(daemon: Daemon, client: tensord.Client, call: str) -> None:
    cache = Cache(client, NAMESPACE)
    for wrong in (None, 5, np.array("x")):
        with pytest.raises(UsageError):
            PROCESSOR[call](cache, wrong)
    assert daemon.store("entries") == 0


@pytest.mark.parametrize("call", CALLS)
def test_a_client_refuses_objects_of_another_type(daemon: Daemon, client: tensord.Client, call: str) -> None:
    with pytest.raises(UsageError):
        CALLS[call](client)
    client.put(b"z" * 32, 1, wait=True)
    assert daemon.store("entries") == 1
