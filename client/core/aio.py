"""The same client for asyncio. Lookups run at once; calls that may wait are awaited.

Owns: the asyncio driver of `compute_once`. Does not own: subscriptions of an event loop (async_subscription.py), nor
anything else; each call runs the synchronous client's method, in a thread if it may wait.
Invariants: a call that waits for an answer of the daemon runs in a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Self, TypeVar, cast

import numpy as np

from ...errors import TimedOut
from ...ipc.steps import AgentStepGraph
from .async_subscription import AsyncSubscription
from .cache import TIMEOUT_S, Client, Keys
from .claim import Claim
from .device_reservation import DeviceReservation
from .entry import Entry, Reuse
from .fields import check_timeout
from .governor import ModeChange, TierState
from .lease import Batch, Lease
from .namespace import Namespace
from .once import AwaitAnswer, Compute, ComputeTally, StoreValue
from .puts import Put
from .reservation import Reservation
from .ring_reader import RingReader
from .workflow import Workflow

Value = TypeVar("Value")


class AsyncClient:
    """`Client` with `await`: the same arguments, results and errors.

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
        self._client = Client(socket, name=name, timeout_s=timeout_s)
        self._timeout_s = self._client.timeout_s
        self._subscriptions: weakref.WeakSet[AsyncSubscription] = weakref.WeakSet()

    @property
    def client(self) -> Client:
        """The synchronous client of this one, for calls that take a `Client`, for example `DeviceCache`."""
        return self._client

    @property
    def connected(self) -> bool:
        """Whether the daemon is there now. Lookups do not depend on it."""
        return self._client.connected

    @property
    def tally(self) -> ComputeTally:
        """Counts of what `get_or_compute` did in this client."""
        return self._client.tally

    async def get(self, key: bytes, *, verify: bool = False) -> Lease | None:
        """Returns a lease on the entry of `key`, or None on a miss. Does not wait: a hit sends no message.

        Args:
            key: 32 bytes, as `Namespace.key` makes them; here and in every call also a bytearray or a memoryview.
            verify: check the payload against its checksum first.

        Raises:
            BadKey: `key` is not 32 bytes.
            Corrupt: `verify` found that the payload differs from the one that was stored.
        """
        return self._client.get(key, verify=verify)

    async def hold(self, key: bytes) -> Lease | None:
        """Returns a lease as `get` does, but counts neither a use, nor a hit, nor a miss.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        return self._client.hold(key)

    async def get_many(self, keys: Keys) -> Batch:
        """Pins many entries together and returns their leases. Does not wait.

        Args:
            keys: a sequence of n keys, n × 32 bytes in one, or a uint8 array of shape (n, 32).

        Returns:
            A batch. Its index is the position of the key; its items are a Lease, or None for a miss.

        Raises:
            BadKey: a key is not 32 bytes.
        """
        return self._client.get_many(keys)

    async def get_into(self, key: bytes, out: np.ndarray[Any, Any]) -> bool:
        """Copies the entry's single array into `out`. The copy runs in a thread.

        Args:
            out: an array of the entry's shape and dtype, which the caller owns.

        Returns:
            False on a miss; `out` is unchanged then.

        Raises:
            BadKey: `key` is not 32 bytes.
            UsageError: the entry is not a single array of `out`'s shape and dtype.
        """
        return await asyncio.to_thread(self._client.get_into, key, out)

    async def contains(self, key: bytes) -> bool:
        """Returns whether a `get` would hit now. Takes no lease and counts no use.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        return self._client.contains(key)

    async def peek(self, key: bytes) -> Entry | None:
        """Returns the entry's metadata, or None on a miss. Counts no use.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        return self._client.peek(key)

    async def reuse(self, key: bytes) -> Reuse | None:
        """Returns how many clients hold the entry and how often it was used, or None on a miss. Counts no use.

        The daemon writes both counts about once a second.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        return self._client.reuse(key)

    async def ring(self) -> RingReader | None:
        """Returns the ring that is attached now, to read entries that another process pins (`RingReader.borrow`).

        None without a daemon so far.
        """
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
        """Stores a payload under `key`. Returns once the payload is copied; `tree` may change from then on.

        The copy runs in a thread.

        Args:
            tree: dict, list, tuple, str, bytes, int, float, bool, None, numpy arrays and torch tensors, nested.
            tokens: encoder tokens that the payload stands for; they count against max_tokens.
            ttl_s: seconds until the entry expires, more than 0; without it the daemon's default.
            cost_ms: milliseconds that computing the payload took; the policy may weigh them.
            agent: the agent that the entry belongs to; the policy may weigh it.
            wait: return only when every process can read the entry, or the put is refused or lost.
            timeout_s: seconds to wait for room in the inbox and, with `wait`, for the daemon.

        Returns:
            The put and its state. A refusal or an absent daemon is a state, and raises nothing.

        Raises:
            BadKey: `key` is not 32 bytes.
            UnsupportedLeaf: a leaf of `tree` is of another type.
            UsageError: `tokens`, `ttl_s`, `cost_ms` or `agent` is out of its range.
            TimedOut: with `wait`, the daemon did not answer in time; the put goes on.
        """
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
        """Returns arrays in shared memory to write a payload into, which saves one copy.

        Args:
            spec: a tree as for `put`, with `tensord.Spec(shape, dtype)` in place of each array to be written.
            timeout_s: seconds to wait for room in the inbox.

        Raises:
            UnsupportedLeaf: a leaf of `spec` is of a type that `put` does not take.
            ObjectTooLarge, DaemonUnavailable, TimedOut: there is no room; the message says why.
        """
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
        """As `Client.get_or_compute`. A coroutine function is awaited; any other function runs in a thread."""
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
                    case AwaitAnswer(future):
                        outcome = await self._answer(future, deadline)
                    case Compute() if inspect.iscoroutinefunction(compute):
                        outcome = await compute()
                    case Compute():
                        outcome = await asyncio.to_thread(compute)
                    case StoreValue(value, claim, cost_ms):
                        outcome = await asyncio.to_thread(
                            self._client.store, key, value, tokens=tokens, ttl_s=ttl_s, claim=claim, cost_ms=cost_ms
                        )
            except BaseException as raised:
                error = raised

    async def claim(self, key: bytes, *, within_s: float = 0.0) -> Claim:
        """Asks for the right to compute `key`, and returns before the daemon answers. `Claim.state` gives the answer.

        Args:
            within_s: estimated seconds until the payload is stored, if this client computes it; 0 if unknown. Clients
                that wait for the key read it as `Claim.expected_at`.

        Raises:
            BadKey: `key` is not 32 bytes.
            UsageError: `within_s` is out of its range.
        """
        return await asyncio.to_thread(self._client.claim, key, within_s=within_s)

    async def touch(self, *keys: bytes) -> int:
        """Renews the recency of entries, and the time to live that each was put with.

        Returns:
            How many of the entries are there.

        Raises:
            BadKey: a key is not 32 bytes.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return await asyncio.to_thread(self._client.touch, *keys)

    async def evict(self, *keys: bytes) -> int:
        """Removes entries. Leases on them stay valid.

        Returns:
            How many of the entries were there.

        Raises:
            BadKey: a key is not 32 bytes.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return await asyncio.to_thread(self._client.evict, *keys)

    async def clear(self, namespace: Namespace | None = None) -> int:
        """Removes all entries of a namespace; without a namespace, all entries of the ring.

        Returns:
            How many entries there were.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return await asyncio.to_thread(self._client.clear, namespace)

    async def current(self, namespace: Namespace) -> Namespace:
        """Returns the namespace at its current generation. Sends no message. Call it before you load the weights.

        Without a daemon so far, or if no process invalidated it, the namespace comes back as it was given.
        """
        return self._client.current(namespace)

    async def invalidate(self, namespace: Namespace) -> Namespace:
        """Drops a namespace's entries because its weights have changed. Call it once the new weights are in place.

        The daemon refuses puts and claims under the old generation from now on, also after a restart.

        Returns:
            The namespace at its new generation.

        Raises:
            LimitReached: namespaces_max, or the namespace is at its last generation.
            DaemonUnavailable, TimedOut: the daemon did not answer. It may have done it; a second call does no harm.
        """
        return await asyncio.to_thread(self._client.invalidate, namespace)

    async def pin(self, key: bytes, for_s: float) -> float:
        """Keeps an entry from being evicted for at most `for_s` seconds, without a lease.

        Returns:
            The seconds that the daemon granted, at most its own limit; 0 on a miss.

        Raises:
            BadKey: `key` is not 32 bytes.
            UsageError: `for_s` is out of its range.
            LimitReached: pins_per_client_max or pinned_share_max.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return await asyncio.to_thread(self._client.pin, key, for_s)

    async def unpin(self, key: bytes) -> None:
        """Ends a pin before its time.

        Raises:
            BadKey: `key` is not 32 bytes.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        await asyncio.to_thread(self._client.unpin, key)

    async def on_mode(
        self, callback: Callable[[ModeChange], object] | None = None, gauge: str | None = None
    ) -> AsyncSubscription:
        """As `Client.on_mode`. The event loop runs `callback`, which may be a coroutine function; or iterate over the
        result.

        `callback` is called until the result or this client is closed, or the loop ends.
        """
        subscription = await AsyncSubscription().open(self._client, callback, gauge)
        self._subscriptions.add(subscription)
        return subscription

    async def modes(self) -> dict[str, TierState]:
        """Returns how full each tier is, in bytes: a device by its name, the ring by "host".

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return await asyncio.to_thread(self._client.modes)

    async def workflow(self, name: str, graph: AgentStepGraph) -> Workflow:
        """Tells the daemon which agents run in which order, until `Workflow.end`. Use the result in a `with`.

        Without a daemon, sends the graph once there is one.

        Raises:
            UsageError: `name` is no valid name.
            BadGraph: the steps cannot be run in any order, or another client has a workflow of this name.
            LimitReached: workflows_max or workflow_steps_max.
        """
        return await asyncio.to_thread(self._client.workflow, name, graph)

    async def request_arrived(self, device: str, count: int = 1) -> None:
        """Reports `count` new inference requests, for the queueing floor of `device`. Without a daemon, does nothing.

        Raises:
            UsageError: a value is out of its range; the message names it.
        """
        self._client.request_arrived(device, count)

    async def request_completed(self, device: str, service_s: float, blocks: int) -> None:
        """Reports an inference request served in `service_s` seconds. Without a daemon, does nothing.

        Args:
            blocks: blocks of the device's cache that the request used, of `queueing.block_bytes` bytes each.

        Raises:
            UsageError: a value is out of its range; the message names it.
        """
        self._client.request_completed(device, service_s, blocks)

    async def reserve_device(
        self, device: str, size_bytes: int, for_s: float = 30.0, *, timeout_s: float | None = None
    ) -> DeviceReservation:
        """Reserves `size_bytes` of a device's free memory against other processes. Allocates nothing.

        Use the result in a `with`, and allocate in it.

        Args:
            for_s: seconds until the reservation ends by itself; the daemon may set a lower limit.
            timeout_s: seconds to wait for the daemon's answer.

        Raises:
            UsageError: a value is out of its range.
            DeviceFull: less is free; the message says how much.
            NoGauge: nothing measures how full the device is.
            LimitReached: reservations_max.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return await asyncio.to_thread(self._client.reserve_device, device, size_bytes, for_s, timeout_s=timeout_s)

    async def wait_connected(self, timeout_s: float | None = None) -> bool:
        """Waits until the daemon is there, for at most `timeout_s` seconds; returns False if it is still not there."""
        return await asyncio.to_thread(self._client.wait_connected, timeout_s)

    async def status(self) -> dict[str, Any]:
        """Returns the daemon's status, as `tensorctl status --json` prints it.

        Raises:
            DaemonUnavailable, SocketForbidden, TimedOut: the daemon did not answer.
        """
        return await asyncio.to_thread(self._client.status)

    async def close(self) -> None:
        """Ends the connection and all subscriptions. Leases and their views stay valid for as long as they live."""
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
            raise TimedOut("no other client stored the value in time; compute it here") from None
