"""Moves of entries to other places of the ring, while readers read them.

    begin: a place and an unpublished slot for the copy; the entry is held ─ Move, copied elsewhere ─┐
    end:   the copy's slot is published, then the old one is not any more ←──────────────────────────┘
           the two rows change places: the entry keeps its row, with the copy's span id;
           the old bytes, with the span id that readers pin, wait for a scan

Owns: the moves in progress. Does not own: the choice (`stretches`), nor the copying.

Invariants: the copy is published before the old slot is unpublished, and only while the entry is published. A daemon
that is killed at any moment leaves one of the two, or both with equal content. Until a move has ended, its entry's old
bytes are not freed: `sources` count as pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ...shm.index.index import PLACE
from ...shm.ring.layout import SPAN_EXPIRES_AT
from ..forms.effects import Move
from ..store.entries import Entries, OverEntries
from ..store.table import EDGE, ENDED, LIVE

TIME_SHARE: Final = 1 / 8
"""The share of the time that plans and copies may take."""
BURST_S: Final = 0.15
"""The time that plans and copies may take at once after a pause, in seconds."""
ROUND_S: Final = 0.008
ENTRY_S: Final = 50e-6
BYTES_PER_S: Final = 4e9
"""The assumed costs of the searches that end in a plan, of the move of one entry, and of the copy of its bytes."""
DEBT_MAX_S: Final = 1.0
"""Plans that are carried out although no time is left, since all else would cost more, owe at most this."""
_TREE: Final = 0xFFFF << 48


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

    def spent(self, moves: int, copied_bytes: int) -> None:
        """A search was made, after which so many entries move."""
        spent_s = ROUND_S + ENTRY_S * moves + copied_bytes / BYTES_PER_S
        self._left_s = max(self._left_s - spent_s, -DEBT_MAX_S)


class RingMoves(OverEntries):
    """The moves in one ring. `emit`: takes the effects."""

    def __init__(self, entries: Entries, emit: Callable[[Move], object]) -> None:
        super().__init__(entries)
        self._emit = emit
        self._moves: dict[int, tuple[int, int, int]] = {}
        """By the span id of the copy: the entry's row, the row of the copy's bytes, the span id of the original."""
        self._vacated: list[int] = []
        self._held: list[tuple[int, int]] = []
        """Rows and span ids of entries whose moves have ended, until all have."""

    def __len__(self) -> int:
        """The moves in progress."""
        return len(self._moves)

    @property
    def sources(self) -> set[int]:
        """The span ids of entries that are being copied."""
        return {source for _, _, source in self._moves.values()}

    def begin(self, row: int) -> bool:
        """Begins to move a published entry that nobody holds into the hole that fits best. False without a hole or a
        slot; nothing has changed then."""
        table, slots, size = self._table, self._slots, self._table.sizes[row]
        place = self._holes.take(size, ENDED)
        if not place:
            return False
        slot, to = table.slots[row], table.offsets[place]
        number = table.next_id(row)
        tree = slots.words[slots.at(slot) + PLACE] & _TREE
        copy = slots.take(slots.key(slot), number, tree | to, table.payloads[row])
        if copy < 0:
            self._holes.free(place)
            return False
        owner = table.owners[row]
        table.slots[place], table.owners[place] = copy, owner
        self._tenants.owned_bytes[owner] += size
        self._spans.hold(row)
        self._moves[number] = row, place, table.span_ids[row]
        self._emit(Move(number, table.offsets[row], to, size, self._tenants.uids[owner]))
        return True

    def end(self, number: int, *, copied: bool) -> int:
        """Ends the move whose copy has the span id `number`. `copied`: the copy is complete, header included.

        Returns:
            The row of the entry, which has moved; EDGE if copying failed, or the entry has ended meanwhile. The copy,
            which was never published, is free then.
        """
        table, slots = self._table, self._slots
        row, place, source = self._moves.pop(number)
        there = table.states[row] == LIVE and table.span_ids[row] == source
        if there:
            self._held.append((row, number if copied else source))
        if there and copied:
            old, new = table.offsets[row], table.offsets[place]
            # A touch may have changed the time of expiry after the header was copied.
            self._ring[new + SPAN_EXPIRES_AT : new + SPAN_EXPIRES_AT + 8] = self._ring[
                old + SPAN_EXPIRES_AT : old + SPAN_EXPIRES_AT + 8
            ]
            slots.move(table.slots[row], table.slots[place])
            table.slots[row], table.slots[place] = table.slots[place], table.slots[row]
            self._holes.swapped(row, place)
            table.swap(row, place)
            assert table.span_ids[row] == number
            self._vacated.append(place)
        else:
            slots.release(table.slots[place])
            self._tenants.owned_bytes[table.owners[place]] -= table.sizes[place]
            self._holes.free(place)
        if not self._moves:
            # An entry that has ended meanwhile is not held any more.
            self._spans.release_all([row for row, span_id in self._held if table.span_ids[row] == span_id])
            self._held.clear()
            # One scan serves all of them.
            for each in self._vacated:
                self._spans.vacated(each)
            self._vacated.clear()
        return row if there and copied else EDGE
