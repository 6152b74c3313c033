"""The resident bytes of the ring: returned to the system down to a target, taken back up to it, exchanged.

    over the target:  hole ─ becomes a withdrawn row → Punch → Punched: the pages are the system's
    under the target: withdrawn row ─ Allocate → Allocated: a hole again; after an error it stays withdrawn

The target is the least of three values: the byte budget rounded up to a page; the limit set under pressure; and, after
a failed allocation, the bytes resident at that time.

If holes do not suffice, `victims_bytes` says how many bytes of pages entries must give.

An exchange makes room for a grant if only withdrawn rows are in its way: first as many bytes are returned elsewhere,
so that the target holds at every moment; then the bytes that the grant needs are taken back.

Invariants: bytes that are being punched or allocated are withdrawn, so no span is ever placed in them. No Allocate
starts during a Punch. At most one Allocate and PUNCHES_MAX Punches are pending, each of at most PIECE_BYTES.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from ...errors import TensordError
from ..forms.effects import Allocate, Punch
from ..forms.limits import RingBudget
from ..forms.outbox import StoreOutbox
from ..store.holes import Holes
from .withdrawn import Withdrawn, page_at, paged

PIECE_BYTES: Final = 64 << 20
"""The largest Punch or Allocate."""
PUNCHES_MAX: Final = 32
"""Punches pending at a time."""
RETRY_S: Final = 5.0
"""The delay after a failed Allocate."""


@dataclass(slots=True)
class Exchange:
    """A stretch of the ring without other rows. `missing`: what of it is still to be taken back, as (offset, bytes)."""

    low: int
    high: int
    missing: deque[tuple[int, int]]


class Residency:
    """Controls which bytes of a ring are resident."""

    def __init__(self, withdrawn: Withdrawn, holes: Holes, budget: RingBudget, outbox: StoreOutbox) -> None:
        self._withdrawn = withdrawn
        self._holes = holes
        self._budget = budget
        self._outbox = outbox
        self.pressure_bytes_max: int | None = None
        """The limit under pressure."""
        self._available_bytes: int | None = None
        self._punching: dict[int, int] = {}
        self._allocating: tuple[int, int] | None = None
        self._exchange: Exchange | None = None
        self.retry_at: float | None = None
        """When a failed allocation is tried again."""
        self._holes_left = True
        self._was_unrestricted = False
        self.error = ""

    @property
    def resident_bytes(self) -> int:
        """Bytes of the ring whose pages are in memory, those being punched included."""
        return self._kept_bytes + sum(self._punching.values())

    @property
    def punched_bytes(self) -> int:
        """Bytes of the ring that were returned to the system."""
        return self._holes.capacity_bytes - self.resident_bytes

    @property
    def desired_bytes(self) -> int:
        """The bytes that would be resident if every allocation succeeded."""
        wanted_bytes, most = self.wanted_bytes(self._holes.capacity_bytes), self.pressure_bytes_max
        return wanted_bytes if most is None else min(wanted_bytes, paged(most))

    @property
    def excess_bytes(self) -> int:
        """Bytes that are still to be withdrawn, for the target and for an exchange."""
        if self._is_unrestricted:
            return 0
        reserved = 0 if self._exchange is None else sum(size for _, size in self._exchange.missing)
        return max(0, paged(self._kept_bytes + reserved - self._target_bytes))

    @property
    def victims_bytes(self) -> int:
        """The excess bytes that no hole can give. Entries must give as many bytes of pages."""
        return 0 if self._holes_left else self.excess_bytes

    @property
    def reason(self) -> str:
        """The reason for which entries must give pages, as evictions are counted."""
        pressed = self.pressure_bytes_max is not None and self.pressure_bytes_max < self._budget.max_bytes
        return "pressure" if pressed and self._kept_bytes > self._target_bytes else "capacity"

    @property
    def over_target(self) -> bool:
        """Whether more bytes are resident than the target, regardless of an exchange."""
        return not self._is_unrestricted and self.resident_bytes > self._target_bytes

    @property
    def regrowing(self) -> bool:
        """Whether pages are being taken back permanently, or can be now."""
        if self._exchange is not None or self._is_unrestricted:
            return False
        return self._allocating is not None or self._regrowth_bytes > 0

    def wanted_bytes(self, ring_bytes: int) -> int:
        """The bytes that would be resident without pressure. `ring_bytes`: the ring's final size."""
        return min(paged(min(self._budget.max_bytes, ring_bytes)), ring_bytes)

    def step(self, now: float) -> None:
        """Requests what the target demands: pages returned to the system, or taken back from it. Sets the budget's
        `resident_bytes_max`, within which what is lent stays."""
        was_unrestricted, self._was_unrestricted = self._was_unrestricted, self._is_unrestricted
        if was_unrestricted and self._was_unrestricted:
            return
        if self.retry_at is not None and now >= self.retry_at:
            self.retry_at = self._available_bytes = None
        if self.desired_bytes <= self._kept_bytes:
            # No more is desired than is resident, so a failed allocation does not matter any more.
            self.retry_at, self._available_bytes, self.error = None, None, ""
        target_bytes = self._target_bytes
        limited = target_bytes < self._holes.capacity_bytes
        self._budget.resident_bytes_max = target_bytes if limited else None
        self._withdraw()
        if self._punching or self._allocating is not None:
            return
        if self._exchange is not None:
            if self._exchange.missing and not self.excess_bytes:
                offset, size = self._exchange.missing.popleft()
                if size > PIECE_BYTES:
                    self._exchange.missing.appendleft((offset + PIECE_BYTES, size - PIECE_BYTES))
                self._allocate(offset, min(size, PIECE_BYTES))
        elif self._regrowth_bytes:
            piece = self._withdrawn.restorable(min(self._regrowth_bytes, PIECE_BYTES))
            assert piece is not None
            self._allocate(*piece)

    def punched(self, offset: int) -> None:
        del self._punching[offset]

    def allocated(self, offset: int, error: TensordError | None, now: float) -> None:
        assert self._allocating is not None and self._allocating[0] == offset, offset
        _, size = self._allocating
        self._allocating = None
        if error is None:
            self._withdrawn.restore(offset, size)
            if self._exchange is None:
                self.error = ""
            return
        self.error = str(error)
        self._available_bytes = self.resident_bytes
        self.retry_at = now + RETRY_S
        if self._exchange is not None:
            self._exchange.missing.clear()

    def exchange(self, low: int, high: int, size_bytes: int) -> None:
        """Begins to take back the withdrawn pages of [low, high), which contains no other row, for a grant of
        `size_bytes`. Not while pages are being taken back."""
        assert self._allocating is None
        low, high = self._withdrawn.narrowed(low, high, size_bytes)
        self._exchange = Exchange(low, high, deque(self._withdrawn.within(low, high)))

    def exchange_progress(self) -> str:
        """ "none", "moving" or "done", also if it failed."""
        exchange = self._exchange
        if exchange is None:
            return "none"
        return "moving" if exchange.missing or self._allocating is not None else "done"

    def drop_exchange(self) -> None:
        """Ends the exchange. Bytes that were taken back stay resident until `step`."""
        self._exchange = None

    def check_invariants(self) -> None:
        self._withdrawn.check_invariants()
        extents = self._withdrawn.within(0, self._holes.capacity_bytes)
        for offset, size in [*self._punching.items(), *([self._allocating] if self._allocating else [])]:
            assert any(low <= offset and offset + size <= low + much for low, much in extents), "not withdrawn"
        assert len(self._punching) <= PUNCHES_MAX and self.punched_bytes >= 0
        if self._holes_left and self.excess_bytes:
            assert len(self._punching) == PUNCHES_MAX, "nothing is done about holes over the target"
        if not self._punching and self._allocating is None and self._exchange is None:
            assert not self._regrowth_bytes, "nothing is done about bytes that may be taken back"

    @property
    def _is_unrestricted(self) -> bool:
        """Whether the whole ring is resident and may be. A shortcut for the usual state: each event asks several
        times."""
        return (
            self.pressure_bytes_max is None
            and self._available_bytes is None
            and self._exchange is None
            and self._allocating is None
            and not self._punching
            and not self._withdrawn.size_bytes
            and self._budget.max_bytes >= self._holes.capacity_bytes
        )

    @property
    def _kept_bytes(self) -> int:
        """Bytes of the ring that are not withdrawn."""
        return self._holes.capacity_bytes - self._withdrawn.size_bytes

    @property
    def _target_bytes(self) -> int:
        return self.desired_bytes if self._available_bytes is None else min(self.desired_bytes, self._available_bytes)

    @property
    def _regrowth_bytes(self) -> int:
        """Bytes of whole pages that may be taken back now."""
        return min(page_at(max(0, self._target_bytes - self.resident_bytes)), self.punched_bytes)

    def _withdraw(self) -> None:
        exchange = self._exchange
        spared = (0, 0) if exchange is None else (exchange.low, exchange.high)
        self._holes_left = True
        while (excess := self.excess_bytes) and len(self._punching) < PUNCHES_MAX:
            piece = self._withdrawn.withdraw_some(min(excess, PIECE_BYTES), spared)
            if piece is None:
                self._holes_left = False
                return
            self._punching[piece[0]] = piece[1]
            self._outbox.add(Punch(*piece))

    def _allocate(self, offset: int, size_bytes: int) -> None:
        self._allocating = (offset, size_bytes)
        self._outbox.add(Allocate(offset, size_bytes))
