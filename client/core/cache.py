"""The synchronous client: the class that an inference process imports.

Owns: the public calls and their default arguments. Lookups read shared memory through the View; calls that change
something send messages over the Link.
Does not own: the connection (link.py), puts in flight (puts.py), reads (view.py).
Invariants: while the daemon is away, lookups go on, and puts end as "lost". Only calls that need an answer of the
daemon raise DaemonUnavailable.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import numpy as np

from ...errors import BadKey, ObjectTooLarge, UsageError
from ...ipc import messages
from ...ipc.blocking import BlockingChannel
from ...ipc.connection import Connection
from ...ipc.places import STATUS_NAME, control_socket, status_socket
from ...ipc.schema import NAME_CHARS_MAX
from ...shm.layout import KEY_BYTES
from ...shm.payload import Payload
from ...shm.recipe import recipe
from ...shm.tree import encode, encode_spec
from . import device_reservation, forks, queueing
from .aside import aside
from .claim import Claim
from .device_reservation import DeviceReservation
from .entry import Entry, Reuse
from .fields import check_key, check_name, check_seconds, check_socket, check_timeout, printable
from .governor import GovernorListener, ModeChange, Subscription, TierState
from .inbox import Region
from .lease import Batch, Lease
from .link import Link
from .namespace import Namespace
from .once import AwaitAnswer, Compute, ComputeTally, Steps, StoreValue, compute_once
from .put_options import PutOptions
from .puts import Put
from .reservation import Reservation
from .ring_reader import RingReader
from .view import View
from .workflow import Workflow

if TYPE_CHECKING:
    from ...ipc.steps import AgentStepGraph

Value = TypeVar("Value")
Keys = Sequence[bytes] | bytes | np.ndarray[Any, Any]
TIMEOUT_S: Final = 5.0


class Client:
    """A process's connection to the host's cache. Thread-safe, and usable in a forked child.

    Args:
        socket: path of the daemon's control socket. Default: $TENSORD_SOCKET, else the user's own socket, else the
            system's.
        name: the name that `tensorctl clients` shows. Default: the program's name.
        timeout_s: default time limit of each call, in seconds. This and every other `timeout_s` is a number from 0 to
            ten years, or infinity for no limit; other values raise UsageError.
        attach_s: seconds that the constructor waits for the daemon. Default: `timeout_s`. The client attaches later,
            too.
        required: raise if there is no daemon. Default: every lookup is a miss until there is one.

    Raises:
        UsageError: `socket`, `name`, `timeout_s` or `attach_s` is out of its range.
        DaemonUnavailable, SocketForbidden, VersionMismatch: with `required`, the client could not attach.

    Example:
        >>> cache.put(key, {"hidden": np.zeros((576, 64), np.float32)}, tokens=576, wait=True).state
        'stored'
        >>> with cache.get(key) as lease:
        ...     lease.tree["hidden"].shape
        (576, 64)
        >>> cache.get(bytes(32)) is None
        True
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        timeout_s: float = TIMEOUT_S,
        attach_s: float | None = None,
        required: bool = False,
    ) -> None:
        path = check_socket(socket) if socket is not None else control_socket(os.environ)
        self._status_path = path.with_name(STATUS_NAME) if socket is not None else status_socket(os.environ)
        self._timeout_s = check_timeout(timeout_s, TIMEOUT_S)
        attach_s = check_timeout(attach_s, self._timeout_s, "attach_s")
        if name:
            check_name("name", name, NAME_CHARS_MAX)
        self._tally = ComputeTally()
        program = printable(Path(sys.argv[0] or "python").name)[:NAME_CHARS_MAX]
        self._link = Link(path, name or program, self._timeout_s)
        self._governor = GovernorListener(self._link)
        self._closed = weakref.finalize(self, self._link.close)
        forks.watch(self._link)
        self._link.start(attach_s)
        if required and not self._link.connected:
            self.close()
            raise self._link.unavailable()

    # ---- lookups

    def get(self, key: bytes, *, verify: bool = False) -> Lease | None:
        """Returns a lease on the entry of `key`, or None on a miss. A hit sends no message and makes no system call.

        Args:
            key: 32 bytes, as `Namespace.key` makes them; here and in every call also a bytearray or a memoryview.
            verify: check the payload against its checksum first.

        Raises:
            BadKey: `key` is not 32 bytes.
            Corrupt: `verify` found that the payload differs from the one that was stored.
        """
        view = self._link.view
        if view is not None and not verify:
            return view.get(key)
        key = check_key(key)
        view = view or self._attach()
        if view is None:
            return None
        return view.verified(key) if verify else view.get(key)

    def hold(self, key: bytes) -> Lease | None:
        """Returns a lease as `get` does, but counts neither a use, nor a hit, nor a miss.

        A use would delay the entry's eviction.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        key = check_key(key)
        view = self._link.view or self._attach()
        return view.hold(key) if view is not None else None

    def get_many(self, keys: Keys) -> Batch:
        """Pins many entries together and returns their leases. Each lease is made when it is indexed.

        Args:
            keys: a sequence of n keys, n × 32 bytes in one, or a uint8 array of shape (n, 32).

        Returns:
            A batch. Its index is the position of the key; its items are a Lease, or None for a miss.

        Raises:
            BadKey: a key is not 32 bytes.
        """
        joined = _joined(keys)
        view = self._link.view or self._attach()
        return view.get_many(joined) if view is not None else Batch.of_misses(len(joined))

    def get_into(self, key: bytes, out: np.ndarray[Any, Any]) -> bool:
        """Copies the entry's single array into `out`.

        Args:
            out: an array of the entry's shape and dtype, which the caller owns.

        Returns:
            False on a miss; `out` is unchanged then.

        Raises:
            BadKey: `key` is not 32 bytes.
            UsageError: the entry is not a single array of `out`'s shape and dtype.
        """
        lease = self.get(key)
        if lease is None:
            return False
        found = lease.tree
        if not isinstance(found, np.ndarray) or found.shape != out.shape or found.dtype != out.dtype:
            described = f"{found.dtype}{list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
            raise UsageError(f"out is {out.dtype}{list(out.shape)}, the entry is {described}; pass an out that matches")
        np.copyto(out, found)
        return True

    def contains(self, key: bytes) -> bool:
        """Returns whether a `get` would hit now. Takes no lease and counts no use.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        key = check_key(key)
        view = self._link.view or self._attach()
        return view is not None and view.contains(key)

    def peek(self, key: bytes) -> Entry | None:
        """Returns the entry's metadata, or None on a miss. Counts no use.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        key = check_key(key)
        view = self._link.view or self._attach()
        return view.peek(key) if view is not None else None

    def reuse(self, key: bytes) -> Reuse | None:
        """Returns how many clients hold the entry and how often it was used, or None on a miss. Counts no use.

        Sends no message. The daemon writes both counts about once a second.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        key = check_key(key)
        view = self._link.view or self._attach()
        return view.reuse(key) if view is not None else None

    def ring(self) -> RingReader | None:
        """Returns the ring that is attached now, to read entries that another process pins (`RingReader.borrow`).

        None without a daemon so far.
        """
        view = self._link.view or self._attach()
        return view.ring if view is not None else None

    # ---- puts

    def put(
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

        Args:
            tree: dict, list, tuple, str, bytes, int, float, bool, None, numpy arrays and torch tensors, nested.
            tokens: encoder tokens that the payload stands for; they count against max_tokens.
            ttl_s: seconds until the entry expires, more than 0. Default: the daemon's setting. Only `touch` renews
                them; lookups and further puts of the key do not. Nothing expires while no daemon runs.
            cost_ms: milliseconds that computing the payload took. Policies that weigh cost keep expensive entries
                longer.
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
        key = check_key(key)
        deadline = self._deadline(timeout_s)
        put = self._put(key, tree, PutOptions(tokens, ttl_s, None, cost_ms, agent), deadline)
        return put.wait(max(0.0, deadline - time.monotonic())) if wait else put

    def reserve(self, spec: Any, *, timeout_s: float | None = None) -> Reservation:
        """Returns arrays in shared memory to write a payload into, which saves one copy.

        Args:
            spec: a tree as for `put`, with `tensord.Spec(shape, dtype)` in place of each array to be written.
            timeout_s: seconds to wait for room in the inbox.

        Raises:
            UnsupportedLeaf: a leaf of `spec` is of a type that `put` does not take.
            ObjectTooLarge, DaemonUnavailable, TimedOut: there is no room; the message says why.
        """
        payload = encode_spec(spec, depth_max=self._link.limits.tree_depth_max)
        return aside(partial(self._reserve, payload, self._deadline(timeout_s)))

    def _reserve(self, payload: Payload, deadline: float) -> Reservation:
        region = self._link.puts.reserve(payload.payload_bytes, deadline)
        try:
            memory = region.hand_out()
            payload.write_into(memory)
            tree = recipe(payload.header).view(memory)
        except BaseException:
            region.release()
            raise

        def commit(held: Region, key: bytes, options: PutOptions, timeout_s: float) -> tuple[Put, float]:
            try:
                key = check_key(key)
                options = options.checked()
                deadline = self._deadline(timeout_s)
            except BaseException:
                held.release()
                raise
            put = self._link.puts.commit(
                key, held, payload.payload_bytes, len(payload.header), options, deadline=deadline
            )
            return put, deadline

        return Reservation(tree, region, commit)

    # ---- compute once

    def get_or_compute(
        self,
        key: bytes,
        compute: Callable[[], Value],
        *,
        tokens: int = 0,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Value:
        """Returns the payload of `key`; if it is missing, one process on the host computes and stores it.

        Other callers of the same key wait for that process, up to `timeout_s`, and then compute the value themselves.
        An exception of `compute` is raised in this caller only; the daemon then grants the claim to one of the waiting
        clients.

        Args:
            compute: called without arguments, at most once; returns a tree as `put` takes it.
            tokens, ttl_s: as for `put`.
            timeout_s: seconds to wait for another process's result.

        Returns:
            The value of `compute`, or the same tree from shared memory: numpy leaves as read-only views, torch leaves
            as copied tensors.

        Raises:
            BadKey: `key` is not 32 bytes.
            UnsupportedLeaf, UsageError: as for `put`.
        """
        deadline = self._deadline(timeout_s)
        steps = self.steps(key)
        outcome: Any = None
        error: BaseException | None = None
        while True:
            try:
                step = steps.throw(error) if error is not None else steps.send(outcome)
            except StopIteration as done:
                value: Value = done.value
                return value
            outcome, error = None, None
            try:
                match step:
                    case AwaitAnswer(future):
                        outcome = self._link.answer(future, deadline - time.monotonic())
                    case Compute():
                        outcome = compute()
                    case StoreValue(computed, claim, cost_ms):
                        outcome = self.store(key, computed, tokens=tokens, ttl_s=ttl_s, claim=claim, cost_ms=cost_ms)
            except BaseException as raised:
                error = raised

    def claim(self, key: bytes, *, within_s: float = 0.0) -> Claim:
        """Asks for the right to compute `key`, and returns before the daemon answers. `Claim.state` gives the answer.

        Use it to compute in a place that must not wait, or to store through another client. `get_or_compute` waits
        instead. If the daemon is stopped and its socket is full, sending the request may take the client's `timeout_s`.

        Args:
            within_s: estimated seconds until the payload is stored, if this client computes it; 0 if unknown. Clients
                that wait for the key read it as `Claim.expected_at`.

        Raises:
            BadKey: `key` is not 32 bytes.
            UsageError: `within_s` is out of its range.
        """
        key = check_key(key)
        within_s = check_seconds("within_s", within_s)
        self._attach()
        return Claim(self._link, key, self._timeout_s, within_s)

    def steps(self, key: bytes) -> Steps:
        """Returns the steps of `get_or_compute`, as a generator that the caller drives. For the library."""
        key = check_key(key)
        self._attach()
        return compute_once(key, self.get, self._link, self._tally, self._timeout_s)

    def store(
        self, key: bytes, value: Any, *, tokens: int, ttl_s: float | None, claim: int | None, cost_ms: float = 0.0
    ) -> Put:
        """Puts a computed value under the claim that was granted for its key. For the library."""
        return self._put(key, value, PutOptions(tokens, ttl_s, claim, cost_ms), self._deadline(None))

    # ---- what changes entries

    def touch(self, *keys: bytes) -> int:
        """Renews the recency of entries, and the time to live that each was put with.

        Returns:
            How many of the entries are there.

        Raises:
            BadKey: a key is not 32 bytes.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return self._counted(lambda number: messages.Touch(number, _checked(keys)))

    def evict(self, *keys: bytes) -> int:
        """Removes entries. Leases on them stay valid.

        Returns:
            How many of the entries were there.

        Raises:
            BadKey: a key is not 32 bytes.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return self._counted(lambda number: messages.Evict(number, _checked(keys)))

    def clear(self, namespace: Namespace | None = None) -> int:
        """Removes all entries of a namespace; without a namespace, all entries of the ring.

        Returns:
            How many entries there were.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        tag = namespace.tag if namespace is not None else None
        return self._counted(lambda number: messages.Clear(number, tag))

    def current(self, namespace: Namespace) -> Namespace:
        """Returns the namespace at its current generation. Sends no message.

        Call it before you load the weights. A process that loads the weights first may read a generation that was
        raised meanwhile, and would store results of the old weights as results of the new ones.

        Returns:
            The namespace at the generation to which `invalidate` last raised it, in any process. The namespace as given
            if its own generation is not lower, if it was never invalidated, or without a daemon so far. Under a past
            generation every lookup misses and every put is refused, so a stale generation shares no wrong results.
        """
        view = self._link.view or self._attach()
        known = view.current(namespace.tag) if view is not None else 0
        return namespace.raised_to(max(namespace.generation, known))

    def invalidate(self, namespace: Namespace) -> Namespace:
        """Drops a namespace's entries because its weights have changed. Call it once the new weights are in place.

        A process that reads the generation afterwards (`current`) is assumed to load the new weights. The daemon
        refuses puts and claims under the old generation from now on, also from processes that have not seen the new
        one, and also after a restart.

        Returns:
            The namespace at its new generation. A second call with the same old generation returns the same new one.

        Raises:
            LimitReached: namespaces_max, or the namespace is at its last generation.
            DaemonUnavailable, TimedOut: the daemon did not answer. It may have done it; a second call does no harm.
        """
        answer = self._ask(lambda number: messages.Invalidate(number, namespace.tag, namespace.generation))
        return namespace.raised_to(answer.generation)

    def pin(self, key: bytes, for_s: float) -> float:
        """Keeps an entry from being evicted for at most `for_s` seconds, without a lease.

        Returns:
            The seconds that the daemon granted, at most its own limit; 0 on a miss.

        Raises:
            BadKey: `key` is not 32 bytes.
            UsageError: `for_s` is out of its range.
            LimitReached: pins_per_client_max or pinned_share_max.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        key = check_key(key)
        for_s = check_seconds("for_s", for_s, above_0=True)
        lasts_s: float = self._ask(lambda number: messages.Pin(number, key, for_s)).lasts_s
        return lasts_s

    def unpin(self, key: bytes) -> None:
        """Ends a pin before its time.

        Raises:
            BadKey: `key` is not 32 bytes.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        key = check_key(key)
        self._ask(lambda number: messages.Unpin(number, key))

    # ---- memory pressure, workflows and devices

    def on_mode(self, callback: Callable[[ModeChange], object], gauge: str | None = None) -> Subscription:
        """Calls `callback` whenever a tier changes its mode, so that an engine can shrink caches of its own.

        One thread of this client calls all callbacks, one at a time and in order. It logs the exceptions that they
        raise. It does not call them for the modes at the time of the subscription: see `Subscription.states`. Changes
        that happen while the daemon is away are reported once it is back. The child of a fork subscribes anew.

        Args:
            gauge: a device's name, or "host" for the ring. Default: all gauges.

        Raises:
            UsageError: `gauge` is no valid name of a gauge.
        """
        self._attach()
        return self._governor.on_mode(callback, gauge, self._timeout_s)

    def modes(self) -> dict[str, TierState]:
        """Returns how full each tier is, in bytes: a device by its name, the ring by "host".

        The byte counts are those of the tier's last change of mode.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        self._attach()
        self._governor.subscribe(self._timeout_s)
        return self._governor.states

    def workflow(self, name: str, graph: AgentStepGraph) -> Workflow:
        """Tells the daemon which agents run in which order, until `Workflow.end`. Use the result in a `with`.

        Without a daemon, sends the graph once there is one.

        Raises:
            UsageError: `name` is no valid name.
            BadGraph: the steps cannot be run in any order, or another client has a workflow of this name.
            LimitReached: workflows_max or workflow_steps_max.
        """
        self._attach()
        return Workflow(self._link, self._governor, name, graph, self._timeout_s)

    def request_arrived(self, device: str, count: int = 1) -> None:
        """Reports `count` new inference requests, for the queueing floor of `device`. Without a daemon, does nothing.

        Raises:
            UsageError: a value is out of its range; the message names it.
        """
        queueing.arrived(self._governor, device, count)

    def request_completed(self, device: str, service_s: float, blocks: int) -> None:
        """Reports an inference request served in `service_s` seconds. Without a daemon, does nothing.

        Args:
            blocks: blocks of the device's cache that the request used, of `queueing.block_bytes` bytes each.

        Raises:
            UsageError: a value is out of its range; the message names it.
        """
        queueing.completed(self._governor, device, service_s, blocks)

    def reserve_device(
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
        self._attach()
        limit_s = check_timeout(timeout_s, self._timeout_s)
        return device_reservation.reserve(self._link, device, size_bytes, for_s, limit_s)

    # ---- the daemon

    @property
    def link(self) -> Link:
        """The connection to the daemon. For the library."""
        return self._link

    @property
    def governor(self) -> GovernorListener:
        """The listener that receives mode changes. For the library."""
        return self._governor

    @property
    def timeout_s(self) -> float:
        """Default time limit of each call, in seconds."""
        return self._timeout_s

    @property
    def connected(self) -> bool:
        """Whether the daemon is there now. Lookups do not depend on it."""
        return self._link.connected

    @property
    def tally(self) -> ComputeTally:
        """Counts of what `get_or_compute` did in this client."""
        return self._tally

    def wait_connected(self, timeout_s: float | None = None) -> bool:
        """Waits until the daemon is there, for at most `timeout_s` seconds; returns False if it is still not there."""
        return self._link.wait_connected(check_timeout(timeout_s, self._timeout_s))

    def status(self) -> dict[str, Any]:
        """Returns the daemon's status, as `tensorctl status --json` prints it.

        Raises:
            DaemonUnavailable, SocketForbidden, TimedOut: the daemon did not answer.
        """
        channel = BlockingChannel.connect(self._status_path, self._timeout_s, Connection.status_client())
        try:
            channel.send(messages.StatusQuery(1), timeout_s=self._timeout_s)
            answer, _ = channel.receive(self._timeout_s)
        finally:
            channel.close()
        if isinstance(answer, messages.Error):
            raise answer.to_error()
        body: dict[str, Any] = answer.body
        return body

    def close(self) -> None:
        """Ends the connection. Leases and their views stay valid for as long as they live."""
        aside(self._closed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- internal

    def _attach(self) -> View | None:
        """Starts the link if it does not run: before the first attachment, after a fork, or without a daemon."""
        if self._closed.alive:
            self._link.start()
        return self._link.view

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + check_timeout(timeout_s, self._timeout_s)

    def _put(self, key: bytes, tree: Any, options: PutOptions, deadline: float) -> Put:
        options = options.checked()
        self._attach()
        try:
            payload = encode(tree, depth_max=self._link.limits.tree_depth_max)
        except ObjectTooLarge as error:
            put = Put(key)
            put.settle("refused", error)
            return put
        return self._link.puts.put(key, payload, options, deadline=deadline)

    def _asked(self, make: Callable[[int], messages.Message]) -> Future[Any]:
        self._attach()
        return self._link.ask(make, self._timeout_s)

    def _ask(self, make: Callable[[int], messages.Message]) -> Any:
        return self._link.answer(self._asked(make), self._timeout_s)

    def _counted(self, make: Callable[[int], messages.Message]) -> int:
        count: int = self._ask(make).count
        return count


def _checked(keys: Iterable[bytes]) -> list[bytes]:
    return [check_key(key) for key in keys]


def _joined(keys: Keys) -> np.ndarray[Any, Any]:
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
            raise BadKey(f"a keys array must be (n, {KEY_BYTES}) uint8; this one is {keys.dtype}{list(keys.shape)}")
        return np.ascontiguousarray(keys)
    joined = keys if isinstance(keys, bytes) else b"".join(_checked(keys))
    if len(joined) % KEY_BYTES:
        raise BadKey(f"joined keys must be a multiple of {KEY_BYTES} bytes; these are {len(joined)}")
    return np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)
