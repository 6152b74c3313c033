"""A tensor that has no memory any more is refused, whichever call puts it. Other kinds: tests/shm/test_tensors.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.errors import UnsupportedLeaf

from ..daemon_process import Daemon
from ..faults.payloads import key, payload

torch = pytest.importorskip("torch")

NAMESPACE = tensord.Namespace(model="freed", revision="1", dtype="float32", processor="none")
TOKENS = np.arange(1000, dtype=np.uint32)


def freed() -> Any:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


async def _put(client: tensord.Client, leaf: Any) -> None:
    async with tensord.AsyncClient(client.link.path) as shared:
        await shared.put(key(1), {"leaf": leaf})


async def _get_or_compute(client: tensord.Client, leaf: Any) -> None:
    async def compute() -> Any:
        return {"leaf": leaf}

    async with tensord.AsyncClient(client.link.path) as shared:
        await shared.get_or_compute(key(1), compute)


def prefixes(client: tensord.Client) -> tensord.PrefixCache:
    return tensord.PrefixCache(client, NAMESPACE, block_tokens=16)


CALLS: dict[str, Callable[[tensord.Client, Any], object]] = {
    "put": lambda client, leaf: client.put(key(1), {"leaf": leaf}),
    "put_many": lambda client, leaf: client.put_many([(key(2), payload(2)), (key(1), {"leaf": leaf})]),
    "get_or_compute": lambda client, leaf: client.get_or_compute(key(1), lambda: {"leaf": leaf}),
    "reserve": lambda client, leaf: client.reserve({"leaf": leaf, "rest": tensord.Spec((9,), "uint8")}),
    "AsyncClient.put": lambda client, leaf: asyncio.run(_put(client, leaf)),
    "AsyncClient.get_or_compute": lambda client, leaf: asyncio.run(_get_or_compute(client, leaf)),
    "PrefixCache.put": lambda client, leaf: prefixes(client).put(TOKENS, [tensord.NormalLayer(leaf, axis=0)]),
    "state of PrefixCache.put": lambda client, leaf: prefixes(client).put(TOKENS, [tensord.RecurrentLayer(leaf)]),
    "VisualCache.store": lambda client, leaf: tensord.VisualCache(client, NAMESPACE).store("image", b"picture", leaf),
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running.start()


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> tensord.Client:
    return daemon.client()


@pytest.mark.parametrize("call", CALLS)
def test_every_call_that_puts_refuses_it(daemon: Daemon, client: tensord.Client, call: str) -> None:
    client.evict(key(0))
    before = daemon.store("puts")
    with pytest.raises(UnsupportedLeaf):
        CALLS[call](client, freed())
    assert daemon.store("puts") == before
    assert client.connected and not client.link.puts.waiting
    assert client.get_or_compute(key(0), lambda: 5) == 5
