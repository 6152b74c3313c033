"""The daemon's knowledge of one cache's entries: registered, released, used.

Owns: the keys that the daemon has from this connection, with their serials; the registrations in flight, and the
handling of their answers. Does not own: the tables (entries.py), the daemon's orders (orders.py), the schedule of calls
(upkeep.py). All calls run in the upkeep thread; answers return to it by `post`.

For each changed key, the daemon's knowledge is compared with the table, and the difference is sent. So a put during an
outage, a delete of an unregistered entry, and a new daemon need no special cases.

Invariants: a key has at most one registration in flight. State of a former connection is not used.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Final

from ...errors import TensordError, Unavailable
from ...ipc.messages import control as messages
from ..link.link import SAY_S, Connected, Link
from .entries import DeviceEntries, DeviceEntry

_WINDOW: Final = 256
_USES_MAX: Final = 16_384
_PAUSE_S: Final = 0.1
_log = logging.getLogger("tensord")

Post = Callable[[Callable[[], None]], None]
"""Queues a call for the upkeep thread, after all calls posted before."""


class Ledger:
    """The daemon's knowledge of one cache's entries.

    `connected`: the present connection, or None. `registered`: the serial with which each key was registered.
    `under_way`: entries whose registration is unanswered. `unwelcome`: keys that a former daemon had and the present
    one refused. `resume_at`: the monotonic time before which nothing is sent; 0 if sending is not paused.
    """

    def __init__(self, link: Link, device_name: str, entries: DeviceEntries, post: Post) -> None:
        self.connected: Connected | None = None
        self.registered: dict[bytes, int] = {}
        self.under_way: dict[bytes, DeviceEntry] = {}
        self.unwelcome: deque[bytes] = deque()
        self.resume_at = 0.0
        self._link = link
        self._device_name = device_name
        self._entries = entries
        self._post = post
        # Answers and orders arrive in the order in which the daemon sent them. So an order concerns a key's present
        # registration only if that registration was answered before the order arrived.
        self._since: dict[bytes, int] = {}
        self._later: set[bytes] = set()

    # ---- the daemon

    def attach(self, connected: Connected) -> None:
        """Starts with a daemon that does not know any entry yet."""
        self.connected = connected
        self._entries.say_all()

    def forget_daemon(self) -> None:
        """Drops all state of the connection, which has ended."""
        self.connected = None
        self.resume_at = 0.0
        self.registered.clear()
        self._since.clear()
        for entry in self.under_way.values():
            self._unanswered(entry)
        self.under_way.clear()
        self._later.clear()
        self.unwelcome.clear()

    def close(self) -> None:
        """Releases all registered keys, without waiting for answers."""
        connected, keys = self.connected, list(self.registered)
        self.forget_daemon()
        if connected is not None:
            self._release(keys, connected)

    def _unanswered(self, entry: DeviceEntry) -> None:
        """Marks an entry's registration as unanswered for good."""
        with self._entries.lock:
            entry.said = False
            if self._entries.find(entry.key) is not entry:
                entry.give_up()

    # ---- the difference to the table

    def register_missing(self) -> None:
        """Queues entries that an earlier mode of the device refused, and that are still in the table, for
        registration."""
        if len(self._entries) <= len(self.registered):
            return
        with self._entries.lock:
            for key in self._entries.keys():  # noqa: SIM118
                if key not in self.registered:
                    self._entries.unsynced[key] = None

    def tell_differences(self) -> bool:
        """Sends registrations and releases, up to the limit in flight. Returns whether more can be sent at once."""
        connected = self.connected
        if connected is None or time.monotonic() < self.resume_at:
            return False
        self.resume_at = 0.0
        window = min(_WINDOW, max(1, self._link.limits.requests_in_flight_max // 4))
        room = window - len(self.under_way)
        unsynced = self._entries.unsynced
        if not unsynced or room <= 0:
            return False
        released: list[bytes] = []
        wanted: list[DeviceEntry] = []
        with self._entries.lock:
            for key in list(islice(unsynced, room)):
                del unsynced[key]
                entry = self._entries.find(key)
                if key in self.under_way:
                    self._later.add(key)
                    continue
                serial = entry.serial if entry is not None else None
                if key in self.registered and self.registered[key] != serial:
                    released.append(key)
                if entry is not None and self.registered.get(key) != serial:
                    wanted.append(entry)
        self._release(released, connected)
        for entry in wanted:
            self._register(entry, connected)
        return bool(unsynced) and len(self.under_way) < window

    # ---- for orders

    def since(self, key: bytes) -> int | None:
        """The serial with which the daemon confirmed the key; None if it did not, or if the key was released since."""
        return self._since.get(key)

    def forget(self, key: bytes) -> None:
        """Records that the daemon does not have the key any more."""
        self.registered.pop(key, None)
        self._since.pop(key, None)

    def not_gone(self, keys: Iterable[bytes]) -> None:
        """Records that the daemon still has the keys, so that each is released, or registered again."""
        with self._entries.lock:
            for key in keys:
                self.registered.setdefault(key, 0)
                self._entries.unsynced[key] = None

    # ---- uses

    def flush_uses(self) -> None:
        """Reports the uses since the last call to the daemon."""
        connected = self.connected
        entries = self._entries
        if connected is None or not entries.unreported_uses:
            return
        said: list[bytes] = []
        with entries.lock:
            for key in [key for key in entries.unreported_uses if key in self.registered][:_USES_MAX]:
                # Many uses of one key are reported over several turns, since recency of all keys matters more than
                # frequency.
                count = min(entries.unreported_uses[key], max(1, _USES_MAX // max(1, len(entries.unreported_uses))))
                said.extend([key] * count)
                entries.unreported_uses[key] -= count
                if not entries.unreported_uses[key]:
                    del entries.unreported_uses[key]
        with suppress(Unavailable):
            for some in self._link.batches(said):
                self._link.send(messages.UseEntries(self._device_name, some), timeout_s=SAY_S, connected=connected)

    # ---- private

    def _release(self, keys: list[bytes], connected: Connected) -> None:
        for some in self._link.batches(keys):
            for key in some:
                self.forget(key)

            def release(number: int, some: list[bytes] = some) -> messages.ReleaseEntries:
                return messages.ReleaseEntries(number, self._device_name, some)

            def then(answer: Future[Any], some: list[bytes] = some) -> None:
                self._post(partial(self._on_released, some, connected, answer))

            self._link.ask(release, connected=connected, then=then)

    def _on_released(self, keys: list[bytes], connected: Connected, answer: Future[Any]) -> None:
        if connected is self.connected and answer.exception() is not None:
            # The release did not arrive.
            self.not_gone(keys)

    def _register(self, entry: DeviceEntry, connected: Connected) -> None:
        key = entry.key
        with self._entries.lock:
            if self._entries.find(key) is not entry:
                # The entry has left since it was chosen. That change is queued separately.
                return
            entry.said = True
            uses = entry.uses
            self._entries.unreported_uses.pop(key, None)
        self.registered[key] = entry.serial
        self.under_way[key] = entry
        self._link.ask(
            lambda number: messages.RegisterEntry(
                number,
                self._device_name,
                key,
                entry.size_bytes,
                entry.tokens,
                entry.agent,
                uses,
                entry.cost_ms,
                entry.new_bytes,
            ),
            connected=connected,
            then=lambda answer: self._post(partial(self._on_registered, entry, connected, answer)),
        )

    def _on_registered(self, entry: DeviceEntry, connected: Connected, answer: Future[Any]) -> None:
        if connected is not self.connected:
            return
        key = entry.key
        self.under_way.pop(key, None)
        if key in self._later:
            self._later.discard(key)
            self._entries.unsynced[key] = None
        error = answer.exception()
        if error is None:
            if key in self.registered:
                self._since.setdefault(key, entry.serial)
            self._entries.agreed(entry)
            entry.registration.settle("registered")
            return
        if self.registered.get(key) == entry.serial:
            del self.registered[key]
        if isinstance(error, Unavailable):
            self._unanswered(entry)
            with self._entries.lock:
                self._entries.unsynced[key] = None
            self.resume_at = time.monotonic() + _PAUSE_S
            return
        refusal = error if isinstance(error, TensordError) else TensordError(str(error))
        if entry.known:
            # A former daemon had the entry. The present daemon has no room for it, so it is offloaded.
            _log.info("%s of %s is not registered again: %s", key.hex(), self._device_name, refusal)
            self.unwelcome.append(key)
        else:
            self._entries.refused(entry)
        entry.registration.settle("refused", refusal)
