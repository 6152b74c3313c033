"""The same client for asyncio. Lookups run at once; calls that may wait are awaited.

Owns: which call of `Client` runs in a thread of the loop's default executor, and what a cancelled task leaves behind.
Does not own: arguments, results and errors, which are those of `Client` but where a docstring says otherwise.
Invariants: a call that waits for an answer of the daemon runs in a thread. A lookup waits in a thread for what this
client has just put. A call that its task was told the end of never runs later.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar, cast

from ..arguments.checks import check_key, check_timeout
from ..computing.once import Computation
from ..link.absence import attach_limit_s
from ..pressure.device_reservation import DeviceReservation
from ..threads.aside import no_thread
from ..writing.outcomes import Put, wait_for_all
from .client import Client
from .entries import TIMEOUT_S, joined_keys

Value = TypeVar("Value")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
Call: TypeAlias = Callable[Concatenate[Client, Arguments], Result]
AsyncCall: TypeAlias = Callable[Concatenate["AsyncClient", Arguments], Coroutine[Any, Any, Result]]


async def _in_thread(call: Callable[Arguments, Result], /, *args: Arguments.args, **named: Arguments.kwargs) -> Result:
    """As `asyncio.to_thread`. A cancelled task leaves a call that has begun to itself. Raises ProcessLimit, and does
    not call, if this process can start no thread."""
    return await asyncio.wrap_future(_begun(functools.partial(call, *args, **named)))


async def _to_its_end(call: Callable[Arguments, Result], /, *args: Arguments.args, **named: Arguments.kwargs) -> Result:
    """As `_in_thread`, for a call that uses the caller's memory: a cancelled task waits until a call that has begun is
    over, so that the memory is the task's again."""
    under_way = _begun(functools.partial(call, *args, **named))
    ended = asyncio.wrap_future(under_way)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        under_way.cancel()
        while not ended.done():
            try:
                await asyncio.wait([ended])
            except asyncio.CancelledError:
                continue
        if not ended.cancelled():
            ended.exception()  # asked for, so that asyncio does not complain that nobody did
        raise
    finally:
        # An error has this frame in its traceback, and these have the error.
        del under_way, ended


def _carry_out(holder: list[Future[Result]], call: Callable[[], Result]) -> None:
    """Takes the future out of `holder`: an error has this frame and that of the executor, which has the arguments, in
    its traceback, and must not find itself from there."""
    outcome = holder.pop()
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)
    finally:
        del outcome


def _begun(call: Callable[[], Result]) -> Future[Result]:
    """The future of a call that a thread of the loop's executor carries out. Raises ProcessLimit."""
    outcome: Future[Result] = Future()
    context = contextvars.copy_context()

    try:
        asyncio.get_running_loop().run_in_executor(None, _carry_out, [outcome], functools.partial(context.run, call))
    except RuntimeError as error:
        # The call is queued although no thread could be started for it. Another thread may have taken it already.
        if outcome.cancel():
            if "thread" in str(error):
                raise no_thread() from None
            raise
    return outcome


def _like(call: Call[Arguments, Result], method: Any) -> AsyncCall[Arguments, Result]:
    """`method`, which takes and returns what a call of `Client` does, with its docstring."""
    return cast("AsyncCall[Arguments, Result]", functools.wraps(call)(method))


def _at_once(call: Call[Arguments, Result]) -> AsyncCall[Arguments, Result]:
    """A call that sends no message, or waits for none."""

    async def method(self: AsyncClient, *args: Any, **options: Any) -> Any:
        return call(self.client, *args, **options)

    return _like(call, method)


def _lookup(
    call: Call[Arguments, Result], keys: Callable[[Any], Iterable[bytes]] = lambda key: [check_key(key)]
) -> AsyncCall[Arguments, Result]:
    """A lookup of what `keys` makes of its first argument."""

    async def method(self: AsyncClient, *args: Any, **options: Any) -> Any:
        puts = self.client.link.puts
        first = args[0] if args else options.get("key", options.get("keys"))
        if (awaited := puts.awaited) and first is not None and (own := [key for key in keys(first) if key in awaited]):
            await _in_thread(puts.wait_for_puts, own)
        return call(self.client, *args, **options)

    return _like(call, method)


def _threaded(call: Call[Arguments, Result], run: Callable[..., Any] = _in_thread) -> AsyncCall[Arguments, Result]:
    """A call that may wait, in a thread."""

    async def method(self: AsyncClient, *args: Any, **options: Any) -> Any:
        return await run(call, self.client, *args, **options)

    return _like(call, method)


