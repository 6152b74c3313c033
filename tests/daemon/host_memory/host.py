"""A row store with its host memory, and a system that takes pages and gives them back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from tensord.daemon.core.budget import RingBudget
from tensord.daemon.core.effects import Allocate, Punch
from tensord.daemon.core.host_memory import HostHolds, Pressed
from tensord.daemon.core.outbox import StoreOutbox
from tensord.daemon.host_memory.host_memory import HostMemory
from tensord.daemon.reports.counters import StoreCounters
from tensord.daemon.store.table import LIVE
from tensord.errors import NotEnoughMemory

from ..store.rows import RowStore, key_of, reuse_word


class Remote:
    """A remote store that is written to before entries go: those in `unwritten` stay until `write`."""

    def __init__(self) -> None:
        self.unwritten: set[int] = set()
        self.staying_now: set[int] = set()
        self.ends = 0

    @property
    def waits(self) -> bool:
        return bool(self.staying_now)

    def staying(self, victims: Sequence[int], now: float) -> set[int]:
        self.staying_now = self.unwritten.intersection(victims)
        return set(self.staying_now)

    def write(self) -> None:
        self.unwritten -= self.staying_now
        self.staying_now = set()

    def end(self) -> None:
        self.ends += 1


class Host:
    """`store` with `host`; `short`: the system has no memory."""

    def __init__(self, ring_bytes: int, *, page_bytes: int = 256, store: RowStore | None = None, **how: object) -> None:
        self.store = store or RowStore(ring_bytes, **how)  # type: ignore[arg-type]
        s = self.store
        self.outbox = StoreOutbox(StoreCounters())
        self.budget = RingBudget(1 << 20, ring_bytes, None)
        self.remote = Remote()
        self.gave_up = 0
        self.host = HostMemory(
            s.table, s.holes, s.spans, s.families, s.policy, self.budget,
            self.remote, self.outbox, self.give_up, page_bytes=page_bytes,
        )  # fmt: skip
        self.host.withdrawn.found()
        s.spans.hide = self.hide  # type: ignore[method-assign]
        self.now = 1.0
        self.effects: deque[Punch | Allocate] = deque()
        self.short = False
        self.holds: HostHolds | None = None
        self.gone: list[tuple[int, str]] = []
        self.scans = 0
        s.spans.gone.append(lambda rows, reasons: self.gone.extend(zip(map(self.number, rows), reasons, strict=True)))

    def give_up(self) -> None:
        self.gave_up += 1

    def hide(self, rows: Iterable[int], reason: str) -> None:
        """As `Spans.hide`: what is hidden is published, not known to be in use, and has no published children."""
        spans, table = self.store.spans, self.store.table
        for row in rows:
            assert table.states[row] == LIVE and not table.children[row]
            assert not spans.is_held(row) and table.span_ids[row] not in spans.last_pinned
            type(spans).hide(spans, [row], reason)

    def number(self, row: int) -> int:
        key = self.store.slots.key(self.store.table.slots[row])
        return next(number for number in range(1000) if key_of(number) == key)

    def row(self, number: int) -> int:
        return self.store.table.by_key[key_of(number)]

    def stored(self) -> set[int]:
        states = self.store.table.states
        return {self.number(row) for row in self.store.table.in_order() if states[row] == LIVE}

    def use(self, *numbers: int) -> None:
        rows = [self.row(number) for number in numbers]
        self.store.policy.used(rows, self.now)
        for row in rows:
            at = self.store.geometry.uses_at // 8 + self.store.table.slots[row]
            self.store.slots.words[at] = reuse_word(1, self.now)

    def pin(self, *numbers: int) -> None:
        self.store.pinned |= {self.store.table.span_ids[self.row(number)] for number in numbers}

    def end(self, numbers: Iterable[int]) -> None:
        self.store.spans.end([self.row(number) for number in numbers], "explicit")

    def press(self, resident_bytes_max: int | None = None) -> None:
        self.host.press(Pressed(resident_bytes_max))
        self.holds = None
        self.settle()

    def limit(self, limit_bytes: int) -> None:
        self.budget.max_bytes = limit_bytes
        self.settle()

    def step(self) -> bool:
        """One event and what follows. False if nothing is left to do."""
        s, host = self.store, self.host
        if s.spans.scanning or s.spans.scan_due or host.scan_due:
            host.scan_due = False
            self.scans += 1
            host.scanned(something_freed=bool(s.scan()))
        elif self.effects:
            effect = self.effects.popleft()
            if isinstance(effect, Punch):
                host.punched(effect.offset)
            else:
                error = NotEnoughMemory("no memory is to be had") if self.short else None
                host.allocated(effect.offset, error, self.now)
        elif host.postponed:
            host.tick(self.now)
        else:
            return False
        self.follow()
        return True

    def follow(self) -> None:
        self.host.reconcile(self.now)
        self.host.report(self.store.holes.capacity_bytes)
        for effect in self.outbox.take():
            if isinstance(effect, HostHolds):
                assert effect != self.holds
                self.holds = effect
            else:
                assert isinstance(effect, Punch | Allocate)
                self.effects.append(effect)
        self.check()

    def settle(self) -> None:
        self.follow()
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("it never settles")

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (timer := self.host.next_timer()) is not None and timer <= end:
            self.now = max(timer, self.now)
            self.host.tick(self.now)
            self.settle()
        self.now = end

    def check(self) -> None:
        self.host.check_invariants()
        self.store.check_invariants()
        assert self.host.residency.resident_bytes + self.host.residency.punched_bytes == self.store.holes.capacity_bytes
