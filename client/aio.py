"""The same client for asyncio. Lookups are too short to wait for; whatever may wait is awaited.

Owns nothing but the difference: it drives the same steps, and waits on the loop instead of in the thread.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Self, TypeVar, cast

import numpy as np

from ..errors import TimedOut
from .cache import TIMEOUT_S, Client, Keys
from .lease import Batch, Lease
from .namespace import Namespace
from .once import Answer, Compute, Store, Tally
from .puts import Put
from .reservation import Reservation
from .view import Entry

Value = TypeVar("Value")


class AsyncClient:
    """`Client` with `await`. See there for arguments, results and errors."""

    def __init__(
        self, socket: str | os.PathLike[str] | None = None, *, name: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._client = Client(socket, name=name, timeout_s=timeout_s)
        self._timeout_s = timeout_s

    @property
    def connected(self) -> bool:
        return self._client.connected

    @property
    def tally(self) -> Tally:
        return self._client.tally

    async def get(self, key: bytes, *, verify: bool = False) -> Lease | None:
        return self._client.get(key, verify=verify)

    async def get_many(self, keys: Keys) -> Batch:
        return self._client.get_many(keys)

    async def get_into(self, key: bytes, out: np.ndarray[Any, Any]) -> bool:
        return await asyncio.to_thread(self._client.get_into, key, out)

    async def contains(self, key: bytes) -> bool:
        return self._client.contains(key)

    async def peek(self, key: bytes) -> Entry | None:
        return self._client.peek(key)

    async def put(
        self,
        key: bytes,
        tree: Any,
        *,
        tokens: int = 0,
        ttl_s: float | None = None,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> Put:
        return await asyncio.to_thread(
            self._client.put, key, tree, tokens=tokens, ttl_s=ttl_s, wait=wait, timeout_s=timeout_s
        )

    async def reserve(self, spec: Any, *, timeout_s: float | None = None) -> Reservation:
        return await asyncio.to_thread(self._client.reserve, spec, timeout_s=timeout_s)

    async def get_or_compute(
        self,
        key: bytes,
        compute: Callable[[], Value | Awaitable[Value]],
        *,
        tokens: int = 0,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Value:
        """As `Client.get_or_compute`; a coroutine function is awaited, any other function runs in a thread."""
        steps = self._client.steps(key)
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        outcome: Any = None
        error: BaseException | None = None
        while True:
            try:
                step = steps.throw(error) if error is not None else steps.send(outcome)
            except StopIteration as done:
                return cast(Value, done.value)
            outcome, error = None, None
            try:
                match step:
                    case Answer(future):
                        outcome = await self._answer(future, deadline)
                    case Compute() if inspect.iscoroutinefunction(compute):
                        outcome = await compute()
                    case Compute():
                        outcome = await asyncio.to_thread(compute)
                    case Store(value, claim):
                        outcome = await asyncio.to_thread(
                            self._client.store, key, value, tokens=tokens, ttl_s=ttl_s, claim=claim
                        )
            except BaseException as raised:
                error = raised

    async def touch(self, *keys: bytes) -> int:
        return await asyncio.to_thread(self._client.touch, *keys)

    async def evict(self, *keys: bytes) -> int:
        return await asyncio.to_thread(self._client.evict, *keys)

    async def clear(self, namespace: Namespace | None = None) -> int:
        return await asyncio.to_thread(self._client.clear, namespace)

    async def invalidate(self, namespace: Namespace) -> Namespace:
        return await asyncio.to_thread(self._client.invalidate, namespace)

    async def pin(self, key: bytes, for_s: float) -> float:
        return await asyncio.to_thread(self._client.pin, key, for_s)

    async def unpin(self, key: bytes) -> None:
        await asyncio.to_thread(self._client.unpin, key)

    async def wait_connected(self, timeout_s: float | None = None) -> bool:
        return await asyncio.to_thread(self._client.wait_connected, timeout_s)

    async def status(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.status)

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> Self:
        await self.wait_connected()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _answer(self, future: Future[Any], deadline: float) -> Any:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise TimedOut("nobody computed the value in time; it is computed here") from None
