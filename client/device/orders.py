"""Requests to move entries of one cache: orders of the daemon, and offloads by its owner; their execution and
acknowledgement.

Owns: the orders with their remaining keys. Does not own: the
move of an entry (moves.py), the daemon's knowledge (ledger.py), the schedule (upkeep.py). All calls but `queue` and
`send_away` run in the upkeep thread.

An acknowledgement names only keys of the order that the daemon still has registered. A key that was deleted here is
released before, and not acknowledged.

Invariants: each key of an order is acknowledged or released exactly once while the connection lasts. An order of a
former connection is not acknowledged. An entry that its owner offloads leaves only if the host tier has stored it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from ...ipc.messages import control as messages
from ..link.link import Connected, Link
from ..threads.waiting import LockEvent
from .entries import DeviceEntries
from .ledger import Ledger, Post
from .moves import MoveResult, Moves

ORDERS_MAX: Final = 4096
"""Limit on waiting orders. Further orders are dropped, without a message to the daemon."""
_SLICE_ENTRIES: Final = 16
_SLICE_BYTES: Final = 256 << 20
_log = logging.getLogger("tensord")


class Leaving:
    """Entries that their owner offloads. `count`: their number. `gone`: the number that has left so far."""

    __slots__ = ("_ended", "count", "gone")

    def __init__(self, count: int) -> None:
        self.count = count
        self.gone = 0
        self._ended = LockEvent()

    def wait(self, timeout_s: float) -> bool:
        """Waits until each entry was tried once. False if that takes longer than `timeout_s` seconds."""
        return self._ended.wait(timeout_s)

    def end(self) -> None:
        """Ends the wait: each entry was tried. For the library."""
        self._ended.set()


@dataclass(slots=True)
class Job:
    """An order with its remaining keys, each with the serial that the daemon had confirmed when the order arrived.
    Without `order` it is this client's own, and not acknowledged. With `leaving` it is the owner's, and each key has
    its entry's serial."""

    order: int | None
    kind: Literal["offload", "drop", "promote"]
    keys: deque[tuple[bytes, int | None]]
    connected: Connected | None
    leaving: Leaving | None = None