def _stored(call: Call[Arguments, Result]) -> AsyncCall[Arguments, Result]:
    """A call that copies payloads, and with `wait` waits for their outcomes. A cancelled task waits for copies only."""

    async def method(
        self: AsyncClient, *args: Any, wait: bool = False, timeout_s: float | None = None, **options: Any
    ) -> Any:
        limit_s = check_timeout(timeout_s, self.client.timeout_s)
        deadline = time.monotonic() + limit_s
        result: Any = await _to_its_end(cast(Any, call), self.client, *args, timeout_s=timeout_s, **options)
        puts = [result] if isinstance(result, Put) else result
        if wait and any(put.state == "sent" for put in puts):
            await _in_thread(wait_for_all, puts, deadline, limit_s)
        return result

    return _like(call, method)


async def _reserved(self: AsyncClient, *args: Any, **options: Any) -> DeviceReservation:
    asked = _begun(functools.partial(self.client.reserve_device, *args, **options))
    try:
        return await asyncio.wrap_future(asked)
    except asyncio.CancelledError:
        # Its thread may have the reservation by now, or get it, and nobody to give it to.
        asked.add_done_callback(_released)
        raise
    finally:
        # An error has this frame in its traceback.
        del asked


def _released(reserved: Future[DeviceReservation]) -> None:
    if not reserved.cancelled() and reserved.exception() is None:
        reserved.result().release()


class AsyncClient:
    """`Client` with `await`: the same arguments, results and errors.

    Limit the time of a call by `timeout_s` or `asyncio.timeout`. On Python 3.11 `asyncio.wait_for` may leave a put
    running if the waiting task is cancelled just when its time is over; an array that is changed then may be stored
    half changed.

    `client`: the synchronous client of this one, for calls that take a `Client`, for example `DeviceCache`.
    `tally`: as of `Client`.

    Example:
        >>> import asyncio
        >>> async def main() -> None:
        ...     async with tensord.AsyncClient() as client:
        ...         await client.put(key, np.arange(3), wait=True)
        ...         with await client.get(key) as lease:
        ...             print(lease.tree)
        >>> asyncio.run(main())
        [0 1 2]
    """

    def __init__(
        self, socket: str | os.PathLike[str] | None = None, *, name: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.client = Client(socket, name=name, timeout_s=timeout_s)
        self.tally = self.client.tally

    @property
    def connected(self) -> bool:
        """Whether the daemon is there now. Lookups do not depend on it."""
        return self.client.connected

    async def close(self) -> None:
        """Ends the connection and all subscriptions. Leases and their views stay valid for as long as they live."""
        await _in_thread(self.client.close)

    async def __aenter__(self) -> Self:
        link = self.client.link
        await self.wait_connected(attach_limit_s(link.path, self.client.timeout_s))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- as the calls of Client

    get = _lookup(Client.get)
    hold = _lookup(Client.hold)
    contains = _lookup(Client.contains)
    peek = _lookup(Client.peek)
    get_many = _lookup(Client.get_many, lambda keys: (key.tobytes() for key in joined_keys(keys)))
    ring = _at_once(Client.ring)
    current = _at_once(Client.current)
    request_arrived = _at_once(Client.request_arrived)
    request_completed = _at_once(Client.request_completed)
    get_into = _threaded(Client.get_into, _to_its_end)
    put = _stored(Client.put)
    put_many = _stored(Client.put_many)
    wait_connected = _threaded(Client.wait_connected)
    status = _threaded(Client.status)
    reserve = _threaded(Client.reserve)
    claim = _threaded(Client.claim)
    touch = _threaded(Client.touch)
    evict = _threaded(Client.evict)
    clear = _threaded(Client.clear)
    invalidate = _threaded(Client.invalidate)
    pin = _threaded(Client.pin)
    unpin = _threaded(Client.unpin)
    modes = _threaded(Client.modes)
    on_mode = _threaded(Client.on_mode)
    workflow = _threaded(Client.workflow)
    reserve_device = _like(Client.reserve_device, _reserved)

    # ---- with a difference

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
        deadline = time.monotonic() + check_timeout(timeout_s, self.client.timeout_s)
        return cast(Value, await _Awaited(self.client, key, compute, tokens, ttl_s, deadline).run())


class _Awaited(Computation):
    """One `get_or_compute`, carried out in the event loop."""

    async def listen(self, future: Future[Any], within_s: float) -> None:
        settled = asyncio.Event()
        loop = asyncio.get_running_loop()

        def settle(_: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settled.set)

        future.add_done_callback(settle)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(within_s, self._deadline - time.monotonic()))):
                await settled.wait()

    async def compute(self) -> Any:
        return await (self._compute() if inspect.iscoroutinefunction(self._compute) else _in_thread(self._compute))

    async def store(self, put: Callable[[], Put]) -> Put:
        return await _to_its_end(put)
