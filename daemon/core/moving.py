"""Chooses entries to copy elsewhere, so that enough bytes for a put become free in one piece.

An entry that the policy would keep may lie where a put needs room. It is moved instead of evicted. Around each of the
largest holes a stretch is examined: its entries move to holes elsewhere, and those that fit into no hole are evicted.
The stretch of the lowest price is taken; of stretches of equal price, the one with the fewest bytes to evict, then the
one with the fewest bytes to copy.

Owns the plan. Does not own how an entry moves (`memory`), nor which entries are evictable. Blocks of sequences are not
moved, since the prefix index finds their text by its offset.

Invariant: a plan copies at most COPIED_SHARE times the bytes that are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ...shm.window import window_around
from .entries import SpanEntry
from .span_table import SpanTable
from .windows import Price, Prices

STRETCHES_MAX: Final = 16
"""Stretches examined for one put in one round."""
ENTRIES_MAX: Final = 256
"""Limit on the entries of one stretch."""
LOOKS_MAX: Final = 512
"""Once this number of entries was examined, no further stretch is examined: 2 to 3 ms."""
COPIED_SHARE: Final = 4
"""A plan copies at most this number of times the bytes that are needed."""
TIME_SHARE: Final = 1 / 4
"""The share of the time that plans and copies may take."""
BURST_S: Final = 0.1
"""The time that plans and copies may take at once after a pause, in seconds."""
ROUND_S: Final = 0.008
ENTRY_S: Final = 50e-6
BYTES_PER_S: Final = 4e9
"""The assumed costs of a search for a plan, of the move of one entry, and of the copy of its bytes."""


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Frees a stretch. `moves`: entries with the holes that they go to, in this order. `victims`: entries to evict, at
    the price `lost`."""

    lost: Price
    gone_bytes: int
    copied_bytes: int
    moves: list[tuple[SpanEntry, int]]
    victims: list[SpanEntry]


class MovingTime:
    """The time that is left for moves: a leaky bucket. Without it, puts at full speed into a fragmented ring would be
    four times slower. Puts with pauses are not limited by it."""

    def __init__(self) -> None:
        self._left_s = BURST_S
        self._at = 0.0

    def is_left(self, now: float) -> bool:
        """Whether entries may move at `now`. Adds the time that was earned since the last call."""
        self._left_s = min(self._left_s + TIME_SHARE * max(now - self._at, 0.0), BURST_S)
        self._at = now
        return self._left_s > 0.0

    def searched(self) -> None:
        """A round has searched for entries to move."""
        self._left_s -= ROUND_S

    def moved(self, plan: MovePlan) -> None:
        """The moves of a plan begin."""
        self._left_s -= ENTRY_S * len(plan.moves) + plan.copied_bytes / BYTES_PER_S


class Moving:
    """Plans for one put in one round. Entries that `may_move` can be moved out of the way; victims are entries that
    `may_go`."""

    def __init__(
        self,
        memory: SpanTable,
        prices: Prices,
        may_move: Callable[[SpanEntry], bool],
        may_go: Callable[[SpanEntry], bool],
    ) -> None:
        self._memory = memory
        self._prices = prices
        self._may_move = may_move
        self._may_go = may_go
        self._looks = 0

    def best(self, size_bytes: int) -> MovePlan | None:
        """The plan of the lowest price; None if the examined stretches allow none."""
        best: MovePlan | None = None
        self._looks = 0
        for hole in self._memory.ring.largest_holes(STRETCHES_MAX):
            plan = self._around(hole, size_bytes)
            if plan is not None:
                best = plan if best is None else min(best, plan, key=_cost)
            if self._looks >= LOOKS_MAX:
                break
        return best

    def _around(self, hole: int, size_bytes: int) -> MovePlan | None:
        memory, ring = self._memory, self._memory.ring

        def share_taken(offset: int) -> float:
            # The share of the span in the bytes that the stretch gains by the span and the larger adjacent hole.
            size = ring.size_at(offset)
            before = ring.hole_before(offset)
            beside = max(ring.hole_bytes(offset + size), 0 if before is None else ring.hole_bytes(before))
            return size / (size + beside)

        def may_move(offset: int) -> bool:
            self._looks += 1
            entry = memory.spans.at(offset)
            return not entry.child_count and self._may_move(entry)

        window = window_around(ring.map, hole, size_bytes, may_move, share_taken, ENTRIES_MAX)
        if window is None or not window.enough:
            return None
        entries = sorted(map(memory.spans.at, window.spans), key=lambda entry: (-entry.span_bytes, entry.offset))
        movable = [entry for entry in entries if not entry.prefix_bytes]
        places = ring.places([entry.span_bytes for entry in movable], window.low, window.high)
        moves = [(entry, place) for entry, place in zip(movable, places, strict=True) if place is not None]
        copied_bytes = sum(entry.span_bytes for entry, _ in moves)
        if copied_bytes > COPIED_SHARE * size_bytes:
            return None
        moved = {entry for entry, _ in moves}
        victims = [entry for entry in entries if entry not in moved]
        if not all(map(self._may_go, victims)):
            return None
        gone_bytes = sum(entry.span_bytes for entry in victims)
        return MovePlan(self._prices.total(victims), gone_bytes, copied_bytes, moves, victims)


def _cost(plan: MovePlan) -> tuple[Price, int, int]:
    return plan.lost, plan.gone_bytes, plan.copied_bytes
