"""The same client for asyncio. Lookups are too short to wait for; whatever may wait is awaited.

Owns nothing but the difference: it drives the same steps, and waits on the loop instead of in the thread.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Self, TypeVar, cast

import numpy as np

from ..errors import TimedOut
from ..ipc.steps import AgentStepGraph
from .cache import TIMEOUT_S, Client, Keys
from .claim import Claim
from .device.reservation import DeviceReservation
from .fields import check_timeout
from .governor import CHANGES_MAX, ModeChange, Subscription, TierState
from .lease import Batch, Lease
from .namespace import Namespace
from .once import Answer, Compute, Store, Tally
from .puts import Put
from .reservation import Reservation
from .ring import Ring
from .view import Entry, Reuse
from .workflow import Workflow

Value = TypeVar("Value")
_log = logging.getLogger("tensord")


class AsyncSubscription:
    """Changes of modes, for one loop: `async for change in subscription`, until it is closed.

    `dropped`: changes that nobody took, since CHANGES_MAX others had come.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changes: deque[ModeChange] = deque()
        self._arrived = asyncio.Event()
        self._inner: Subscription | None = None
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self._dropped = 0

    @property
    def states(self) -> dict[str, TierState]:
        """See `Subscription.states`."""
        return self._inner.states if self._inner is not None else {}

    @property
    def dropped(self) -> int:
        return self._dropped + (self._inner.dropped if self._inner is not None else 0)

    def close(self) -> None:
        """Ends it; whoever iterates gets what has come, and then the end."""
        self._closed = True
        if self._inner is not None:
            self._inner.close()
        self._arrived.set()

    async def open(self, client: Client, callback: Callable[[ModeChange], object] | None, gauge: str | None) -> Self:
        """Subscribes. For the library."""
        self._inner = await asyncio.to_thread(client.on_mode, self._hear, gauge)
        if callback is not None:
            self._task = asyncio.create_task(self._call(callback), name="tensord-modes")
        return self

    def __aiter__(self) -> AsyncIterator[ModeChange]:
        return self

    async def __anext__(self) -> ModeChange:
        while not self._changes:
            if self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._changes.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        if self._task is not None and self._task is not asyncio.current_task():
            await self._task

    def _hear(self, change: ModeChange) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take, change)
        except RuntimeError:
            # The loop has ended, and with it whoever wanted to know.
            self._closed = True
            if self._inner is not None:
                self._inner.close()

    def _take(self, change: ModeChange) -> None:
        if len(self._changes) >= CHANGES_MAX:
            self._changes.popleft()
            self._dropped += 1
        self._changes.append(change)
        self._arrived.set()

    async def _call(self, callback: Callable[[ModeChange], object]) -> None:
        async for change in self:
            if self._closed:
                return
            try:
                called = callback(change)
                if inspect.isawaitable(called):
                    await called
            except Exception:
                _log.exception("on_mode: the callback failed at %s of %s", change.mode, change.gauge)


class AsyncClient:
    """`Client` with `await`. See there for arguments, results and errors."""

    def __init__(
        self, socket: str | os.PathLike[str] | None = None, *, name: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._client = Client(socket, name=name, timeout_s=timeout_s)
        self._timeout_s = self._client.timeout_s
        self._subscriptions: weakref.WeakSet[AsyncSubscription] = weakref.WeakSet()

    @property
    def client(self) -> Client:
        """The client behind it, for what takes one, as `DeviceCache` does."""
        return self._client

    @property
    def connected(self) -> bool:
        return self._client.connected

    @property
    def tally(self) -> Tally:
        return self._client.tally

    async def get(self, key: bytes, *, verify: bool = False) -> Lease | None:
        return self._client.get(key, verify=verify)

    async def hold(self, key: bytes) -> Lease | None:
        return self._client.hold(key)

    async def get_many(self, keys: Keys) -> Batch:
        return self._client.get_many(keys)

    async def get_into(self, key: bytes, out: np.ndarray[Any, Any]) -> bool:
        return await asyncio.to_thread(self._client.get_into, key, out)

    async def contains(self, key: bytes) -> bool:
        return self._client.contains(key)

    async def peek(self, key: bytes) -> Entry | None:
        return self._client.peek(key)

    async def reuse(self, key: bytes) -> Reuse | None:
        return self._client.reuse(key)

    async def ring(self) -> Ring | None:
        return self._client.ring()

    async def put(
        self,
        key: bytes,
        tree: Any,
        *,
        tokens: int = 0,
        ttl_s: float | None = None,
        cost_ms: float = 0.0,
        agent: str = "",
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> Put:
        return await asyncio.to_thread(
            self._client.put,
            key,
            tree,
            tokens=tokens,
            ttl_s=ttl_s,
            cost_ms=cost_ms,
            agent=agent,
            wait=wait,
            timeout_s=timeout_s,
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
        deadline = time.monotonic() + check_timeout(timeout_s, self._timeout_s)
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
                    case Store(value, claim, cost_ms):
                        outcome = await asyncio.to_thread(
                            self._client.store, key, value, tokens=tokens, ttl_s=ttl_s, claim=claim, cost_ms=cost_ms
                        )
            except BaseException as raised:
                error = raised

    async def claim(self, key: bytes) -> Claim:
        return await asyncio.to_thread(self._client.claim, key)

    async def touch(self, *keys: bytes) -> int:
        return await asyncio.to_thread(self._client.touch, *keys)

    async def evict(self, *keys: bytes) -> int:
        return await asyncio.to_thread(self._client.evict, *keys)

    async def clear(self, namespace: Namespace | None = None) -> int:
        return await asyncio.to_thread(self._client.clear, namespace)

    async def current(self, namespace: Namespace) -> Namespace:
        return self._client.current(namespace)

    async def invalidate(self, namespace: Namespace) -> Namespace:
        return await asyncio.to_thread(self._client.invalidate, namespace)

    async def pin(self, key: bytes, for_s: float) -> float:
        return await asyncio.to_thread(self._client.pin, key, for_s)

    async def unpin(self, key: bytes) -> None:
        await asyncio.to_thread(self._client.unpin, key)

    async def on_mode(
        self, callback: Callable[[ModeChange], object] | None = None, gauge: str | None = None
    ) -> AsyncSubscription:
        """As `Client.on_mode`, with callbacks run by this loop, coroutine functions too; or iterate over the result.

        Keep the result, or close it: a callback is called until then, or until the loop ends.
        """
        subscription = await AsyncSubscription().open(self._client, callback, gauge)
        self._subscriptions.add(subscription)
        return subscription

    async def modes(self) -> dict[str, TierState]:
        return await asyncio.to_thread(self._client.modes)

    async def workflow(self, name: str, graph: AgentStepGraph) -> Workflow:
        return await asyncio.to_thread(self._client.workflow, name, graph)

    async def request_arrived(self, device: str, count: int = 1) -> None:
        self._client.request_arrived(device, count)

    async def request_completed(self, device: str, service_s: float, blocks: int) -> None:
        self._client.request_completed(device, service_s, blocks)

    async def reserve_device(
        self, device: str, size_bytes: int, for_s: float = 30.0, *, timeout_s: float | None = None
    ) -> DeviceReservation:
        return await asyncio.to_thread(self._client.reserve_device, device, size_bytes, for_s, timeout_s=timeout_s)

    async def wait_connected(self, timeout_s: float | None = None) -> bool:
        return await asyncio.to_thread(self._client.wait_connected, timeout_s)

    async def status(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.status)

    async def close(self) -> None:
        for subscription in list(self._subscriptions):
            subscription.close()
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
