"""The background thread of a DeviceCache: it reports the device's entries to the daemon, and executes its orders.

Owns: the thread, its events and its schedule. Does not own: the table (entries.py), the daemon's knowledge of it
(ledger.py), the orders (moves.py), which wait while the device is paused.

Invariants: this thread alone sends the messages of its cache, so that the daemon gets them in the order of the changes.
Only `stop` ends the thread: errors are logged, and shown as `error`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any, Final

from ...errors import DaemonUnavailable, Unavailable, UsageError, without_frames
from ...ipc.messages import control as messages
from ..link.answers import ListenerMessage
from ..link.link import SAY_S, Connected, Link
from ..threads.aside import aside, begin
from ..threads.waiting import LockEvent, SimpleQueue
from .entries import DeviceEntries
from .ledger import Ledger
from .moves import Job, Moves

if TYPE_CHECKING:
    from ..core.client import Client

_USES_EVERY_S: Final = 0.25
_PAUSE_S: Final = 0.1
_AGAIN_S: Final = 0.01
"""Seconds until a paused device is looked at again: engines capture many graphs, one soon after the other."""
_GIVE_BACK_S: Final = 1.0
_END_S: Final = 2.0
_log = logging.getLogger("tensord")


class Upkeep:
    """Keeps the daemon's knowledge of one cache's entries equal to the table, from `start` to `stop`.

    `error`: the last error, or None. `uses_every_s`: how often the daemon is told of uses. `owner`: returns the cache.
    Once that is collected, the thread ends by itself, also if `stop` was cut short by a signal handler.
    """

    def __init__(self, client: Client, entries: DeviceEntries) -> None:
        self.device = entries.device
        self.owner: Callable[[], object | None] = lambda: True
        self.error: Exception | None = None
        self.uses_every_s = _USES_EVERY_S
        self._client = client
        self._link: Link = client.link
        self._entries = entries
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = LockEvent()
        self._thread: threading.Thread | None = None
        self.ledger = Ledger(self._link, entries, self._events.put)
        self.moves = Moves(client, entries, self.ledger, self._failed)
        self._report_every_s = 0.0
        self._flush_at = self._report_at = self._give_back_at = 0.0

    def _failed(self, error: Exception) -> None:
        # Frames of a traceback would keep tensors on the device.
        self.error = without_frames(error)

    # ---- for the cache

    def start(self) -> None:
        """Listens to the link and starts the thread.

        Raises:
            UsageError: the client has an open cache of the device already.
            ProcessLimit: no thread can be started.
        """
        name = self.device.name
        others = [other for other in self._link.listeners.alive() if isinstance(other, Upkeep) and not other.stopped]
        if any(other.device.name == name for other in others):
            raise UsageError(f"device {name!r} has a DeviceCache with this client: use it, or close it first")
        self._link.listeners.add(self)
        self._thread = threading.Thread(target=self._run, name=f"tensord-device-{name}", daemon=True)
        try:
            begin(self._thread)
        except BaseException:
            self._stopping.set()
            self._link.listeners.remove(self)
            raise
        self._client.governor.watch()

    def stop(self) -> None:
        """Removes all entries, tells the daemon, and ends the thread. Waits at most 2 s."""
        self._stopping.set()
        self.wake()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_S)
        self._link.listeners.remove(self)

    def wake(self) -> None:
        """Wakes the thread, since the table may have changed. Cheap."""
        # An event that is there is taken after the change.
        if self._events.empty():
            aside(partial(self._events.put, lambda: None))

    def send_away(self, keys: Iterable[bytes]) -> tuple[int, Job]:
        """Begins to offload entries for their owner. Returns the number of those that are there."""
        found = map(self._entries.find, dict.fromkeys(keys))
        entries = deque(entry for entry in found if entry is not None)
        count, job = len(entries), Job(entries, is_owners=True)
        # Looked up by the event: a lost daemon leaves another queue of jobs.
        aside(partial(self._events.put, lambda: self.moves.jobs.append(job)))
        return count, job

    @property
    def state(self) -> messages.TierState | None:
        """The device's fill and mode, as last reported by the daemon; None without a daemon or a gauge."""
        return self._client.governor.state_of(self.device.name)

    @property
    def refuses(self) -> bool:
        """Whether the device accepts no new entries."""
        state = self.state
        return state is not None and state.refuses

    @property
    def stopped(self) -> bool:
        return self._stopping.is_set()

    # ---- calls by the link, in the link's thread

    def attached(self, connected: Connected) -> None:
        self._events.put(partial(self._on_attached, connected))

    def detached(self) -> None:
        self._events.put(partial(self._begin_anew, None))

    def received(self, message: ListenerMessage, connected: Connected) -> None:
        match message:
            case messages.ModeChanged(state=state) if state.gauge == self.device.name:
                self._events.put(self.ledger.register_missing)
            case messages.Order(device=device) if device == self.device.name:
                self._events.put(partial(self.moves.take, message, connected))
            case _:
                pass

    def forked(self) -> None:
        """Closes the cache in the child of a fork: the parent's VRAM is not the child's."""
        self._entries.lock = threading.RLock()  # another thread of the parent may hold the old one
        error = DaemonUnavailable("this process was forked off: the tensors are its parent's")
        # Kept for ever, and never used: their finalizers would use a device that did not survive the fork.
        _inherited.append((self, self._entries.close(error)))
        self._thread = None
        self._events = SimpleQueue()
        self._stopping = LockEvent()
        self._stopping.set()
        self._link.listeners.remove(self)

    # ---- the thread

    def _run(self) -> None:
        while not self._stopping.is_set() and self.owner() is not None:
            try:
                self.turn()
            except Exception as error:
                _log.exception("the device cache of %s continues after an error", self.device.name)
                self._failed(error)
                self._stopping.wait(_PAUSE_S)
        self._stopping.set()
        try:
            self._entries.close(DaemonUnavailable("the device cache was closed"))
            self._take_events()
            self.moves.close()
            self.ledger.close()
        except Exception as error:
            _log.exception("the device cache of %s ended with an error", self.device.name)
            self._failed(error)

    def turn(self) -> None:
        """One turn: handles events, sends differences, and executes a part of the orders."""
        self._take_events(self._wait_s())
        if not self.device.paused:
            self.moves.do_some(refuses=self.refuses)
        if self.ledger.tell_differences():
            self.wake()
        now = time.monotonic()
        if now >= self._flush_at:
            self._flush_at = now + self.uses_every_s
            self.ledger.flush_uses()
        if self.device.paused:
            return
        if self._report_every_s and now >= self._report_at:
            self._report_at = now + self._report_every_s
            self._report()
        if now >= self.moves.in_vain_at + _GIVE_BACK_S or (self.refuses and now >= self._give_back_at):
            # Memory of refused or deleted tensors stays in this process's allocator, and that of a move if other work
            # on the device took long. If no entry is left to evict, no order would ever return it to the driver.
            self._give_back_at = now + _GIVE_BACK_S
            self.moves.in_vain_at = math.inf
            self.device.give_back()

    def _wait_s(self) -> float:
        """Seconds until something is to be done without an event."""
        paused, now = self.device.paused, time.monotonic()
        if self.moves.waiting and not paused:
            return 0.0
        due = [self._flush_at]
        if self.moves.waiting:
            due.append(now + _AGAIN_S)
        if self._report_every_s and not paused:
            due.append(self._report_at)
        return max(0.0, min(due) - now)

    def _take_events(self, wait_s: float = 0.0) -> None:
        with suppress(Empty):
            event = self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait()
            while True:
                event()
                event = self._events.get_nowait()

    def _begin_anew(self, connected: Connected | None) -> None:
        self._report_every_s = 0.0
        self.moves.forget_daemon()
        self.ledger.attach(connected)

    def _on_attached(self, connected: Connected) -> None:
        self._begin_anew(connected)
        self.ledger.ask(lambda number: messages.OpenDevice(number, self.device.name), self._on_opened)

    def _on_opened(self, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None:
            self._report_every_s = answer.result().report_every_s if self.device.reports else 0.0
        elif isinstance(error, Exception) and not isinstance(error, Unavailable):
            _log.warning("the daemon does not take entries of %s: %s", self.device.name, error)
            self._failed(error)

    def _report(self) -> None:
        read_at_s = time.monotonic()
        try:
            used_bytes, total_bytes = self.device.reading()
        except Exception as error:
            # Without a reading the daemon's gauge gets stale, and says so. Orders are carried out all the same.
            self._failed(error)
            return
        with suppress(Unavailable):
            reading = messages.ReadDevice(self.device.name, used_bytes, total_bytes, read_at_s)
            self._link.send(reading, timeout_s=SAY_S, connected=self.ledger.connected)


_inherited: Final[list[Any]] = []
"""In the child of a fork: entries of the parent's caches, which are never finalized."""
