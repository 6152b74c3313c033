"""Moves of tensors: from the device into the ring, out of this process, and back.

Owns: the order of steps that makes a move safe. Does not own: the orders (orders.py), the tables (entries.py).

Invariants: a tensor in use is never dropped.

SYNC POINT: an entry's uses are read, then its leases, then its marks, which are awaited. Then the tensors are copied.
Then, under the lock, the entry is removed only if its uses are unchanged and it has no lease. A reader that came in
between has changed the uses. A reader that left in between had added its mark before.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ...errors import DeviceFull, TensordError, TimedOut
from ..arguments.put_options import PutOptions
from ..gpu.interface import Device, Mark
from ..gpu.outgoing import payload_of
from ..reading.lease import Lease
from ..writing.outcomes import Put
from .entries import DeviceEntries, DeviceEntry
from .registration import Registration

if TYPE_CHECKING:
    from ..core.client import Client

_MARK_S: Final = 5.0
_PUT_S: Final = 5.0
_log = logging.getLogger("tensord")


@dataclass(slots=True)
class MoveResult:
    """The keys of a move, each in one list. `unknown`: not in the table, or deleted meanwhile."""

    offloaded: list[bytes] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    unknown: list[bytes] = field(default_factory=list)
    freed_bytes: int = 0
    error: Exception | None = None


class Moves:
    """Moves entries of one cache.

    `in_vain_at`: when entries last left and no memory went back to the driver; inf if some has gone back since.
    """

    def __init__(self, client: Client, device: Device, entries: DeviceEntries) -> None:
        self._client = client
        self._device = device
        self._entries = entries
        self.in_vain_at = math.inf

    def away(
        self, keys: Iterable[bytes], *, offload: bool, has_daemon: Callable[[], bool], may_drop: bool = True
    ) -> MoveResult:
        """Copies entries into the ring (`offload`), drops them here, and returns their memory to the driver.

        An entry that cannot be copied is dropped, or kept if `may_drop` is false or `has_daemon()` returns false. An
        entry in use is kept.
        """
        moved = MoveResult()
        leaving: list[tuple[DeviceEntry, int, Put | None]] = []
        deadline = time.monotonic() + _MARK_S
        for key in keys:
            entry = self._entries.find(key)
            if entry is None:
                moved.unknown.append(key)
                continue
            uses = entry.uses
            if entry.in_use or not self._is_reached(entry, deadline, moved):
                moved.kept.append(key)
                continue
            leaving.append((entry, uses, self._copied(entry, moved) if offload else None))
        for entry, uses, put in leaving:
            stored = put is not None and self._is_stored(entry, put, moved)
            if offload and not stored and not (may_drop and has_daemon()):
                if not may_drop:
                    _log.warning("%s stays on %s: the host tier did not take it", entry.key.hex(), self._device.name)
                moved.kept.append(entry.key)
                continue
            match self._entries.leave(entry, uses, stored=stored):
                case "left":
                    (moved.offloaded if stored else moved.dropped).append(entry.key)
                case "gone":
                    moved.unknown.append(entry.key)
                case _:
                    moved.kept.append(entry.key)
        if moved.offloaded or moved.dropped:
            try:
                moved.freed_bytes = self._device.give_back()
                self.in_vain_at = math.inf if moved.freed_bytes else time.monotonic()
            except Exception as error:
                _log.exception("%s: memory could not be returned to the driver", self._device.name)
                moved.error = error
        return moved

    def back(self, key: bytes) -> DeviceEntry | None:
        """A device entry with the host tier's content of a key; None if there is none, or no room on the device."""
        lease = self._client.get(key)
        if lease is None:
            return None
        with lease:
            return self.promoted(key, lease)

    def promoted(self, key: bytes, host: Lease) -> DeviceEntry | None:
        """A device entry with the content of a host lease; None if the device has no room for it or cannot hold it.

        The entry is not in the table yet.
        """
        try:
            tree = self._device.to_device(host.tree)
        except DeviceFull:
            return None
        except Exception as error:
            # An engine may be waiting for this call. It uses the host tier's copy instead.
            _log.warning("%s is not promoted to %s: %s", key.hex(), self._device.name, error)
            return None
        size_bytes = self._device.bytes_of(tree)
        if not size_bytes:
            return None
        found = self._client.peek(key)
        tokens = found.tokens if found is not None else 0
        # The daemon remembers the agent and the cost of what has left.
        return DeviceEntry(key, tree, size_bytes, tokens, "", Registration(key), [self._device.mark()])

    def _is_reached(self, entry: DeviceEntry, deadline: float, moved: MoveResult) -> bool:
        """Whether the streams have reached the entry's marks by the deadline. An entry whose mark raises stays."""
        marks: list[Mark] = list(entry.marks)
        try:
            return all(mark.wait(max(0.0, deadline - time.monotonic())) for mark in marks)
        except Exception as error:
            _log.warning("%s stays on %s, its stream cannot be awaited: %s", entry.key.hex(), self._device.name, error)
            moved.error = error
            return False

    def _copied(self, entry: DeviceEntry, moved: MoveResult) -> Put | None:
        marks = list(entry.marks)
        try:
            link = self._client.link
            leaving = self._device.outgoing(entry.tree, marks[-1])
            payload = payload_of(leaving, self._device.name, depth_max=link.limits.tree_depth_max)
            options = PutOptions(entry.tokens, cost_ms=entry.cost_ms).checked()
            put = Put(entry.key)
            link.puts.put(put, payload, options, time.monotonic() + _PUT_S)
            if payload.failure is not None:
                raise payload.failure
            return put
        except Exception as error:
            _log.warning("%s of %s is not copied to the host tier: %s", entry.key.hex(), self._device.name, error)
            if not isinstance(error, TensordError):
                moved.error = error
            return None

    def _is_stored(self, entry: DeviceEntry, put: Put, moved: MoveResult) -> bool:
        try:
            put.wait(_PUT_S)
            return put.state in ("stored", "existed")
        except TimedOut:
            return False
        except Exception as error:
            _log.warning("%s of %s may not be in the host tier: %s", entry.key.hex(), self._device.name, error)
            moved.error = error
            return False
