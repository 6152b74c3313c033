"""Calls that store payloads, for asyncio: put, reserve, and compute once.

Owns: the asyncio driver of `compute_once`. Does not own: the order of its steps (once.py).
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar, cast

from ....errors import TimedOut
from ...writing.outcomes import Put, wait_for_all
from ...writing.reservation import Reservation
from ..claim import Claim
from ..fields import check_compute, check_flag, check_timeout
from ..once import AwaitAnswer, Compute, Listen, StoreValue
from ..tracing import key_of, span, traced
from .base import AsyncClientBase
from .threads import in_thread, to_its_end

Value = TypeVar("Value")


class AsyncPutCalls(AsyncClientBase):
    """The calls of `AsyncClient` that store."""

    async def put(
        self,
        key: bytes,
        tree: Any,
        *,
        tokens: int = 0,
        ttl_s: float | None = None,
        cost_ms: float = 0.0,
        agent: str = "",
        parent: bytes | None = None,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> Put:
        """Stores a payload under `key`. Returns once the payload is copied; `tree` may change from then on.

        The copy runs in a thread.

        Args:
            tree: dict, list, tuple, str, bytes, int, float, bool, None, numpy arrays and torch tensors, nested.
            tokens: encoder tokens that the payload stands for; they count against max_tokens.
            ttl_s: seconds until the entry expires, more than 0; without it the daemon's default.
            cost_ms: milliseconds that computing the payload took; the policy may weigh them.
            agent: the agent that the entry belongs to; the policy may weigh it.
            parent: key of the entry that this one continues, and is evicted before (`Client.put`).
            wait: return only when every process can read the entry, or the put is refused or lost.
            timeout_s: seconds to wait for room and, with `wait`, for the daemon.

        Returns:
            The put and its state. A refusal or an absent daemon is a state, and raises nothing.

        Raises:
            BadKey: `key` or `parent` is not 32 bytes.
            UnsupportedLeaf: a leaf of `tree` is of another type, or a tensor whose memory was freed (as by FSDP).
            UsageError: `tokens`, `ttl_s`, `cost_ms` or `agent` is out of its range.
            TimedOut: with `wait`, the daemon did not answer in time; the put goes on.
        """
        wait = check_flag("wait", wait)
        deadline = time.monotonic() + check_timeout(timeout_s, self._client.timeout_s)
        put = await to_its_end(
            self._client.put,
            key,
            tree,
            tokens=tokens,
            ttl_s=ttl_s,
            cost_ms=cost_ms,
            agent=agent,
            parent=parent,
            timeout_s=timeout_s,
        )
        if wait and put.state == "sent":
            await in_thread(put.wait, max(0.0, deadline - time.monotonic()))
        return put

    async def put_many(
        self,
        items: Iterable[tuple[bytes, Any]],
        *,
        tokens: int = 0,
        ttl_s: float | None = None,
        cost_ms: float = 0.0,
        agent: str = "",
        parents: Iterable[bytes | None] | None = None,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> list[Put]:
        """As `Client.put_many`. The copies run in a thread."""
        wait = check_flag("wait", wait)
        deadline = time.monotonic() + check_timeout(timeout_s, self._client.timeout_s)
        puts = await to_its_end(
            self._client.put_many,
            items,
            tokens=tokens,
            ttl_s=ttl_s,
            cost_ms=cost_ms,
            agent=agent,
            parents=parents,
            timeout_s=timeout_s,
        )
        if wait and any(put.state == "sent" for put in puts):
            await in_thread(wait_for_all, puts, deadline)
        return puts

    async def reserve(self, spec: Any, *, timeout_s: float | None = None) -> Reservation:
        """As `Client.reserve`."""
        return await in_thread(self._client.reserve, spec, timeout_s=timeout_s)

    @traced("tensord.get_or_compute", "key", key_of)
    async def get_or_compute(
        self,
        key: bytes,
        compute: Callable[[], Value | Awaitable[Value]],
        *,
        tokens: int = 0,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Value:
        """As `Client.get_or_compute`. A coroutine function is awaited; any other function runs in a thread."""
        check_compute(compute)
        steps = self._client.steps(key)
        deadline = time.monotonic() + check_timeout(timeout_s, self._client.timeout_s)
        outcome: Any = None
        error: BaseException | None = None
        try:
            while True:
                try:
                    step = steps.throw(error) if error is not None else steps.send(outcome)
                except StopIteration as done:
                    return cast(Value, done.value)
                outcome, error = None, None
                try:
                    match step:
                        case AwaitAnswer(future):
                            with span("tensord.wait"):
                                outcome = await _answer(future, deadline)
                        case Listen(future, within_s):
                            await _listen(future, min(within_s, deadline - time.monotonic()))
                        case Compute():
                            with span("tensord.compute"):
                                outcome = await _computed(compute)
                        case StoreValue(value, claim, cost_ms):
                            outcome = await to_its_end(
                                self._client.store, key, value, tokens=tokens, ttl_s=ttl_s, claim=claim, cost_ms=cost_ms
                            )
                except BaseException as raised:
                    error = raised
        finally:
            # The error has this frame in its traceback.
            error = None

    async def claim(self, key: bytes, *, within_s: float = 0.0) -> Claim:
        """Asks for the right to compute `key`, and returns before the daemon answers. `Claim.state` gives the answer.

        Args:
            within_s: estimated seconds until the payload is stored, if this client computes it; 0 if unknown. Clients
                that wait for the key read it as `Claim.expected_at`.

        Raises:
            BadKey: `key` is not 32 bytes.
            UsageError: `within_s` is out of its range.
        """
        return await in_thread(self._client.claim, key, within_s=within_s)


async def _computed(compute: Callable[[], Any]) -> Any:
    return await compute() if inspect.iscoroutinefunction(compute) else await in_thread(compute)


async def _answer(future: Future[Any], deadline: float) -> Any:
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise TimedOut("no other client stored the value in time; compute it here") from None


async def _listen(future: Future[Any], within_s: float) -> None:
    settled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def settle(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settled.set)

    future.add_done_callback(settle)
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, within_s)):
            await settled.wait()