class OrderRunner:
    """Executes the orders for one cache one after the other, a few entries at a time."""

    def __init__(
        self, link: Link, device_name: str, entries: DeviceEntries, moves: Moves, ledger: Ledger, post: Post
    ) -> None:
        self._link = link
        self._device_name = device_name
        self._entries = entries
        self._moves = moves
        self._ledger = ledger
        self._post = post
        self._jobs: deque[Job] = deque()
        self._taken = 0

    def __bool__(self) -> bool:
        """Whether work is left."""
        return bool(self._jobs)

    # ---- new orders

    def queue(self, order: messages.Order, connected: Connected) -> None:
        """Queues an order. Called in the link's thread."""
        if self._taken >= ORDERS_MAX:
            _log.warning("order %d for %s is dropped: %d orders are waiting", order.order, order.device, ORDERS_MAX)
            return
        self._taken += 1
        self._post(partial(self._on_order, order, connected))

    def _on_order(self, message: messages.Order, connected: Connected) -> None:
        if connected is not self._ledger.connected:
            self._taken -= 1
            return
        keys = deque((key, self._ledger.since(key)) for key in message.keys)
        self._jobs.append(Job(message.order, message.kind, keys, connected))

    def send_unwelcome_away(self) -> None:
        """Offloads entries that a former daemon had and the present one has no room for."""
        while self._ledger.unwelcome:
            key = self._ledger.unwelcome.popleft()
            keys = deque([(key, self._ledger.since(key))])
            self._jobs.append(Job(None, "offload", keys, self._ledger.connected))

    def send_away(self, entries: Iterable[tuple[bytes, int]]) -> Leaving:
        """Offloads the entries with these keys and serials to the host tier. Callable from any thread."""
        keys: deque[tuple[bytes, int | None]] = deque(entries)
        leaving = Leaving(len(keys))
        if keys:
            self._post(lambda: self._jobs.append(Job(None, "offload", keys, None, leaving)))
        else:
            leaving.end()
        return leaving

    def forget_daemon(self) -> None:
        """Drops the orders of a daemon that is gone. The owner's offloads stay."""
        self._taken -= sum(job.order is not None for job in self._jobs)
        self._jobs = deque(job for job in self._jobs if job.leaving is not None)

    def close(self) -> None:
        """Drops all work. The table is empty."""
        for job in self._jobs:
            if job.leaving is not None:
                job.leaving.end()
        self._jobs.clear()
        self._taken = 0

    # ---- execution

    def do_some(self, *, refuses: bool, failed: Callable[[Exception], None]) -> None:
        """Executes a part of the first order. `refuses`: promote nothing. `failed` is called with an error of the
        device, before anybody learns that the order has ended."""
        job = self._jobs[0]
        if job.kind == "promote":
            keys = [job.keys.popleft()[0] for _ in range(min(len(job.keys), 1))]
        else:
            keys = self._slice_of(job)
        if not job.keys:
            self._jobs.popleft()
            self._taken -= job.order is not None
        if job.kind == "promote":
            for key in keys if not refuses else ():
                self._promote(key)
            return
        try:
            if job.leaving is not None and self._link.connection is None:
                # No daemon can take a copy, so no copy is made.
                moved = MoveResult(kept=keys)
            else:
                moved = self._moves.away(
                    keys,
                    offload=job.kind == "offload",
                    has_daemon=lambda: self._link.connection is job.connected,
                    may_drop=job.leaving is None,
                )
        except Exception as error:
            failed(error)
            # The error may have come at any step: entries in the table count as kept, the others as dropped.
            moved = MoveResult()
            for key in keys:
                (moved.kept if key in self._entries else moved.dropped).append(key)
            self._finish(job, moved)
            raise
        if moved.error is not None:
            failed(moved.error)
        self._finish(job, moved)

    def _slice_of(self, job: Job) -> list[bytes]:
        keys: list[bytes] = []
        size_bytes = 0
        while job.keys and len(keys) < _SLICE_ENTRIES and size_bytes < _SLICE_BYTES:
            key, since = job.keys.popleft()
            if job.order is not None and (since is None or self._ledger.since(key) != since):
                # The entry that the order named was released meanwhile. The present entry is another one.
                continue
            entry = self._entries.find(key)
            if job.leaving is not None and (entry is None or entry.serial != since):
                continue
            size_bytes += entry.size_bytes if entry is not None else 0
            keys.append(key)
        return keys

    def _promote(self, key: bytes) -> None:
        if key in self._entries:
            return
        entry = self._moves.back(key)
        with self._entries.lock:
            # An entry that was put meanwhile stays, since it is newer.
            if entry is not None and key not in self._entries and self._entries.put(entry):
                self._entries.tally.promoted += 1

    # ---- acknowledgements

    def _finish(self, job: Job, moved: MoveResult) -> None:
        tally = self._entries.tally
        tally.kept += len(moved.kept)
        tally.freed_bytes += moved.freed_bytes
        if job.leaving is not None:
            job.leaving.gone += len(moved.offloaded)
        if job.order is None:
            # The key may have been registered anew meanwhile, so its absence is reported to the daemon.
            self._post(partial(self._queue_releases, [*moved.offloaded, *moved.dropped]))
            if job.leaving is not None and not job.keys:
                job.leaving.end()
            return
        connected = self._ledger.connected
        if connected is None or connected is not job.connected:
            return
        # A key that was deleted here is not acknowledged: its release is sent, or queued.
        for key in (*moved.offloaded, *moved.dropped):
            self._ledger.forget(key)
        if moved.offloaded or moved.dropped or moved.kept:
            self._acknowledge(job.order, moved, connected)

    def _queue_releases(self, keys: list[bytes]) -> None:
        with self._entries.lock:
            self._entries.unsynced.update(dict.fromkeys(keys))

    def _acknowledge(self, order: int, moved: MoveResult, connected: Connected) -> None:
        self._link.ask(
            lambda number: messages.AcknowledgeOrder(
                number,
                self._device_name,
                order,
                moved.offloaded,
                moved.dropped,
                moved.kept,
                moved.freed_bytes,
            ),
            connected=connected,
            then=lambda answer: self._post(partial(self._on_acknowledged, order, moved, connected, answer)),
        )

    def _on_acknowledged(self, order: int, moved: MoveResult, connected: Connected, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None or connected is not self._ledger.connected:
            return
        _log.info("order %d for %s: %s", order, self._device_name, error)
        self._ledger.not_gone([*moved.offloaded, *moved.dropped])
