"""A store whose lifetimes and reports are tested: clients that put and read, and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensord.daemon.forms.effects import Announce
from tensord.daemon.forms.events import Accessed, ClientJoined
from tensord.shm.lanes.records import NO_KEY

from ..store.rows import RowStore, key_of

SPAN = 320  # bytes of the ring of a payload of 100
UNIX_AT_ZERO_S = 1_000_000.0


class LifetimesStand:
    """`rows` has the parts. Numbers name keys (`key_of`)."""

    def __init__(self, ring_bytes: int = 64 << 10, *, pinned_bytes_max: int = 1 << 20, **rows: Any) -> None:
        self.rows = RowStore(
            ring_bytes, pins_per_client_max=4, pinned_bytes_max=pinned_bytes_max, **{"buckets": 256, **rows}
        )
        parts = self.rows.parts
        self.now = 1.0
        self.outbox, self.hits = parts.outbox, parts.hits
        self.outbox.clients.update({number: ClientJoined(number, 0) for number in (1, 2, 3)})
        self.lifetimes = parts.lifetimes
        self.uses, self.sweeps = self.lifetimes, self.lifetimes.sweeps
        self.reports = parts.reports
        self.reports.unix_at_zero_s = UNIX_AT_ZERO_S
        self.told: list[dict[str, Any]] = []
        """What watchers are told."""

    # ---- what clients do

    def put(self, number: int | bytes, payload: int = 100, parent: int | None = None, **put: Any) -> int:
        """Puts an entry, for which the coldest are evicted if there is no room. Returns its row; 0 without room."""
        self.outbox.now = self.now
        key = number if isinstance(number, bytes) else key_of(number)
        above = NO_KEY if parent is None else key_of(parent)
        row = self.rows.put(key, payload, parent=above, now=self.now, **put)
        while not row and self.rows.evict(1):
            row = self.rows.put(key, payload, parent=above, now=self.now, **put)
        if row:
            self.lifetimes.stored([row], self.now, put.get("client", 1))
        self.step()
        return row

    def read(self, *numbers: int, misses: int = 0, lost: int = 0, others: Iterable[int] = ()) -> None:
        """Clients have used entries, and `others`: span ids."""
        ids = [self.rows.table.span_ids[self.row(number)] for number in numbers]
        self.outbox.now = self.now
        self.uses.accessed(Accessed([*ids, *others], misses, lost), self.now)

    def view(self, number: int) -> int:
        """A lane pins an entry from now on. Returns the span id."""
        span_id: int = self.rows.table.span_ids[self.row(number)]
        self.rows.pinned.add(span_id)
        return span_id

    def pin(self, client: int, number: int, for_s: float) -> None:
        self.lifetimes.pins.pin(client, self.row(number), self.now + for_s)

    def end(self, *numbers: int, reason: str = "explicit") -> None:
        self.outbox.now = self.now
        self.lifetimes.end([self.row(number) for number in numbers], reason)
        self.step()

    # ---- time

    def step(self) -> None:
        """What the store does at the end of each event."""
        self.lifetimes.step()
        for effect in self.outbox.take():
            if isinstance(effect, Announce):
                self.told.append(effect.body)

    def tick(self) -> None:
        self.outbox.now = self.now
        self.lifetimes.tick(self.now)
        self.step()

    def settle(self) -> None:
        """Ticks until nothing is postponed."""
        for _ in range(1000):
            if not self.lifetimes.postponed:
                return
            self.tick()
        raise AssertionError("work is postponed for ever")

    def pass_time(self, seconds: float) -> None:
        """Ticks whenever the store has asked for it."""
        until = self.now + seconds
        self.settle()
        for _ in range(10_000):
            timer = self.lifetimes.next_timer()
            if timer is None or timer > until:
                self.now = until
                return
            self.now = max(self.now, timer)
            self.tick()
            self.settle()
        raise AssertionError("a timer is always due")

    # ---- what there is

    def row(self, number: int | bytes) -> int:
        """The row of an entry, hidden or not; 0 if there is none."""
        key = number if isinstance(number, bytes) else key_of(number)
        return self.rows.table.by_key.get(key) or self.rows.spans.hidden.get(key, 0)

    def stored(self, numbers: Iterable[int] = range(1000)) -> set[int]:
        """Those of the numbers whose keys readers find."""
        return {number for number in numbers if self.rows.read(key_of(number)) is not None}

    def status(self) -> dict[str, Any]:
        return self.reports.status(self.now)

    def entry(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self.reports.why(key_of(number), self.now)["entry"]
        return found
