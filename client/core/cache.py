"""The client: what an inference process imports.

Owns: the public calls and their defaults. Lookups go to the View and touch nothing else; everything that changes
something goes over the Link. While the daemon is away, lookups go on, puts are lost and say so, and nothing raises but
what cannot be answered without it.
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
from .view import Entry, Reuse, View
from .workflow import Workflow

if TYPE_CHECKING:
    from ...ipc.steps import AgentStepGraph

Value = TypeVar("Value")
Keys = Sequence[bytes] | bytes | np.ndarray[Any, Any]
TIMEOUT_S: Final = 5.0


class Client:
    """A process's connection to the host's cache. Safe to use from several threads, and across forks.

    Args:
        socket: the daemon's control socket; without it $TENSORD_SOCKET, the user's own, or the system's.
        name: shown by `tensorctl clients`; without it the program's name.
        timeout_s: how long a call may take, in seconds, where the call does not say otherwise. Here and in every call:
            a number from 0 to ten years, or infinity for no limit; anything else is a UsageError.
        attach_s: how long to wait here for the daemon, `timeout_s` unless given. It is attached later, too.
        required: raise at once if there is no daemon, instead of missing until there is one.

    Raises:
        UsageError: `socket`, `name`, `timeout_s` or `attach_s` is out of its range.
        DaemonUnavailable, SocketForbidden, VersionMismatch: with `required`, why there is none.

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
        """A lease on the entry of `key`, or None. A hit sends no message and makes no system call.

        Args:
            key: 32 bytes, as `Namespace.key` makes them; here and in every call also a bytearray or a memoryview.
            verify: check the payload against its checksum first.

        Raises:
            BadKey: not 32 bytes.
            Corrupt: `verify` found that the payload is not what was stored.
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
        """A lease as `get` gives it, without being counted: neither as a use, which would keep the entry from being
        evicted for longer, nor as a hit or a miss.

        Raises:
            BadKey: not 32 bytes.
        """
        key = check_key(key)
        view = self._link.view or self._attach()
        return view.hold(key) if view is not None else None

    def get_many(self, keys: Keys) -> Batch:
        """Leases on many entries, pinned together; each view is made when it is asked for.

        Args:
            keys: a sequence of keys, or all of them in one: (n × 32) bytes, or an (n, 32) uint8 array.

        Returns:
            A batch to index by the keys' positions: a Lease, or None for a miss.
        """
        joined = _joined(keys)
        view = self._link.view or self._attach()
        return view.get_many(joined) if view is not None else Batch.of_misses(len(joined))

    def get_into(self, key: bytes, out: np.ndarray[Any, Any]) -> bool:
        """Copies the entry's single array into `out`, which the caller owns. False on a miss.

        Raises:
            UsageError: the entry is no single array of `out`'s shape and dtype.
        """
        lease = self.get(key)
        if lease is None:
            return False
        found = lease.tree
        if not isinstance(found, np.ndarray) or found.shape != out.shape or found.dtype != out.dtype:
            described = f"{found.dtype}{list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
            raise UsageError(f"out is {out.dtype}{list(out.shape)}, and the entry {described}; give one that matches")
        np.copyto(out, found)
        return True

    def contains(self, key: bytes) -> bool:
        """Whether a get would hit now. Takes no lease and is not counted as a use."""
        key = check_key(key)
        view = self._link.view or self._attach()
        return view is not None and view.contains(key)

    def peek(self, key: bytes) -> Entry | None:
        """The entry's metadata, without counting as a use."""
        key = check_key(key)
        view = self._link.view or self._attach()
        return view.peek(key) if view is not None else None

    def reuse(self, key: bytes) -> Reuse | None:
        """How many clients hold the entry now, and how often it was used in all, to about a second; None if it is not
        there. Sends no message, and is not counted as a use.
        """
        key = check_key(key)
        view = self._link.view or self._attach()
        return view.reuse(key) if view is not None else None

    def ring(self) -> RingReader | None:
        """The ring that is attached now, to read by `RingReader.borrow` what another process pins.

        None if there is
        none.
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
        """Stores a payload under `key`. Returns once it is copied out of `tree`, which may then be changed.

        Args:
            tree: dict, list, tuple, str, bytes, int, float, bool, None, numpy arrays and torch tensors, nested.
            tokens: how many encoder tokens it stands for; counts against max_tokens.
            ttl_s: seconds until it expires, more than 0; without it the daemon's default. They run from this put, or
                from the last `touch`. Lookups do not renew them, nor does another put of the key. Without a daemon
                nothing expires.
            cost_ms: milliseconds that computing it took: what is dear is kept for longer, if the policy is one that
                weighs it.
            agent: on whose behalf it is stored, where the policy is to know.
            wait: return only when it is visible to everybody, or refused.
            timeout_s: how long room in the inbox, and with `wait` the daemon, may take.

        Returns:
            What became of it. A refusal or an absent daemon is a state of the Put, and raises nothing.

        Raises:
            BadKey, UnsupportedLeaf: what was given is no key, or no payload.
            UsageError: `tokens`, `ttl_s`, `cost_ms` or `agent` is out of its range.
            TimedOut: with `wait`, the daemon did not answer in time; the put goes on.
        """
        key = check_key(key)
        deadline = self._deadline(timeout_s)
        put = self._put(key, tree, PutOptions(tokens, ttl_s, None, cost_ms, agent), deadline)
        return put.wait(max(0.0, deadline - time.monotonic())) if wait else put

    def reserve(self, spec: Any, *, timeout_s: float | None = None) -> Reservation:
        """Arrays in shared memory to produce a payload in, which saves one copy.

        Args:
            spec: a tree as for `put` with `tensord.Spec(shape, dtype)` where an array is to be produced.

        Raises:
            UnsupportedLeaf: as for put.
            ObjectTooLarge, DaemonUnavailable, TimedOut: why there is no room.
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
        """The payload of `key`, computed by one process on the host however many ask for it at once.

        The others wait for it, up to `timeout_s`, and then compute it themselves. An exception of `compute` is raised
        here, and only here: one of those who wait is asked to try instead.

        Returns:
            What `compute` returned, or the same tree from shared memory: numpy leaves as read-only views, torch
            leaves as tensors.
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
        """Asks for the right to compute `key`, without waiting for the answer: `Claim.state` tells.

        For those who compute where they cannot wait, or store by another client. Where the daemon is stopped and its
        socket full, asking itself may take the client's `timeout_s`.

        Args:
            within_s: in how many seconds it would be stored, if it is this client's to compute; 0 where that is not
                known. Others who wait are told (`Claim.expected_at`).

        Raises:
            BadKey: not 32 bytes.
            UsageError: `within_s` is out of its range.
        """
        key = check_key(key)
        within_s = check_seconds("within_s", within_s)
        self._attach()
        return Claim(self._link, key, self._timeout_s, within_s)

    def steps(self, key: bytes) -> Steps:
        """The steps of `get_or_compute`, for whoever drives them."""
        key = check_key(key)
        self._attach()
        return compute_once(key, self.get, self._link, self._tally, self._timeout_s)

    def store(
        self, key: bytes, value: Any, *, tokens: int, ttl_s: float | None, claim: int | None, cost_ms: float = 0.0
    ) -> Put:
        """The put of a computed value, under the claim it was computed under."""
        return self._put(key, value, PutOptions(tokens, ttl_s, claim, cost_ms), self._deadline(None))

    # ---- what changes entries

    def touch(self, *keys: bytes) -> int:
        """Renews the recency of entries, and the time to live that each was put with. Returns how many are there."""
        return self._counted(lambda number: messages.Touch(number, _checked(keys)))

    def evict(self, *keys: bytes) -> int:
        """Removes entries; leases on them stay right. Returns how many were there."""
        return self._counted(lambda number: messages.Evict(number, _checked(keys)))

    def clear(self, namespace: Namespace | None = None) -> int:
        """Removes a namespace's entries, or all. Returns how many there were."""
        tag = namespace.tag if namespace is not None else None
        return self._counted(lambda number: messages.Clear(number, tag))

    def current(self, namespace: Namespace) -> Namespace:
        """The namespace at its generation now. Sends no message.

        Call it before you load the weights. A process that loads weights first may get the generation of the weights
        that replaced them meanwhile, and would share what the old weights make as if the new ones had made it.

        Returns:
            The namespace at the generation to which `invalidate` last raised it, in whichever process; as it was given
            where that is not lower, where it was never invalidated, or without a daemon so far. Under a past generation
            nothing is found and every put is refused, so nothing wrong is shared in that case either.
        """
        view = self._link.view or self._attach()
        known = view.current(namespace.tag) if view is not None else 0
        return namespace.raised_to(max(namespace.generation, known))

    def invalidate(self, namespace: Namespace) -> Namespace:
        """Drops a namespace's entries because the weights behind its name have changed. Call it when the new weights
        are in place: whoever asks for the generation afterwards is taken to load those.

        From now on every put and claim under the generation that was is refused, also of processes that have yet to
        hear of it, and after any restart of the daemon.

        Returns:
            The namespace to go on with. Whoever comes second with the same old generation gets the same new one.

        Raises:
            LimitReached: namespaces_max, or the namespace is at its last generation.
            DaemonUnavailable, TimedOut: nobody answered. It may have been done; asking again does no harm.
        """
        answer = self._ask(lambda number: messages.Invalidate(number, namespace.tag, namespace.generation))
        return namespace.raised_to(answer.generation)

    def pin(self, key: bytes, for_s: float) -> float:
        """Keeps an entry from being evicted without holding a view, for `for_s` seconds at most.

        Returns:
            For how long it is kept, which the daemon may bound; 0 if it is not there.

        Raises:
            LimitReached: pins_per_client_max or pinned_share_max.
            UsageError: `for_s` is out of its range.
        """
        key = check_key(key)
        for_s = check_seconds("for_s", for_s, above_0=True)
        lasts_s: float = self._ask(lambda number: messages.Pin(number, key, for_s)).lasts_s
        return lasts_s

    def unpin(self, key: bytes) -> None:
        """Ends a pin before its time."""
        key = check_key(key)
        self._ask(lambda number: messages.Unpin(number, key))

    # ---- how full it is

    def on_mode(self, callback: Callable[[ModeChange], object], gauge: str | None = None) -> Subscription:
        """Calls `callback` whenever a tier goes into another mode, so that an engine can drop caches of its own.

        Callbacks are called in one thread of this client's, one at a time and in order; what they raise is logged. They
        are not called for the modes of now: `Subscription.states` has those. What changed while the daemon was away is
        told when it is back. A fork's child subscribes anew.

        Args:
            gauge: a device's name, or "host"; without it all of them.

        Raises:
            UsageError: `gauge` can be no gauge's name.
        """
        self._attach()
        return self._governor.on_mode(callback, gauge, self._timeout_s)

    def modes(self) -> dict[str, TierState]:
        """How full each tier is: a device's by its name, the ring's by "host". Counted in bytes, as last told when its
        mode changed.

        Raises:
            DaemonUnavailable, TimedOut: why there is no answer.
        """
        self._attach()
        self._governor.subscribe(self._timeout_s)
        return self._governor.states

    def workflow(self, name: str, graph: AgentStepGraph) -> Workflow:
        """Says which agents are going to run when, until `Workflow.end`: use it in a `with`.

        Without a daemon it is said when there is one.

        Raises:
            UsageError: the name can be no workflow's.
            BadGraph: the steps are no graph that can be run, or another client has a workflow of that name.
            LimitReached: workflows_max or workflow_steps_max.
        """
        self._attach()
        return Workflow(self._link, self._governor, name, graph, self._timeout_s)

    def request_arrived(self, device: str, count: int = 1) -> None:
        """So many inference requests have arrived, for the device's queueing floor. Without a daemon, nothing happens.

        Raises:
            UsageError: a value out of its range; the message names it.
        """
        queueing.arrived(self._governor, device, count)

    def request_completed(self, device: str, service_s: float, blocks: int) -> None:
        """An inference request was served in `service_s` seconds, with `blocks` of the device's cache (their size is
        the daemon's `queueing.block_bytes`). Without a daemon, nothing happens.

        Raises:
            UsageError: a value out of its range; the message names it.
        """
        queueing.completed(self._governor, device, service_s, blocks)

    def reserve_device(
        self, device: str, size_bytes: int, for_s: float = 30.0, *, timeout_s: float | None = None
    ) -> DeviceReservation:
        """Sets free memory of a device aside, so that no other process reserves it: use it in a `with`, and allocate.

        Args:
            for_s: it ends by itself after so many seconds, or sooner if the daemon bounds it.

        Raises:
            UsageError: a value out of its range.
            DeviceFull: not so much is free; the message says how much is.
            NoGauge: nobody knows how full the device is.
            LimitReached: reservations_max.
            DaemonUnavailable, TimedOut: why there is no answer.
        """
        self._attach()
        limit_s = check_timeout(timeout_s, self._timeout_s)
        return device_reservation.reserve(self._link, device, size_bytes, for_s, limit_s)

    # ---- the daemon

    @property
    def link(self) -> Link:
        """The connection. For the library."""
        return self._link

    @property
    def governor(self) -> GovernorListener:
        """What hears of modes. For the library."""
        return self._governor

    @property
    def timeout_s(self) -> float:
        """How long a call may take, where it does not say otherwise."""
        return self._timeout_s

    @property
    def connected(self) -> bool:
        """Whether the daemon is there now. Lookups do not depend on it."""
        return self._link.connected

    @property
    def tally(self) -> ComputeTally:
        """What `get_or_compute` did in this client."""
        return self._tally

    def wait_connected(self, timeout_s: float | None = None) -> bool:
        """Waits until the daemon is there; False if it was not in time."""
        return self._link.wait_connected(check_timeout(timeout_s, self._timeout_s))

    def status(self) -> dict[str, Any]:
        """What `tensorctl status --json` shows.

        Raises:
            DaemonUnavailable, SocketForbidden, TimedOut: why there is no answer.
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
        """Ends the connection. Leases and their views stay right for as long as they live."""
        aside(self._closed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def _attach(self) -> View | None:
        """The slow way in: before the first attachment, after a fork, or without a daemon."""
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
            raise BadKey(f"keys as an array are (n, {KEY_BYTES}) uint8, and this one is {keys.dtype}{list(keys.shape)}")
        return np.ascontiguousarray(keys)
    joined = keys if isinstance(keys, bytes) else b"".join(_checked(keys))
    if len(joined) % KEY_BYTES:
        raise BadKey(f"keys joined are a multiple of {KEY_BYTES} bytes, and these are {len(joined)}")
    return np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)
