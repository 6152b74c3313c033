"""Long lists of numbers, and trees of ten thousand leaves, by every way that a process gets an entry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.core.ring_reader import RingReader
from tensord.errors import UsageError

from ..daemon_process import PATIENCE_S, Daemon

KEY = b"long----" + bytes(24)
TREES: dict[str, Any] = {
    "token ids": [*range(100_000)],
    "times": [0.5 * each for each in range(100_000)],
    "among others": {"ids": [*range(5000)], "mask": (1,) * 100, "hidden": np.arange(3), "bools": [True] * 100},
    "ten thousand arrays": {f"model.layers.{each}.weight": np.full(3, each) for each in range(10_000)},
    "ten thousand texts": [f"text number {each}" for each in range(10_000)],
}


def borrowed(client: tensord.Client) -> Any:
    lease, ring = client.get(KEY), client.ring()
    assert lease is not None
    assert isinstance(ring, RingReader)
    handle = lease.handle()
    assert handle is not None
    theirs, copied = ring.borrow(handle), ring.copied(handle)
    assert theirs is not None
    assert copied is not None
    assert_same(copied.tree, theirs.tree)
    return theirs.tree


WAYS: dict[str, Callable[[tensord.Client], Any]] = {
    "get": lambda client: client.get(KEY).tree,  # type: ignore[union-attr]
    "value": lambda client: client.get(KEY).value,  # type: ignore[union-attr]
    "verified": lambda client: client.get(KEY, verify=True).tree,  # type: ignore[union-attr]
    "get_many": lambda client: client.get_many([bytes(32), KEY])[1].tree,  # type: ignore[union-attr]
    "get_or_compute": lambda client: client.get_or_compute(KEY, lambda: None),
    "borrow": borrowed,
}


def assert_same(found: Any, put: Any) -> None:
    assert type(found) is type(put)
    if isinstance(put, dict):
        assert [*found] == [*put]
        for name in put:
            assert_same(found[name], put[name])
    elif isinstance(put, np.ndarray):
        assert (found.dtype, found.tobytes()) == (put.dtype, put.tobytes())
    else:
        assert [*map(type, found)] == [*map(type, put)]
        assert found == put


@pytest.mark.parametrize("case", TREES)
def test_every_reader_gets_what_was_put(case: str, daemon: Daemon) -> None:
    with daemon.client(timeout_s=PATIENCE_S) as client:
        put = client.put(KEY, TREES[case], wait=True)
        assert (put.state, put.error) == ("stored", None)
        for read in WAYS.values():
            assert_same(read(client), TREES[case])
        with pytest.raises(UsageError, match=r"the entry is (list|dict)"):
            client.get_into(KEY, np.zeros(3))
        daemon.restart()
        daemon.until(lambda status: status["store"]["entries"] == 1, "the entry to be taken over")
        with daemon.client(timeout_s=PATIENCE_S) as other:
            other.wait_connected()
            assert_same(WAYS["verified"](other), TREES[case])


def test_asyncio_and_reserve_have_long_lists_too(daemon: Daemon) -> None:
    ids = [*range(1000)]

    async def store_and_get() -> Any:
        async with tensord.AsyncClient(daemon.socket) as client:
            assert await client.get_or_compute(KEY, lambda: ids) == ids
            await client.put(bytes(32), 1, wait=True)
            return await client.get(KEY)

    assert asyncio.run(store_and_get()).tree == ids
    with daemon.client() as client:
        reserved = client.reserve({"ids": ids, "out": tensord.Spec((3,), "f4")})
        assert reserved.tree["ids"] == ids
        reserved.tree["out"][:] = 7
        put = reserved.commit(bytes(31) + b"1")
        assert put.wait(PATIENCE_S).state == "stored"
        lease = client.get(bytes(31) + b"1")
        assert lease is not None
        assert lease.tree["ids"] == ids
        assert lease.tree["out"].tolist() == [7, 7, 7]
