"""What all calls of the synchronous client share, and those for entries: lookups in shared memory, and requests.

Owns: how a client is made and ended. Does not own: the connection (link.py), reads (view.py).
Invariants: a lookup goes on while the daemon is away, and sends no message, but for one of a key that this client has
just put: it waits for that put, up to 50 ms. Only calls that need an answer of the daemon raise DaemonUnavailable.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...errors import BadKey, DaemonUnavailable, UsageError, shown
from ...ipc.messages import control as messages
from ...ipc.messages.schema import NAME_CHARS_MAX
from ...ipc.places import STATUS_NAME, control_socket, status_socket
from ...ipc.wire.blocking import BlockingChannel
from ...ipc.wire.connection import Connection
from ...shm.ring.layout import KEY_BYTES
from ..arguments.checks import check_key, check_name, check_seconds, check_socket, check_timeout, printable
from ..arguments.namespace import Namespace, check_namespace
from ..computing.once import ComputeTally
from ..link.link import Link
from ..pressure.modes import GovernorListener
from ..reading.lease import Batch, Lease, RingReader
from ..reading.ring_mapping import Entry
from ..reading.view import View
from ..threads import forks
from ..threads.of_process import Closable

TIMEOUT_S: Final = 5.0
Keys = Sequence[bytes] | bytes | np.ndarray[Any, Any]


class EntryCalls(Closable):
    """The state of a client; its calls about the daemon itself, and those for entries: find, keep, renew and remove.

    For the library: `link`, the connection to the daemon, and `governor`, which receives mode changes.
    """

    _instead = "make one in each process"

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
        status_path = path.with_name(STATUS_NAME) if socket is not None else status_socket(os.environ)
        timeout_s = check_timeout(timeout_s, TIMEOUT_S)
        attach_s = None if attach_s is None else check_timeout(attach_s, timeout_s, "attach_s")
        if name is None:
            name = printable(Path(sys.argv[0]).name or "python")[:NAME_CHARS_MAX]
        check_name("name", name, NAME_CHARS_MAX)
        self.link = link = Link(path, name, timeout_s, required=required)
        self._status_path = status_path
        self.timeout_s = timeout_s
        self.tally = ComputeTally()
        self.governor = GovernorListener(link)
        self._closed = weakref.finalize(self, link.end)
        link.owner = weakref.ref(self)
        forks.watch(link)
        link.start(attach_s)
        if required and not self.link.connected:
            self.close()
            raise self.link.unavailable()

    @property
    def connected(self) -> bool:
        """Whether the daemon is there now. Lookups do not depend on it."""
        return self.link.connected

    def wait_connected(self, timeout_s: float | None = None) -> bool:
        """Waits until the daemon is there, for at most `timeout_s` seconds; returns False if it is still not there."""
        return self.link.wait_connected(check_timeout(timeout_s, self.timeout_s))

    def status(self) -> dict[str, Any]:
        """Returns the daemon's status, as `tensorctl status --json` prints it.

        Raises:
            DaemonUnavailable, SocketForbidden, TimedOut: the daemon did not answer, or the interpreter ends.
        """
        if sys.is_finalizing():
            # The decoder of the answer may not be made yet, and cannot be any more.
            raise DaemonUnavailable("the interpreter ends: ask for the status before the program ends")
        if self.link.silence.away:
            raise self.link.unavailable()
        channel = BlockingChannel.connect(self._status_path, self.timeout_s, Connection.status_client())
        try:
            channel.send(messages.StatusQuery(1), timeout_s=self.timeout_s)
            answer, _ = channel.receive(self.timeout_s)
        finally:
            channel.close()
        if isinstance(answer, messages.Error):
            raise answer.to_error()
        body: dict[str, Any] = answer.body
        return body

    def close(self) -> None:
        """Ends the connection, once the daemon has this client's puts, or after 50 ms. Leases and their views stay
        valid for as long as they live.

        A signal handler may call it at any moment; a put that it has interrupted ends as "lost".
        """
        self.link.puts.wait_for_puts()
        self._closed.detach()
        self.link.close()

    # ---- entries

    def get(self, key: bytes, *, verify: bool = False) -> Lease | None:
        """Returns a lease on the entry of `key`, or None on a miss. A hit sends no message and makes no system call.

        A key that this client has just put is waited for, up to 50 ms; so do `get_many`, `get_into` and `contains`.

        Args:
            key: 32 bytes, as `Namespace.key` makes them; here and in every call also a bytearray or a memoryview.
            verify: check the payload against its checksum first.

        Raises:
            Corrupt: `verify` found that the payload differs from the one that was stored.
        """
        view = self.link.view
        if view is not None and verify is False:
            return view.get(key)
        key = check_key(key)
        view = view or self._attach()
        if view is None:
            return None
        return view.verified(key) if verify else view.get(key)

    def hold(self, key: bytes) -> Lease | None:
        """Returns a lease as `get` does, but counts neither a use, nor a hit, nor a miss.

        A use would delay the entry's eviction.
        """
        key = check_key(key)
        view = self.link.view or self._attach()
        return view.hold(key) if view is not None else None

    def get_many(self, keys: Keys) -> Batch:
        """Pins many entries together and returns their leases. Each lease is made when it is indexed.

        Args:
            keys: a sequence of n keys, n × 32 bytes in one, or a uint8 array of shape (n, 32).

        Returns:
            A batch. Its index is the position of the key; its items are a Lease, or None for a miss.
        """
        joined = joined_keys(keys)
        view = self.link.view or self._attach()
        if view is None:
            return Batch.of_misses(len(joined))
        self.link.puts.wait_for_puts(key.tobytes() for key in joined)
        return view.get_many(joined)

    def get_into(self, key: bytes, out: np.ndarray[Any, Any]) -> bool:
        """Copies the entry's single array into `out`.

        Args:
            out: an array of the entry's shape and dtype, which the caller owns.

        Returns:
            False on a miss; `out` is unchanged then.

        Raises:
            UsageError: `out` is no writable array, or the entry is not a single array of its shape and dtype.
        """
        if not isinstance(out, np.ndarray):
            raise UsageError(f"out is of type {type(out).__name__}; it must be a numpy array that the entry fits into")
        if not out.flags.writeable:
            raise UsageError("out is a read-only array; pass one that may be written")
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
        """Returns whether a `get` would hit now. Takes no lease and counts no use."""
        key = check_key(key)
        view = self.link.view or self._attach()
        return view is not None and view.contains(key)

    def peek(self, key: bytes) -> Entry | None:
        """Returns the entry's metadata and how much it is shared, or None on a miss. Counts no use."""
        key = check_key(key)
        view = self.link.view or self._attach()
        return view.peek(key) if view is not None else None

    def ring(self) -> RingReader | None:
        """Returns the ring that is attached now, to read entries that another process pins (`RingReader.borrow`).

        None without a daemon so far.
        """
        view = self.link.view or self._attach()
        return view.ring if view is not None else None

    # ---- requests

    def touch(self, *keys: bytes) -> int:
        """Renews the recency of entries, and the time to live that each was put with.

        Returns:
            How many of the entries are there.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return int(self._ask(lambda number: messages.Touch(number, [check_key(key) for key in keys])).count)

    def evict(self, *keys: bytes) -> int:
        """Removes entries. Leases on them stay valid.

        Returns:
            How many of the entries were there.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return int(self._ask(lambda number: messages.Evict(number, [check_key(key) for key in keys])).count)

    def clear(self, namespace: Namespace | None = None) -> int:
        """Removes all entries of a namespace; without a namespace, all entries of the ring.

        Returns:
            How many entries there were.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        tag = check_namespace(namespace).tag if namespace is not None else None
        return int(self._ask(lambda number: messages.Clear(number, tag)).count)

    def current(self, namespace: Namespace) -> Namespace:
        """Returns the namespace at its current generation. Sends no message.

        Call it before you load the weights. A process that loads the weights first may read a generation that was
        raised meanwhile, and would store results of the old weights as results of the new ones.

        Returns:
            The namespace at the generation to which `invalidate` last raised it, in any process. The namespace as given
            if its own generation is not lower, if it was never invalidated, or without a daemon so far. Under a past
            generation every lookup misses and every put is refused, so a stale generation shares no wrong results.
        """
        check_namespace(namespace)
        view = self.link.view or self._attach()
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
            LimitReached: too many namespaces were invalidated, or the namespace is at its last generation.
            DaemonUnavailable, TimedOut: the daemon did not answer. It may have done it; a second call does no harm.
        """
        check_namespace(namespace)
        answer = self._ask(lambda number: messages.Invalidate(number, namespace.tag, namespace.generation))
        return namespace.raised_to(answer.generation)

    def pin(self, key: bytes, for_s: float) -> float:
        """Keeps an entry from being evicted for at most `for_s` seconds, without a lease. The pin ends with this
        client's connection: when the client is closed, and when the daemon is started again.

        Returns:
            The seconds that the daemon granted, at most its own limit; 0 on a miss.

        Raises:
            LimitReached: the client has too many pins, or too much of the ring is pinned.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        key = check_key(key)
        for_s = check_seconds("for_s", for_s, above_0=True)
        lasts_s: float = self._ask(lambda number: messages.Pin(number, key, for_s)).lasts_s
        return lasts_s

    def unpin(self, key: bytes) -> None:
        """Ends a pin before its time.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        key = check_key(key)
        self._ask(lambda number: messages.Unpin(number, key))

    # ---- for the calls of all topics

    def _attach(self) -> View | None:
        """Starts the link if it does not run: before the first attachment, after a fork, or without a daemon."""
        if self._closed.alive:
            self.link.start()
        return self.link.view

    def _expect_answer(self, timeout_s: float) -> None:
        """Called first by each call that raises an error without an answer of the daemon. Waits for at most `timeout_s`
        seconds while the client attaches anew."""
        self._attach()
        self.link.attachment.wait_renewed(timeout_s)

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + check_timeout(timeout_s, self.timeout_s)

    def _ask(self, make: Callable[[int], messages.Message]) -> Any:
        deadline = self._deadline(None)
        self._expect_answer(self.timeout_s)
        left_s = max(0.0, deadline - time.monotonic())
        return self.link.answers.wait(self.link.ask(make, left_s), left_s)


def joined_keys(keys: Keys) -> np.ndarray[Any, Any]:
    """The keys as (n, 32) uint8.

    Raises:
        BadKey: a key is not 32 bytes.
    """
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
            raise BadKey(f"a keys array must be (n, {KEY_BYTES}) uint8; this one is {keys.dtype}{list(keys.shape)}")
        return np.ascontiguousarray(keys)
    if not isinstance(keys, Iterable):
        raise BadKey(f"keys is {shown(keys)}; it must be a sequence of keys, joined keys, or an array of them")
    joined = keys if isinstance(keys, bytes) else b"".join([check_key(key) for key in keys])
    if len(joined) % KEY_BYTES:
        raise BadKey(f"joined keys must be a multiple of {KEY_BYTES} bytes; these are {len(joined)}")
    return np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)
