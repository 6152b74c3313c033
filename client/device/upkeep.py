"""The background thread of a DeviceCache: it tells the daemon what lies on the device, and does what the daemon asks.

Owns: the conversation. It is the only sender of one cache's words, so that the daemon hears them in the order in which
they came to be true. Does not own the tables (entries.py), nor how an entry moves (moves.py).

What the daemon was told of is compared with what stands in the table, key by key, and the difference is said: so a put
during an outage, a delete of what was never told, a new daemon, are all the same. An acknowledgement names only keys of
the order that the daemon still has registered: a key that was deleted here is released before, and not acknowledged.

Invariants: a key has at most one registration under way. Of an order, each key is acknowledged or released exactly
once, as long as the connection lasts. Nothing ends the thread but `stop`: errors are logged, and shown as `error`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Literal

from ...errors import DaemonUnavailable, TensordError, Unavailable, UnknownOrder
from ...ipc import messages
from ..link import Connected, Link, Told
from .entries import DeviceEntry, Entries
from .interface import Device
from .moves import Moved, Moves

if TYPE_CHECKING:
    from ..cache import Client

ORDERS_MAX: Final = 4096
"""Orders that wait; more are not taken, and the daemon hears nothing of them."""
_WINDOW: Final = 256
_SLICE_ENTRIES: Final = 16
_SLICE_BYTES: Final = 256 << 20
_USES_MAX: Final = 16_384
_SAY_S: Final = 1.0
_PAUSE_S: Final = 0.1
_GIVE_BACK_S: Final = 1.0
_END_S: Final = 2.0
_log = logging.getLogger("tensord")


@dataclass(slots=True)
class Errand:
    """An order, and what is left of it: keys, and since when each was registered as it came. Without `order` it is our
    own: nobody waits for its end."""

    order: int | None
    kind: Literal["offload", "drop", "promote"]
    keys: deque[tuple[bytes, int | None]]
    connected: Connected | None


class Upkeep:
    """Keeps the daemon's account of one cache's entries as the table has it, from `start` to `stop`.

    `state`: how full the device is, as the daemon last told; None without a daemon or a gauge.
    """

    def __init__(self, client: Client, device: Device, entries: Entries, uses_every_s: float) -> None:
        self.device = device
        self.state: messages.TierState | None = None
        self._error: Exception | None = None
        self._link: Link = client.link
        self._governor = client.governor
        self._entries = entries
        self._uses_every_s = uses_every_s
        self.moves = Moves(client, device, entries)
        self._report_every_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._awake = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._connected: Connected | None = None
        self._told: dict[bytes, int] = {}
        # Answers and orders come in the order of the daemon's words: an order is about a key's present registration
        # only if that was answered before the order came.
        self._since: dict[bytes, int] = {}
        self._under_way: dict[bytes, DeviceEntry] = {}
        self._later: set[bytes] = set()
        self._errands: deque[Errand] = deque()
        self._taken = 0
        self._flush_at = self._report_at = self._resume_at = self._give_back_at = 0.0

    @property
    def error(self) -> Exception | None:
        """The last thing that went wrong. Without its traceback, whose frames would keep tensors on the device."""
        return self._error

    @error.setter
    def error(self, error: Exception | None) -> None:
        self._error = None if error is None else error.with_traceback(None)

    # ---- for the cache

    def start(self) -> None:
        """Begins to listen and to tell."""
        self._thread = threading.Thread(target=self._run, name=f"tensord-device-{self.device.name}", daemon=True)
        self._thread.start()
        self._link.listen(self)
        self._governor.watch()

    def stop(self) -> None:
        """Takes everything out, says so, and ends the thread."""
        self._stopping.set()
        self.wake()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_S)
        self._link.unlisten(self)

    def wake(self) -> None:
        """There may be something to tell. Cheap."""
        if not self._awake:
            self._awake = True
            self._events.put(self._slept)

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    # ---- the link's words, in the link's thread

    def attached(self, connected: Connected) -> None:
        self._events.put(partial(self._on_attached, connected))

    def detached(self) -> None:
        self.state = None
        self._events.put(self._on_detached)

    def told(self, message: Told, connected: Connected) -> None:
        match message:
            case messages.ModeChanged(state=state) if state.gauge == self.device.name:
                self.state = state
                self._events.put(self._say_what_is_missing)
            case messages.Modes(tiers=tiers):
                self.state = next((state for state in tiers if state.gauge == self.device.name), self.state)
            case messages.Order(device=device) if device == self.device.name:
                if self._taken >= ORDERS_MAX:
                    _log.warning("order %d for %s is not taken: %d wait", message.order, device, ORDERS_MAX)
                    return
                self._taken += 1
                self._events.put(partial(self._on_order, message, connected))
            case _:
                pass

    def forked(self) -> None:
        """The child has no VRAM of its parent's."""
        # Kept, and never touched: their finalizers would use a device that did not survive the fork.
        left = self._entries.close_in_child()
        _inherited.append(left)
        for entry in left:
            if entry.registration.state == "sent":
                entry.registration.disown()
        _inherited.append(list(self._under_way.values()))
        self.state = None
        self._begin()
        self._stopping.set()
        self._link.unlisten(self)

    # ---- the thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.turn()
            except Exception as error:
                _log.exception("the device cache of %s goes on after an error", self.device.name)
                self.error = error
                self._stopping.wait(_PAUSE_S)
        try:
            self._end()
        except Exception as error:
            _log.exception("the device cache of %s ended with an error", self.device.name)
            self.error = error

    def turn(self) -> None:
        """Takes in what has happened, says what is to be said, and does some of what is to be done."""
        self._take_events()
        self._tell_differences()
        if self._errands:
            self._do_some(self._errands[0])
        now = time.monotonic()
        if now >= self._flush_at:
            self._flush_at = now + self._uses_every_s
            self._flush_uses()
        if self._report_every_s and now >= self._report_at:
            self._report_at = now + self._report_every_s
            self._report()
        state = self.state
        if state is not None and state.refuses and now >= self._give_back_at:
            # Tensors that were refused or deleted lie in our allocator: with no entry left to order away, nobody else
            # would ever have it give them back, and the emergency would last.
            self._give_back_at = now + _GIVE_BACK_S
            self.device.give_back()

    def _take_events(self) -> None:
        wait_s = 0.0 if self._errands else max(0.0, self._flush_at - time.monotonic())
        if self._resume_at:
            wait_s = min(wait_s, max(0.0, self._resume_at - time.monotonic()))
        if self._report_every_s:
            wait_s = min(wait_s, max(0.0, self._report_at - time.monotonic()))
        with suppress(Empty):
            event = self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait()
            while True:
                event()
                event = self._events.get_nowait()

    def _slept(self) -> None:
        self._awake = False

    def _on_attached(self, connected: Connected) -> None:
        self._forget_daemon()
        self._connected = connected
        self._entries.say_all()
        self._link.ask(
            lambda number: messages.OpenDevice(number, self.device.name),
            _SAY_S,
            connected=connected,
            then=lambda answer: self._events.put(partial(self._on_opened, answer)),
        )

    def _on_detached(self) -> None:
        self._forget_daemon()

    def _forget_daemon(self) -> None:
        self._connected = None
        self._resume_at = 0.0
        self._report_every_s = 0.0
        self._told.clear()
        self._since.clear()
        for entry in self._under_way.values():
            self._unsaid(entry)
        self._under_way.clear()
        self._later.clear()
        self._taken -= sum(errand.order is not None for errand in self._errands)
        self._errands.clear()

    def _unsaid(self, entry: DeviceEntry) -> None:
        """Nobody is going to answer for it."""
        with self._entries.lock:
            entry.said = False
            if self._entries.find(entry.key) is not entry:
                entry.give_up()

    def _on_opened(self, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None:
            opened = answer.result()
            self._report_every_s = opened.report_every_s if self.device.reports else 0.0
            if opened.state is not None and self.state is None and self._connected is not None:
                self.state = opened.state
        elif not isinstance(error, Unavailable):
            _log.warning("the daemon does not take entries of %s: %s", self.device.name, error)
            self.error = error if isinstance(error, Exception) else None

    def _on_order(self, message: messages.Order, connected: Connected) -> None:
        if connected is not self._connected:
            self._taken -= 1
            return
        self._errands.append(
            Errand(message.order, message.kind, deque((key, self._since.get(key)) for key in message.keys), connected)
        )

    # ---- telling

    def _say_what_is_missing(self) -> None:
        """What an earlier mode refused to take in, and is here still, may be taken in now."""
        if len(self._entries) <= len(self._told):
            return
        with self._entries.lock:
            for key in self._entries.keys():  # noqa: SIM118
                if key not in self._told:
                    self._entries.untold[key] = None

    def _tell_differences(self) -> None:
        connected = self._connected
        if connected is None or time.monotonic() < self._resume_at:
            return
        self._resume_at = 0.0
        window = min(_WINDOW, max(1, self._link.limits.requests_in_flight_max // 4))
        room = window - len(self._under_way)
        untold = self._entries.untold
        if not untold or room <= 0:
            return
        released: list[bytes] = []
        wanted: list[DeviceEntry] = []
        with self._entries.lock:
            for key in list(islice(untold, room)):
                del untold[key]
                entry = self._entries.find(key)
                if key in self._under_way:
                    self._later.add(key)
                elif entry is not None and self._told.get(key) != entry.serial:
                    wanted.append(entry)
                elif entry is None and key in self._told:
                    released.append(key)
        self._release(released, connected)
        for entry in wanted:
            self._register(entry, connected)
        if untold and len(self._under_way) < window:
            self.wake()

    def _forget(self, key: bytes) -> None:
        """The daemon does not have it any more."""
        self._told.pop(key, None)
        self._since.pop(key, None)

    def _release(self, keys: list[bytes], connected: Connected) -> None:
        most = self._link.limits.keys_per_request_max
        for start in range(0, len(keys), most):
            some = keys[start : start + most]
            for key in some:
                self._forget(key)
            self._link.ask(
                lambda number, some=some: messages.ReleaseEntries(number, self.device.name, some),  # type: ignore[misc]
                _SAY_S,
                connected=connected,
                then=lambda answer, some=some: self._events.put(  # type: ignore[misc]
                    partial(self._on_released, some, connected, answer)
                ),
            )

    def _on_released(self, keys: list[bytes], connected: Connected, answer: Future[Any]) -> None:
        if connected is self._connected and answer.exception() is not None:
            # It did not go: as far as the daemon knows they are here.
            with self._entries.lock:
                for key in keys:
                    self._told.setdefault(key, 0)
                    self._entries.untold[key] = None

    def _register(self, entry: DeviceEntry, connected: Connected) -> None:
        key = entry.key
        before = self._told.get(key)
        uses = 0
        with self._entries.lock:
            if self._entries.find(key) is not entry:
                # It left, or was put anew, since it was chosen: that is told in its turn.
                return
            entry.said = True
            if before is None:
                uses = entry.uses
                self._entries.unsaid.pop(key, None)
        self._told[key] = entry.serial
        self._under_way[key] = entry
        self._link.ask(
            lambda number: messages.RegisterEntry(
                number, self.device.name, key, entry.size_bytes, entry.tokens, entry.agent, uses
            ),
            _SAY_S,
            connected=connected,
            then=lambda answer: self._events.put(partial(self._on_registered, entry, before, connected, answer)),
        )

    def _on_registered(self, entry: DeviceEntry, before: int | None, connected: Connected, answer: Future[Any]) -> None:
        if connected is not self._connected:
            return
        key = entry.key
        self._under_way.pop(key, None)
        if key in self._later:
            self._later.discard(key)
            self._entries.untold[key] = None
        error = answer.exception()
        if error is None:
            if key in self._told:
                self._since.setdefault(key, entry.serial)
            self._entries.agreed(entry)
            entry.registration.settle("registered")
            return
        if self._told.get(key) == entry.serial:
            if before is None:
                del self._told[key]
            else:
                self._told[key] = before
        if isinstance(error, Unavailable):
            self._unsaid(entry)
            with self._entries.lock:
                self._entries.untold[key] = None
            self._resume_at = time.monotonic() + _PAUSE_S
            return
        refusal = error if isinstance(error, TensordError) else TensordError(str(error))
        if entry.known:
            # A former daemon had it: what the new one has no room for is worth a copy.
            _log.info("%s of %s is not registered again: %s", key.hex(), self.device.name, refusal)
            self._errands.append(Errand(None, "offload", deque([(key, self._since.get(key))]), connected))
        else:
            self._entries.refused(entry)
        entry.registration.settle("refused", refusal)

    def _flush_uses(self) -> None:
        connected = self._connected
        entries = self._entries
        if connected is None or not entries.unsaid:
            return
        said: list[bytes] = []
        with entries.lock:
            for key in [key for key in entries.unsaid if key in self._told][:_USES_MAX]:
                # Who was used often says so over several turns: recency goes before frequency.
                count = min(entries.unsaid[key], max(1, _USES_MAX // max(1, len(entries.unsaid))))
                said.extend([key] * count)
                entries.unsaid[key] -= count
                if not entries.unsaid[key]:
                    del entries.unsaid[key]
        most = self._link.limits.keys_per_request_max
        with suppress(Unavailable):
            for start in range(0, len(said), most):
                uses = messages.UseEntries(self.device.name, said[start : start + most])
                self._link.send(uses, timeout_s=_SAY_S, connected=connected)

    def _report(self) -> None:
        used_bytes, total_bytes = self.device.reading()
        with suppress(Unavailable):
            self._link.send(
                messages.ReadDevice(self.device.name, used_bytes, total_bytes),
                timeout_s=_SAY_S,
                connected=self._connected,
            )

    # ---- obeying

    def _do_some(self, errand: Errand) -> None:
        if errand.kind == "promote":
            keys = [errand.keys.popleft()[0] for _ in range(min(len(errand.keys), 1))]
        else:
            keys = self._slice_of(errand)
        if not errand.keys:
            self._errands.popleft()
            self._taken -= errand.order is not None
        if errand.kind == "promote":
            for key in keys:
                self._promote(key)
            return
        try:
            moved = self.moves.away(
                keys,
                offload=errand.kind == "offload",
                has_daemon=lambda: self._link.connection is errand.connected,
            )
        except Exception:
            # Wherever it ended, what is here still is kept, and what is not is gone.
            moved = Moved()
            for key in keys:
                (moved.kept if key in self._entries else moved.dropped).append(key)
            self._finish(errand, moved)
            raise
        self._finish(errand, moved)
        if moved.error is not None:
            self.error = moved.error

    def _slice_of(self, errand: Errand) -> list[bytes]:
        keys: list[bytes] = []
        size_bytes = 0
        while errand.keys and len(keys) < _SLICE_ENTRIES and size_bytes < _SLICE_BYTES:
            key, since = errand.keys.popleft()
            if errand.order is not None and (since is None or self._since.get(key) != since):
                # What the order was about was released on the way; what stands here is something else.
                continue
            entry = self._entries.find(key)
            size_bytes += entry.size_bytes if entry is not None else 0
            keys.append(key)
        return keys

    def _finish(self, errand: Errand, moved: Moved) -> None:
        tally = self._entries.tally
        tally.offloaded += len(moved.offloaded)
        tally.dropped += len(moved.dropped)
        tally.kept += len(moved.kept)
        tally.freed_bytes += moved.freed_bytes
        connected = self._connected
        if errand.order is None or connected is None or connected is not errand.connected:
            return
        # What was deleted here is not acknowledged: it was released, or is about to be.
        for key in (*moved.offloaded, *moved.dropped):
            self._forget(key)
        if moved.offloaded or moved.dropped or moved.kept:
            self._acknowledge(errand.order, moved, connected)

    def _acknowledge(self, order: int, moved: Moved, connected: Connected) -> None:
        self._link.ask(
            lambda number: messages.AcknowledgeOrder(
                number, self.device.name, order, moved.offloaded, moved.dropped, moved.kept, moved.freed_bytes
            ),
            _SAY_S,
            connected=connected,
            then=lambda answer: self._events.put(partial(self._on_acknowledged, order, moved, connected, answer)),
        )

    def _on_acknowledged(self, order: int, moved: Moved, connected: Connected, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None or connected is not self._connected:
            return
        gone = [*moved.offloaded, *moved.dropped]
        if isinstance(error, UnknownOrder) and len(gone) + len(moved.kept) > 1:
            # A later order took over some of them, and nothing of this was believed: said again one by one.
            freed_bytes = moved.freed_bytes
            for name in ("offloaded", "dropped", "kept"):
                for key in getattr(moved, name):
                    one = Moved(freed_bytes=freed_bytes)
                    getattr(one, name).append(key)
                    self._acknowledge(order, one, connected)
                    freed_bytes = 0
            return
        _log.info("order %d for %s: %s", order, self.device.name, error)
        with self._entries.lock:
            for key in gone:
                # As far as the daemon knows, it is here: it is released, or registered anew.
                self._told.setdefault(key, 0)
                self._entries.untold[key] = None

    def _promote(self, key: bytes) -> None:
        if key in self._entries or (self.state is not None and self.state.refuses):
            return
        entry = self.moves.back(key)
        if entry is not None and key not in self._entries and self._entries.put(entry):
            self._entries.tally.promoted += 1

    # ---- the end

    def _end(self) -> None:
        for entry in self._entries.close():
            if entry.registration.state == "sent":
                entry.registration.settle("lost", DaemonUnavailable("the device cache was closed"))
        self._take_events_that_came()
        connected, keys = self._connected, list(self._told)
        self._forget_daemon()
        if connected is None:
            return
        most = self._link.limits.keys_per_request_max
        for start in range(0, len(keys), most):
            some = keys[start : start + most]
            self._link.ask(
                lambda number, some=some: messages.ReleaseEntries(number, self.device.name, some),  # type: ignore[misc]
                _SAY_S,
                connected=connected,
            )

    def _take_events_that_came(self) -> None:
        with suppress(Empty):
            while True:
                self._events.get_nowait()()


_inherited: Final[list[Any]] = []
"""In the child of a fork: entries of the parent's caches."""
