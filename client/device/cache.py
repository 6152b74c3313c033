"""The device tier of one process: tensors stay in the process's VRAM until the daemon orders their eviction.

Owns: the public calls. Does not own: the table (entries.py), the communication with the daemon (upkeep.py), copies of
tensors and the return of their memory (moves.py).

Invariants: a put and a get send no message and do not wait for the daemon, so they do not delay an engine's step. No
tensor is lost because the daemon is away.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ...errors import DaemonUnavailable, TensordError, UnderPressure, UsageError, shown
from ...ipc.messages import control as messages
from ...ipc.messages.modes import Mode
from ...ipc.messages.schema import AGENT_NAME_CHARS_MAX, NUMBER_MAX
from ..arguments.checks import check_count, check_key, check_name, check_timeout
from ..arguments.put_options import check_cost
from ..core.client import Client, check_client
from ..gpu.interface import Device
from ..pressure.device_reservation import reserve
from ..reading.lease import Lease
from ..threads.aside import aside
from ..threads.of_process import Closable
from .entries import DeviceEntries, DeviceEntry, DeviceLease, Registration
from .upkeep import Upkeep

_CLOSED: Final = "the device cache is closed"
_PROMOTION_S: Final = 10.0
_PROMOTION_ASK_S: Final = 0.5


class DeviceCache(Closable):
    """Entries on one device of this process. Thread-safe. In the child of a fork it is empty and closed.

    Args:
        client: the client whose daemon decides, and whose host tier takes offloaded entries.
        device: the device with the tensors, a `TorchDevice` or a `FakeVram`.

    `client`, `device`: as given.

    Raises:
        UsageError: `client` is no Client, `device` is no device, the client has an open cache of this device already,
            or the device has no valid name.
        ProcessLimit: this process can start no thread for the moves.

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

    _instead = "make one in each process"

    def __init__(self, client: Client, device: Device) -> None:
        check_client(client)
        if not isinstance(device, Device):
            raise UsageError(f"device is {shown(device)}; it must be a device, such as a TorchDevice or a FakeVram")
        check_name("device.name", device.name)
        self.client = client
        self.device = device
        self._entries = DeviceEntries(device)
        self._upkeep = Upkeep(client, self._entries)
        self._closed = weakref.finalize(self, self._upkeep.stop)
        self._upkeep.owner = weakref.ref(self)
        self._upkeep.start()

    # ---- entries

    def put(
        self,
        key: bytes,
        tensors: Any,
        *,
        tokens: int = 0,
        agent: str = "",
        cost_ms: float = 0.0,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> Registration:
        """Keeps tensors that lie on the device, without copying them. They must not be written any more.

        Without a daemon the tensors are kept, and registered once a daemon is there. A refused entry is not kept. A key
        names one content: under the key of an entry that is there, the put changes nothing, and counts as a use. Under
        a key that was offloaded earlier, it does not replace the copy in the host tier.

        An entry counts the bytes of its tensors. A tensor keeps the whole memory that it is a view of: clone a small
        part that is to outlive a large batch.

        Args:
            key: 32 bytes, as made by `Namespace.key`.
            tensors: a tree of tensors, as for `Client.put`.
            tokens: the number of encoder tokens that the tensors stand for, a measure of the cost of computing them
                again.
            agent: the agent that the entry belongs to, for workflows.
            cost_ms: milliseconds that computing the tensors took; 0: not known. An entry whose copy to the host takes
                longer is dropped instead of offloaded. 0: it is estimated from `tokens`.
            wait: whether to return only after the daemon's answer. Without a daemon the call returns at once.
            timeout_s: the limit for `wait` in seconds; by default the client's timeout.

        Raises:
            BadKey, UsageError: an invalid key, no tensors of this device, or a value out of its range; nothing has
            changed.
            TimedOut: with `wait`, the daemon did not answer in time; the tensors stay.
        """
        key = check_key(key)
        tokens = check_count("tokens", tokens, NUMBER_MAX)
        check_name("agent", agent, AGENT_NAME_CHARS_MAX, least=0)
        cost_ms = check_cost(cost_ms)
        limit_s = check_timeout(timeout_s, self.client.timeout_s)
        registration = Registration(key)
        if self.closed:
            return registration.settle("lost", DaemonUnavailable(_CLOSED))
        size_bytes = self.device.bytes_of(tensors)
        if not size_bytes:
            raise UsageError(f"the tensors use no memory of {self.device.name}: put tensors that lie on it")
        state = self._upkeep.state
        if state is not None and state.refuses and key not in self._entries:
            used = f"{state.used_bytes} of {state.total_bytes} bytes used"
            why = f"{state.gauge} is in {state.mode} with {used}: it accepts no new entries until that ends"
            return registration.settle("refused", UnderPressure(why))
        marks = [self.device.mark()]
        entry = DeviceEntry(key, tensors, size_bytes, tokens, agent, registration, marks, cost_ms=cost_ms)
        kept = aside(partial(self._entries.put, entry))
        if kept is None:
            return registration.settle("lost", DaemonUnavailable(_CLOSED))
        self._upkeep.wake()
        if wait and self.client.connected:
            kept.registration.wait(limit_s)
        return kept.registration

    def get(self, key: bytes, *, promote: bool = False) -> DeviceLease | None:
        """A lease on the entry of `key`: from the device, else from the host tier, else None. Sends no message. Raises
        BadKey if the key is not 32 bytes.

        Args:
            promote: whether to copy an entry of the host tier to the device and register it there again, if the device
                stays below pressure with it and is not paused. The call asks the daemon, and waits for this copy.
        """
        key = check_key(key)
        lease = self._lease(key)
        if lease is not None:
            return lease
        host = self.client.get(key)
        if host is None:
            return None
        if promote and not self.closed and not self._upkeep.refuses and not self.device.paused:
            self._promote(key, host)
            lease = self._lease(key)
            if lease is not None:
                host.release()
                return lease
        return DeviceLease(self._entries, host)

    def delete(self, *keys: bytes) -> int:
        """Deletes entries from the device tier. Offloaded copies stay in the host tier. Returns the number of deleted
        entries. Raises BadKey if a key is not 32 bytes; then nothing was deleted.

        Leases on the entries stay valid. The memory returns to the device's allocator when the last lease is released.
        """
        keys = tuple(check_key(key) for key in keys)
        deleted = aside(partial(self._entries.delete, keys))
        self._upkeep.wake()
        return deleted

    def offload(self, *keys: bytes, wait: bool = False, timeout_s: float | None = None) -> int:
        """Offloads entries to the host tier in the background, like an order of the daemon. Returns the number of
        entries found on the device; with `wait`, the number offloaded so far.

        An entry in use stays. Unlike with an order, an entry that the host tier does not take is not dropped: it stays
        on the device, and a log line names it. Raises BadKey if a key is not 32 bytes; then no entry is offloaded.

        Args:
            wait: whether to return only after each entry was tried once.
            timeout_s: the limit for `wait` in seconds; by default the client's timeout. Entries not tried by then are
                tried later.
        """
        keys = tuple(check_key(key) for key in keys)
        limit_s = check_timeout(timeout_s, self.client.timeout_s)
        if self.closed:
            return 0
        count, leaving = self._upkeep.send_away(keys)
        if not wait:
            return count
        leaving.ended.wait(limit_s)
        return leaving.gone

    def clear(self) -> int:
        """Deletes all entries. Returns their number."""
        return self.delete(*self._entries.keys())

    def contains(self, key: bytes) -> bool:
        """Whether the entry is on the device. Does not count as a use."""
        return check_key(key) in self._entries

    def __len__(self) -> int:
        """Number of entries on the device."""
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of the entries' tensors."""
        return self._entries.size_bytes

    # ---- the device

    @property
    def mode(self) -> Mode | None:
        """The device's pressure mode as last reported by the daemon; None without a daemon or without a gauge. In
        emergency mode the device accepts no new entries."""
        state = self._upkeep.state
        return None if state is None else state.mode

    # ---- the cache

    @property
    def error(self) -> Exception | None:
        """The last error of the background thread, or None. It is logged too, and does not end the thread."""
        return self._upkeep.error

    @property
    def closed(self) -> bool:
        """Whether the cache is closed: after `close`, and in the child of a fork."""
        return self._entries.closed or self._upkeep.stopped

    def close(self) -> None:
        """Releases all entries and tells the daemon. Leases stay valid."""
        aside(self._closed)

    # ---- private

    def _lease(self, key: bytes) -> DeviceLease | None:
        lease = self._entries.lease(key)
        if lease is not None:
            self.device.lend(lease.tree)
        return lease

    def _promote(self, key: bytes, host: Lease) -> None:
        # The reservation counts until the gauge shows the entry.
        size_bytes = max(host.payload_bytes, 1)
        room = messages.ReserveDevice(0, self.device.name, size_bytes, _PROMOTION_S, promotes=True)
        # No room, or nobody who knows: the host tier's copy is there.
        with suppress(TensordError), reserve(self.client.link, room, _PROMOTION_ASK_S):
            self._upkeep.moves.promote(key, host, is_reserved=True)
            self._upkeep.wake()
