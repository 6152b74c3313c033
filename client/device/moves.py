"""Moves of entries: from the device into the ring, out of this process, and back.

Owns: the orders of the daemon and offloads by the owner; the order of steps that makes a move safe. Does not own: the
daemon's knowledge (ledger.py), the schedule (upkeep.py). All calls but `promote` run in the upkeep thread.

Invariants: a tensor in use is never dropped. Each entry of an order is acknowledged or released exactly once while the
connection lasts. An entry that its owner offloads leaves only if the host tier has stored it.

SYNC POINT: an entry's uses are read, then its leases, then its marks, which are awaited. Then the tensors are copied.
Then, under the lock, the entry is removed only if its uses are unchanged and it has no lease. A reader that came in
between has changed the uses. A reader that left in between had added its mark before.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ...errors import DeviceFull, TensordError, TimedOut
from ...ipc.messages import control as messages
from ..arguments.put_options import PutOptions
from ..gpu.interface import payload_of
from ..link.link import Connected
from ..reading.lease import Lease
from ..threads.aside import aside
from ..threads.waiting import LockEvent
from ..writing.outcomes import Put
from .entries import DeviceEntries, DeviceEntry, Registration
from .ledger import Ledger

if TYPE_CHECKING:
    from ..core.client import Client

_MARK_S: Final = 5.0
_PUT_S: Final = 5.0
_SLICE_ENTRIES: Final = 16
_SLICE_BYTES: Final = 256 << 20
_log = logging.getLogger("tensord")


@dataclass(slots=True, eq=False)
class Job:
    """Entries that are to leave.

    `offloads`: after a copy to the host tier. `order`: the number of the daemon's order, which is acknowledged.
    `is_owners`: the owner offloads them. `gone`: how many were offloaded so far. `ended`: each was tried once.
    """

    entries: deque[DeviceEntry]
    offloads: bool = True
    order: int | None = None
    is_owners: bool = False
    gone: int = 0
    ended: LockEvent = field(default_factory=LockEvent)


class Moves:
    """Moves entries of one cache, one job after the other, a few entries at a time.

    `in_vain_at`: when entries last left and no memory went back to the driver; inf if some has gone back since.
    `failed` is called with an error of the device, before anybody learns that a job has ended.
    """

    def __init__(
        self, client: Client, entries: DeviceEntries, ledger: Ledger, failed: Callable[[Exception], None]
    ) -> None:
        self.jobs: deque[Job] = deque()
        self.in_vain_at = math.inf
        self._promotions: deque[bytes] = deque()
        self._client = client
        self._device = entries.device
        self._entries = entries
        self._ledger = ledger
        self._failed = failed

    @property
    def waiting(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.jobs or self._promotions or self._ledger.unwelcome)

    # ---- requests

    def take(self, order: messages.Order, connected: Connected) -> None:
        """Takes an order. Answers and orders arrive as the daemon sent them: an order concerns the entry that the
        daemon has confirmed by now. Of a former connection it concerns none."""
        if connected is not self._ledger.connected:
            return
        if order.kind == "promote":
            self._promotions.extend(order.keys)
            return
        named = [self._ledger.told.get(key) for key in order.keys]
        entries = deque(entry for entry in named if entry is not None and self._ledger.knows(entry))
        self.jobs.append(Job(entries, order.kind == "offload", order.order))

    def forget_daemon(self) -> None:
        """Drops the orders of a daemon that is gone. The owner's offloads stay."""
        self._promotions.clear()
        self.jobs = deque(job for job in self.jobs if job.is_owners)

    def close(self) -> None:
        """Drops all work. The table is empty."""
        self.forget_daemon()
        while self.jobs:
            self.jobs.popleft().ended.set()

    # ---- execution

    def do_some(self, *, refuses: bool) -> None:
        """Executes a part of the first job, or a promotion if there is no job. `refuses`: promote nothing."""
        if self._ledger.unwelcome:
            # A former daemon had these, and the present one has no room for them.
            self.jobs.append(Job(deque(self._ledger.unwelcome)))
            self._ledger.unwelcome.clear()
        if self.jobs:
            job = self.jobs[0]
            entries = self._slice_of(job)
            if not job.entries:
                self.jobs.popleft()
            self._away(job, entries)
        elif self._promotions:
            key = self._promotions.popleft()
            if not refuses and key not in self._entries and (lease := self._client.get(key)) is not None:
                with lease:
                    self.promote(key, lease)

    def _slice_of(self, job: Job) -> list[DeviceEntry]:
        chosen: list[DeviceEntry] = []
        size_bytes = 0
        while job.entries and len(chosen) < _SLICE_ENTRIES and size_bytes < _SLICE_BYTES:
            entry = job.entries.popleft()
            # An entry that was deleted meanwhile is released, and not acknowledged.
            if self._entries.find(entry.key) is entry and (job.order is None or self._ledger.knows(entry)):
                chosen.append(entry)
                size_bytes += entry.size_bytes
        return chosen

    def _away(self, job: Job, entries: list[DeviceEntry]) -> None:
        """Moves entries away, and returns their memory to the driver. Tells who asked for it."""
        offloaded: list[bytes] = []
        dropped: list[bytes] = []
        freed_bytes = 0
        try:
            self._drop(job, entries, offloaded, dropped)
            if offloaded or dropped:
                freed_bytes = self._device.give_back()
                self.in_vain_at = math.inf if freed_bytes else time.monotonic()
        except Exception as error:
            _log.exception("%s: a move of entries ended early", self._device.name)
            self._failed(error)
        kept = [entry.key for entry in entries if self._entries.find(entry.key) is entry]
        job.gone += len(offloaded)
        if not job.entries:
            job.ended.set()
        gone = [*offloaded, *dropped]
        if job.order is not None and self._ledger.connected is not None and (gone or kept):
            for key in gone:
                self._ledger.told.pop(key, None)
            what = self._device.name, job.order, offloaded, dropped, kept, freed_bytes
            self._ledger.ask(
                lambda number: messages.AcknowledgeOrder(number, *what),
                partial(self._on_acknowledged, job.order, gone),
            )

    def _on_acknowledged(self, order: int, gone: list[bytes], answer: Future[Any]) -> None:
        error = answer.exception()
        if error is not None:
            _log.info("order %s for %s: %s", order, self._device.name, error)
            self._ledger.doubt(gone)

    def _drop(self, job: Job, entries: Iterable[DeviceEntry], offloaded: list[bytes], dropped: list[bytes]) -> None:
        """Copies entries into the ring if the job says so, drops them here, and adds their keys to the lists.

        An entry in use is kept. An entry that cannot be copied is dropped; it is kept if its owner offloads it, or the
        daemon is gone.
        """
        link, connected = self._client.link, self._ledger.connected
        deadline = time.monotonic() + _MARK_S
        leaving: list[tuple[DeviceEntry, int, Put | None]] = []
        for entry in entries:
            uses = entry.uses
            if not entry.leases and self._is_reached(entry, deadline):
                # No copy is made that no daemon can take.
                copies = job.offloads and link.connection is not None
                leaving.append((entry, uses, self._copied(entry) if copies else None))
        for entry, uses, put in leaving:
            if put is not None:
                with suppress(TimedOut):
                    put.wait(_PUT_S)
            stored = put is not None and put.state in ("stored", "existed")
            if job.offloads and not stored and job.is_owners:
                _log.warning("%s stays on %s: the host tier did not take it", entry.key.hex(), self._device.name)
            elif job.offloads and not stored and link.connection is not connected:
                continue
            elif self._entries.leave(entry, uses):
                (offloaded if stored else dropped).append(entry.key)

    def _is_reached(self, entry: DeviceEntry, deadline: float) -> bool:
        """Whether the streams have reached the entry's marks by the deadline. An entry whose mark raises stays."""
        try:
            return all(mark.wait(max(0.0, deadline - time.monotonic())) for mark in list(entry.marks))
        except Exception as error:
            _log.warning("%s stays on %s, its stream cannot be awaited: %s", entry.key.hex(), self._device.name, error)
            self._failed(error)
            return False

    def _copied(self, entry: DeviceEntry) -> Put | None:
        link = self._client.link
        try:
            leaving = self._device.outgoing(entry.tree, entry.marks[-1])
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
                self._failed(error)
            return None

    # ---- back

    def promote(self, key: bytes, host: Lease, *, is_reserved: bool = False) -> None:
        """Makes an entry of the content of a host lease, unless the device has no room for it or cannot hold it. An
        entry that was put meanwhile stays."""
        try:
            tree = self._device.to_device(host.tree)
        except DeviceFull:
            return
        except Exception as error:
            # An engine may be waiting for this call. It uses the host tier's copy instead.
            _log.warning("%s is not promoted to %s: %s", key.hex(), self._device.name, error)
            return
        size_bytes = self._device.bytes_of(tree)
        if size_bytes:
            found = self._client.peek(key)
            tokens = found.tokens if found is not None else 0
            # The daemon remembers the agent and the cost of what has left.
            marks = [self._device.mark()]
            entry = DeviceEntry(key, tree, size_bytes, tokens, "", Registration(key), marks, is_reserved=is_reserved)
            aside(partial(self._entries.put, entry))
