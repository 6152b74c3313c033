"""The device tier of one process: tensors that stay in its own VRAM, and go when the host's daemon says so.

Owns: the public calls. Does not own the table (entries.py), the conversation with the daemon (upkeep.py), nor how
tensors are copied and their memory given back (moves.py, and the device). A put and a get send nothing and wait for
nobody: an engine's step is not held up by its cache, and none of its tensors is lost because the daemon is away.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from ...errors import DaemonUnavailable, UnderPressure, UsageError
from ...ipc.governance import AGENT_CHARS_MAX
from ...ipc.modes import Mode
from ...ipc.schema import NUMBER_MAX
from ..core.aside import aside
from ..core.device_reservation import DeviceReservation
from ..core.fields import check_count, check_key, check_name, check_seconds, check_timeout
from ..core.lease import Lease
from .entries import DeviceEntries, DeviceEntry, DeviceLease, DeviceTally, Registration, ToHost
from .interface import Device
from .upkeep import Upkeep

if TYPE_CHECKING:
    from ..core.cache import Client

USES_EVERY_S: Final = 0.25


class DeviceCache:
    """Entries on one device of this process. Safe to use from several threads; empty and closed in the child of a fork.

    Args:
        client: whose daemon decides, and whose host tier takes what is offloaded.
        device: where the tensors lie, as `TorchDevice` or `FakeVram`.
        uses_every_s: how often the daemon is told which entries were used.

    Raises:
        UsageError: the client has a cache of this device already, or a value is out of its range.

    Example:
        >>> import tempfile
        >>> from tensord.testing.fake_vram import FakeCard, FakeVram
        >>> device = FakeVram(FakeCard(tempfile.mkdtemp(), "card0", 1 << 20))    # TorchDevice(0): a real card
        >>> with tensord.DeviceCache(cache, device) as held:
        ...     print(held.put(key, {"hidden": device.upload(np.zeros(4))}, wait=True).state)
        ...     with held.get(key) as lease:
        ...         print(lease.tier)
        registered
        device
    """

    def __init__(self, client: Client, device: Device, *, uses_every_s: float = USES_EVERY_S) -> None:
        check_name("device.name", device.name)
        check_seconds("uses_every_s", uses_every_s, above_0=True)
        for listener in client.link.listeners():
            if isinstance(listener, Upkeep) and listener.device.name == device.name and not listener.stopped:
                raise UsageError(
                    f"device {device.name!r} has a DeviceCache with this client: use it, or close it first"
                )
        self._client = client
        self._device = device
        self._entries = DeviceEntries()
        self._upkeep = Upkeep(client, device, self._entries, uses_every_s)
        self._closed = weakref.finalize(self, self._upkeep.stop)
        self._upkeep.start()

    # ---- entries

    def put(
        self,
        key: bytes,
        tensors: Any,
        *,
        tokens: int = 0,
        agent: str = "",
        to_host: ToHost | None = None,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> Registration:
        """Keeps tensors that lie on the device, without copying them. They must not be written any more.

        Without a daemon they are kept, and registered when there is one. What is refused is not kept. A key that is
        here is put anew, and keeps its uses; if that is refused, what was there before stays. A key names a content:
        other tensors under a key that was offloaded earlier do not replace the host tier's copy.

        Args:
            key: 32 bytes, as `Namespace.key` makes them.
            tensors: a tree of tensors, as for `Client.put`.
            tokens: how many encoder tokens they stand for: what computing them again is reckoned by.
            agent: whose they are, for workflows.
            to_host: called with the tree's copy in host memory when it is offloaded, in place of `Client.put` under
                its key; what it returns says whether the host tier has it. It is called in this cache's thread, and
                is let go with the entry. Such an entry comes back by whoever knows where it went, never by `get`.
            wait: return only when the daemon has answered; without a daemon at once.
            timeout_s: how long that may take; without it the client's timeout.

        Raises:
            BadKey, UsageError: what was given is no key, no tensors of this device, or out of range; nothing changed.
            TimedOut: with `wait`, the daemon did not answer in time; the tensors stay.
        """
        key = check_key(key)
        tokens = check_count("tokens", tokens, NUMBER_MAX)
        check_name("agent", agent, AGENT_CHARS_MAX, least=0)
        limit_s = check_timeout(timeout_s, self._client.timeout_s)
        registration = Registration(key)
        if self.closed:
            registration.settle("lost", DaemonUnavailable("the device cache is closed"))
            return registration
        size_bytes = self._device.size_of(tensors)
        if size_bytes <= 0:
            raise UsageError(f"tensors hold no memory of {self._device.name}: put tensors that lie there")
        blocked = self._blocked()
        if blocked is not None and key not in self._entries:
            with self._entries.lock:
                self._entries.tally.refused += 1
                self._entries.tally.blocked += 1
            registration.settle("refused", blocked)
            return registration
        entry = DeviceEntry(key, tensors, size_bytes, tokens, agent, registration, [self._device.mark()])
        entry.to_host = to_host
        if not aside(partial(self._entries.put, entry)):
            registration.settle("lost", DaemonUnavailable("the device cache is closed"))
            return registration
        self._upkeep.wake()
        if wait and self._client.connected:
            registration.wait(limit_s)
        return registration

    def get(self, key: bytes, *, promote: bool = False) -> DeviceLease | None:
        """A lease on the entry of `key`: from the device, else from the host tier, else None. No message.

        Args:
            promote: what the host tier has is copied to the device, and registered there again, if there is room. The
                one thing that is waited for here is that copy.

        Raises:
            BadKey: not 32 bytes.
        """
        key = check_key(key)
        lease = self._entries.lease(key, self._device)
        if lease is not None:
            self._device.lend(lease.tree)
            return lease
        host = self._client.get(key)
        if host is None:
            self._entries.tally.misses += 1
            return None
        self._entries.tally.host_hits += 1
        if promote and not self.closed and not self._upkeep.refuses:
            lease = self._promoted(key, host)
            if lease is not None:
                host.release()
                return lease
        return DeviceLease(host.tree, "host", host)

    def delete(self, *keys: bytes) -> int:
        """Takes entries out of the device tier; what was offloaded stays in the host tier. Returns how many were here.

        Leases on them stay right. The memory goes back to the device's allocator when the last one is released.

        Raises:
            BadKey: one of them is not 32 bytes; nothing was deleted.
        """
        keys = tuple(check_key(key) for key in keys)
        deleted = aside(partial(self._entries.delete, keys))
        if deleted:
            self._upkeep.wake()
        return deleted

    def offload(self, *keys: bytes, wait: bool = False, timeout_s: float | None = None) -> int:
        """Sends entries to the host tier, in the background, as an order of the daemon would.

        What somebody uses goes once nobody does. What the host tier does not take is not dropped, as it would be for
        an order: it stays on the device, `tally.stayed` counts it, and the log says so.

        Args:
            wait: return only when each was tried once.
            timeout_s: how long that may take; without it the client's timeout. What was not tried by then is later.

        Returns:
            How many of them are on the device, and so are going to be tried; with `wait` how many have gone.

        Raises:
            BadKey: one of them is not 32 bytes; nothing is sent.
        """
        keys = tuple(check_key(key) for key in keys)
        limit_s = check_timeout(timeout_s, self._client.timeout_s)
        if self.closed:
            return 0
        leaving = self._upkeep.send_away(keys)
        if not wait:
            return leaving.count
        leaving.wait(limit_s)
        return leaving.gone

    def clear(self) -> int:
        """Deletes all entries. Returns how many there were."""
        return self.delete(*self._entries.keys())

    def contains(self, key: bytes) -> bool:
        """Whether the entry is on the device. Not counted as a use."""
        key = check_key(key)
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Entries on the device."""
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of the device that they hold."""
        return self._entries.bytes

    @property
    def total_tokens(self) -> int:
        """Their tokens."""
        return self._entries.tokens

    # ---- the device

    @property
    def mode(self) -> Mode | None:
        """How full the device is, as the daemon last told; None without a daemon, or where nobody knows."""
        state = self._upkeep.state
        return state.mode if state is not None else None

    @property
    def is_blocked(self) -> bool:
        """Whether nothing new is taken in: the device is in emergency. Ends with that, or with the daemon."""
        return self._upkeep.refuses

    def reserve(self, size_bytes: int, for_s: float = 30.0, *, timeout_s: float | None = None) -> DeviceReservation:
        """Sets free memory of the device aside, so that nobody else on the host reserves it. See
        `Client.reserve_device`."""
        return self._client.reserve_device(self._device.name, size_bytes, for_s, timeout_s=timeout_s)

    # ---- the cache

    @property
    def client(self) -> Client:
        """Whose daemon decides."""
        return self._client

    @property
    def device(self) -> Device:
        """Where the tensors lie."""
        return self._device

    @property
    def tally(self) -> DeviceTally:
        """What it did so far."""
        return self._entries.tally

    @property
    def error(self) -> Exception | None:
        """The last thing that went wrong in the background, if anything did. It is in the log, and ended nothing."""
        return self._upkeep.error

    @property
    def closed(self) -> bool:
        """Whether it holds nothing any more: after `close`, and in the child of a fork."""
        return self._entries.closed or self._upkeep.stopped

    def close(self) -> None:
        """Lets go of all entries, and tells the daemon. Leases stay right."""
        aside(self._closed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def _blocked(self) -> UnderPressure | None:
        state = self._upkeep.state
        if state is None or not state.refuses:
            return None
        return UnderPressure(
            f"{state.gauge} is in {state.mode} with {state.used_bytes} of {state.total_bytes} bytes used: nothing new "
            "is taken in until that ends"
        )

    def _promoted(self, key: bytes, host: Lease) -> DeviceLease | None:
        entry = self._upkeep.moves.promoted(key, host)
        if entry is None:
            return None
        lease = aside(partial(self._put_promoted, entry))
        if lease is not None:
            self._device.lend(lease.tree)
            self._upkeep.wake()
        return lease

    def _put_promoted(self, entry: DeviceEntry) -> DeviceLease | None:
        with self._entries.lock:
            lease = self._entries.lease(entry.key, self._device)
            if lease is None:
                if not self._entries.put(entry):
                    return None
                self._entries.tally.promoted += 1
                lease = DeviceLease.of(entry, self._entries, self._device)
            return lease
