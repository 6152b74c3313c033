"""The daemon's knowledge of one cache's entries: registered, released, used.

Owns: what the daemon was told of on this connection, and the handling of its answers. Does not own: the table
(entries.py), the daemon's orders (moves.py). All calls run in the upkeep thread; answers return to it by `post`.

For each changed key, what the daemon was told is compared with the table, and the difference is sent. So a put during
an outage, a delete of an unregistered entry, and a new daemon need no special cases.

Invariants: the daemon handles messages in the order in which they are sent, so a release may follow a registration that
is not answered yet. State of a former connection is not used.
"""

from __future__ import annotations

import logging
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
_log = logging.getLogger("tensord")


class Ledger:
    """The daemon's knowledge of one cache's entries.

    `connected`: the present connection, or None. `told`: by key the entry that the daemon was told of; None if it may
    have one that is to be released. `unwelcome`: entries that a former daemon had and the present one refused. `post`
    queues a call for the upkeep thread, after all calls posted before.
    """

    def __init__(self, link: Link, entries: DeviceEntries, post: Callable[[Callable[[], None]], None]) -> None:
        self.connected: Connected | None = None
        self.told: dict[bytes, DeviceEntry | None] = {}
        self.unwelcome: list[DeviceEntry] = []
        self._link = link
        self._device_name = entries.device.name
        self._entries = entries
        self._post = post
        self._in_flight = 0

    # ---- the daemon

    def attach(self, connected: Connected | None) -> None:
        """Begins anew with a connection. None: the connection has ended."""
        self.connected = connected
        self.told.clear()
        self.unwelcome.clear()
        self._in_flight = 0
        if connected is not None:
            self._entries.all_changed()

    def close(self) -> None:
        """Has the daemon release all entries."""
        if self.connected is not None:
            self._release(list(self.told))
        self.attach(None)

    def ask(self, make: Callable[[int], messages.Message], then: Callable[[Future[Any]], None]) -> None:
        """Sends a request, whose answer `then` gets in the upkeep thread, unless the connection has ended by then."""
        connected = self.connected

        def answered(answer: Future[Any]) -> None:
            if connected is self.connected:
                then(answer)

        self._link.ask(make, connected=connected, then=lambda answer: self._post(partial(answered, answer)))

    # ---- the difference to the table

    def register_missing(self) -> None:
        """Queues entries for registration that an earlier mode refused, and that are still in the table."""
        with self._entries.lock:
            self._entries.changed.update((key, None) for key in self._entries.keys() if key not in self.told)  # noqa: SIM118

    def tell_differences(self) -> bool:
        """Sends releases and registrations, up to the limit in flight. Returns whether more can be sent at once."""
        if self.connected is None:
            return False
        window = min(_WINDOW, max(1, self._link.limits.requests_in_flight_max // 4))
        changed = self._entries.changed
        released: list[bytes] = []
        wanted: list[tuple[DeviceEntry, int]] = []
        with self._entries.lock:
            for key in list(islice(changed, max(0, window - self._in_flight))):
                del changed[key]
                entry = self._entries.find(key)
                if key in self.told and (entry is None or self.told[key] is not entry):
                    released.append(key)
                    del self.told[key]
                if entry is not None and key not in self.told:
                    wanted.append((entry, entry.uses))
                    self.told[key] = entry
                    self._entries.unreported_uses.pop(key, None)
        self._release(released)
        for entry, uses in wanted:
            self._register(entry, uses)
        return bool(changed) and self._in_flight < window

    def knows(self, entry: DeviceEntry) -> bool:
        """Whether the daemon has confirmed this very entry, and was told of nothing since."""
        return self.told.get(entry.key) is entry and entry.known_to is self.connected

    def doubt(self, keys: Iterable[bytes]) -> None:
        """Records that the daemon may still have entries of the keys, so that each is released, or registered again."""
        with self._entries.lock:
            for key in keys:
                self.told[key] = None
                self._entries.changed[key] = None

    # ---- uses

    def flush_uses(self) -> None:
        """Reports the uses since the last call to the daemon. Of very many only a part is reported, since recency of
        all keys matters more than frequency."""
        unreported = self._entries.unreported_uses
        if self.connected is None or not unreported:
            return
        said: list[bytes] = []
        with self._entries.lock:
            most = max(1, _USES_MAX // max(1, len(unreported)))
            for key in [key for key in unreported if self.told.get(key)][:_USES_MAX]:
                said.extend([key] * min(unreported.pop(key), most))
        with suppress(Unavailable):
            for some in self._link.batches(said):
                self._link.send(messages.UseEntries(self._device_name, some), timeout_s=SAY_S, connected=self.connected)

    # ---- private

    def _release(self, keys: list[bytes]) -> None:
        for some in self._link.batches(keys):
            release = partial(messages.ReleaseEntries, device=self._device_name, keys=some)
            self.ask(release, partial(self._on_released, some))

    def _on_released(self, keys: list[bytes], answer: Future[Any]) -> None:
        if answer.exception() is not None:
            # The release did not arrive.
            self.doubt(keys)

    def _register(self, entry: DeviceEntry, uses: int) -> None:
        self._in_flight += 1
        new_bytes = 0 if entry.is_reserved or entry.known_to is not None else entry.size_bytes
        about = entry.key, entry.size_bytes, entry.tokens, entry.agent, uses, entry.cost_ms, new_bytes
        self.ask(
            lambda number: messages.RegisterEntry(number, self._device_name, *about),
            partial(self._on_registered, entry),
        )

    def _on_registered(self, entry: DeviceEntry, answer: Future[Any]) -> None:
        self._in_flight -= 1
        error = answer.exception()
        is_told = self.told.get(entry.key) is entry
        if error is None:
            entry.known_to = self.connected
            entry.registration.settle("registered")
        elif isinstance(error, Unavailable):
            # It may have arrived. The end of the connection follows, or the key is told again.
            if is_told:
                self.doubt([entry.key])
        else:
            if is_told:
                del self.told[entry.key]
            self._refused(entry, error if isinstance(error, TensordError) else TensordError(str(error)))

    def _refused(self, entry: DeviceEntry, error: TensordError) -> None:
        if entry.known_to is not None:
            # A former daemon had the entry. The present daemon has no room for it, so it is offloaded.
            _log.info("%s of %s is not registered again: %s", entry.key.hex(), self._device_name, error)
            self.unwelcome.append(entry)
            return
        entry.registration.settle("refused", error)
        with self._entries.lock:
            self._entries.remove(entry)
