"""Uses of the public API as a user's type checker sees them. `test_docstrings.py` checks this file; nothing runs it.

A wrong use carries the comments with which mypy and pyright pass over an error. Both checkers report a comment that
passes over none, so each wrong use must be an error.
"""

# ruff: noqa: B018

from __future__ import annotations

from typing import Any, Literal, assert_type

import numpy as np

import tensord

Array = np.ndarray[Any, np.dtype[np.float32]]


def right_lookups(cache: tensord.Client, ns: tensord.Namespace, picture: bytes) -> None:
    assert_type(cache.current(ns), tensord.Namespace)
    key = ns.key("encoder", "image", picture)
    assert_type(key, bytes)
    lease = cache.get(key, verify=True)
    assert_type(lease, tensord.Lease | None)
    if lease is not None:
        with lease as held:
            assert_type(held, tensord.Lease)
            assert_type(held.handle(), bytes | None)
    batch = cache.get_many([key, key])
    assert_type(batch, tensord.Batch)
    assert_type(batch[0], tensord.Lease | None)
    assert_type(cache.get_many(key + key), tensord.Batch)
    assert_type(cache.get_into(key, np.zeros(3)), bool)
    assert_type(cache.contains(key), bool)
    assert_type(cache.peek(key), tensord.Entry | None)
    assert_type(cache.ring(), tensord.RingReader | None)


def right_puts(cache: tensord.Client, key: bytes, hidden: Array) -> None:
    put = cache.put(key, {"hidden": hidden, "grid": (32, 32)}, tokens=1024, ttl_s=60.0, wait=True)
    assert_type(put, tensord.Put)
    assert_type(put.state, Literal["sent", "stored", "existed", "refused", "lost"])
    assert_type(put.error, tensord.TensordError | None)
    reserved = cache.reserve({"hidden": tensord.Spec((3,), "float32")})
    assert_type(reserved, tensord.Reservation)
    assert_type(reserved.commit(key, tokens=3), tensord.Put)
    assert_type(cache.touch(key, key), int)
    assert_type(cache.clear(), int)
    assert_type(cache.pin(key, 1.0), float)


def right_compute_once(cache: tensord.Client, key: bytes, hidden: Array) -> None:
    def encode() -> Array:
        return hidden

    assert_type(cache.get_or_compute(key, encode, tokens=1024), Array)
    claim = cache.claim(key)
    assert_type(claim, tensord.Claim)
    assert_type(claim.state, Literal["asked", "waiting", "compute", "hit", "alone"])


async def right_with_await(client: tensord.AsyncClient, key: bytes, hidden: Array) -> None:
    async def encode() -> Array:
        return hidden

    assert_type(await client.get(key), tensord.Lease | None)
    assert_type(await client.put(key, hidden), tensord.Put)
    assert_type(await client.get_or_compute(key, lambda: 3), int)
    embedding: Array = await client.get_or_compute(key, encode)
    assert_type(await client.status(), dict[str, Any])
    async with client as entered:
        assert_type(entered, tensord.AsyncClient)
        assert_type(await entered.claim(key, within_s=0.5), tensord.Claim)
    assert_type(await client.on_mode(print), tensord.Subscription)
    del embedding


def wrong_arguments(cache: tensord.Client, ns: tensord.Namespace, key: bytes) -> None:
    cache.get("a string")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    cache.get(key, True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    cache.put(key)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    cache.put(key, 1, ttl_s="60")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    cache.put(key, 1, ttl=60)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    cache.get_into(key, [0.0])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    cache.get_or_compute(key, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    cache.on_mode(lambda: None)  # type: ignore[arg-type, misc]  # pyright: ignore[reportArgumentType]
    cache.clear("my/vlm")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ns.key("encoder", "image", "a string")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tensord.Namespace("my/vlm", "9f3c", "float32", "1")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    tensord.Media(0, 64, "text", bytes(32))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def wrong_results(cache: tensord.Client, client: tensord.AsyncClient, ns: tensord.Namespace, key: bytes) -> None:
    cache.get(key).tree  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
    client.get(key).tree  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    cache.put(key, 1).state = "done"  # type: ignore[assignment, misc]  # pyright: ignore[reportAttributeAccessIssue]
    ns.model = "other"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    found: str = cache.get_or_compute(key, lambda: 3)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    del found


tensord.NoSuchName  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
