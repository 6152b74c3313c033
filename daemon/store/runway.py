"""The runway: room that is made ahead of puts, in batches.

    victims of the policy → unpublished → one fence, one scan of all lanes → unpinned: a place; pinned: published again

Owns: the rows that are victims, and the free places that are kept ready. Does not own: the choice (the policy), the
lanes, nor who gets a place (`grants`).

Invariants: a row is freed only after a scan that began after it was unpublished, and found no pin. One round at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from .commit import Commits
from .grants import Grants
from .holes import Holes
from .slots import Slots
from .table import ENDED, LIVE, VICTIM, RowTable
from .tenants import Tenants
from .window import PutWindow

ROUND_MAX: int = 256
"""Victims of one round: less than 2 ms of the event loop."""


class VictimOrder(Protocol):
    """What the runway needs of a policy."""

    def entered(self, rows: list[int]) -> None: ...
    def removed(self, rows: list[int], *, evicted: bool) -> None: ...
    def victims(self, most: int) -> list[int]: ...


class Runway:
    """Makes room in one ring."""

    def __init__(
        self,
        table: RowTable,
        holes: Holes,
        slots: Slots,
        grants: Grants,
        window: PutWindow,
        tenants: Tenants,
        commits: Commits,
        order: VictimOrder,
    ) -> None:
        self._table = table
        self._holes = holes
        self._slots = slots
        self._grants = grants
        self._window = window
        self._tenants = tenants
        self._commits = commits
        self._order = order
        self._victims: list[int] = []
        self._ended: list[int] = []
        self.evicted = 0
        self.republished = 0
        self.places: dict[int, list[int]] = {}
        """Free rows by size, ready to be lent: the places of victims, whose bytes need no search."""
        self.places_bytes = 0

    @property
    def waits_for_scan(self) -> bool:
        """Whether rows were unpublished, and no scan has begun since."""
        return bool(self._victims or self._ended or self._grants.revoked)

    def begin(self, most: int) -> int:
        """Unpublishes up to `most` victims. A fence and a scan of all lanes follow, then `end`. Returns how many."""
        table, slots = self._table, self._slots
        states, slot_of, by_key, words = table.states, table.slots, table.by_key, slots.words
        order = self._order
        if leaving := self._window.leaving(table.sizes, 4 * most):
            order.entered([row for row in leaving if states[row] == LIVE])
        rows = order.victims(min(most, ROUND_MAX))
        if not rows:
            rows = [row for row in self._window.oldest(most) if states[row] == LIVE and not table.children[row]]
        key_at, first_word = slots.memory, slots.first_word
        for row in rows:
            states[row] = VICTIM
            slot = slot_of[row]
            at = first_word + (slot // 8 + slot + 1) * 8
            # SYNC POINT: as in Slots.unpublish. The fence comes after the last of them.
            words[at] = words[at] + 1
            words[first_word + slot // 8 * 72 + slot % 8] = 0
            del by_key[key_at[at * 8 + 8 : at * 8 + 40].tobytes()]
        self._victims += rows
        return len(rows)

    def end(self, pinned: set[int]) -> int:
        """Decides about the victims by the pins that the scan found. Returns the bytes that became free."""
        table, slots, tenants = self._table, self._slots, self._tenants
        span_ids, sizes, tokens = table.span_ids, table.sizes, table.tokens
        owners, names = table.owners, table.namespaces
        states, slot_of, words, free, first_word = table.states, table.slots, slots.words, slots.free, slots.first_word
        victims, self._victims = self._victims, []
        places, freed, gone_tokens = self.places, 0, 0
        gone: list[int] = []
        for row in victims:
            if span_ids[row] in pinned:
                self._republish(row)
                continue
            size, owner, name, count = sizes[row], owners[row], names[row], tokens[row]
            slot = slot_of[row]
            # Slots.release, inline.
            words[first_word + (slot // 8 + slot + 1) * 8 + 5] = 0
            free[slot // 8] |= 1 << slot % 8
            tenants.entries[name] -= 1
            tenants.bytes[name] -= size
            tenants.owned_entries[owner] -= 1
            tenants.owned_tokens[owner] -= count
            tenants.owned_bytes[owner] -= size
            states[row] = ENDED
            gone.append(row)
            gone_tokens += count
            freed += size
            at = places.get(size)
            if at is None:
                places[size] = [row]
            else:
                at.append(row)
        self.places_bytes += freed
        for row in gone:
            if table.parents[row]:
                table.children[table.parents[row]] -= 1
        self._order.removed(gone, evicted=True)
        self.evicted += len(gone)
        self._commits.entries -= len(gone)
        self._commits.tokens -= gone_tokens
        return freed + self._grants.scanned(pinned)

    def place(self, size: int) -> int:
        """A row of `size` bytes or more, to be lent: a place of that size, else a part of a hole, else a larger place.

        Returns:
            The row, in state ENDED; EDGE without room.
        """
        at = self.places.get(size)
        if at:
            row = at.pop()
            self.places_bytes -= size
            return row
        row = self._holes.take(size, ENDED)
        if row:
            return row
        larger = min((each for each, rows in self.places.items() if each > size and rows), default=0)
        if larger:
            row = self.places[larger].pop()
            self.places_bytes -= larger
            self._holes.cut(row, size)
        return row

    def give_up(self, rows: Iterable[int] = ()) -> None:
        """Turns all places into holes, so that places beside one another become one."""
        for row in [*rows, *(row for rows in self.places.values() for row in rows)]:
            self._holes.free(row)
        self.places.clear()
        self.places_bytes = 0

    def _republish(self, row: int) -> None:
        self._table.states[row] = LIVE
        self._table.by_key[self._slots.key(self._table.slots[row])] = row
        self._slots.publish(self._table.slots[row])
        self._order.entered([row])
        self.republished += 1
