"""What becomes of spans: entries are hidden or end, and their bytes are free once no reader pins them.

    LIVE ─ hide → VICTIM ─ scan: not pinned → ended, free
      ↑              └──── scan: pinned ──┐
      └──────────── published again ──────┘  (also for the put of a child: `recall`)
    LIVE, VICTIM ─ end → ENDED ─ scan: not pinned → free; pinned → the next scan
    LENT ─ Grants.revoke → REVOKED ─ the same

A scan reads the pins of all lanes after a fence; `begin_scan` fixes the spans that it decides about.

Owns: the states of rows from their publication on, and the rows that wait for a scan. Does not own: the choice of
victims (`runway`), the scan itself, nor what else follows from an end (`gone`).

Invariants: bytes are free only after a scan that began after they were unpublished, and found no pin. One scan at a
time. A key has at most one row in state LIVE. Children are hidden before their parents, and published after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

import numpy as np

from ..replacement import Replacement
from .families import Families
from .grants import Grants
from .slots import Slots
from .table import EDGE, ENDED, LIVE, VICTIM, RowTable
from .tenants import Tenants

SCAN_ROWS_MAX: Final = 256
"""Rows of each kind that one scan decides about: less than 2 ms of the event loop."""

Reason = TypeVar("Reason")
Gone = Callable[[Sequence[int], Sequence[str]], None]
"""(rows, the reason of each): entries have ended. Their columns, slots and headers still describe them."""


@dataclass(slots=True)
class ScanOutcome:
    """What a scan decided. `freed`: rows in state ENDED whose bytes may be reused, with their slots free; the caller
    lends them, or frees them. `freed_bytes`: with those of grants, which are free already. `victims`: how many victims
    ended; `republished`: rows that are entries again."""

    freed: list[int] = field(default_factory=list)
    freed_bytes: int = 0
    victims: int = 0
    republished: list[int] = field(default_factory=list)


class Spans:
    """The rows of one store that are published, hidden, or about to be free."""

    def __init__(
        self, table: RowTable, slots: Slots, grants: Grants, tenants: Tenants, families: Families, policy: Replacement
    ) -> None:
        self._table = table
        self._slots = slots
        self._grants = grants
        self._tenants = tenants
        self._families = families
        self._policy = policy
        self._victims: dict[int, str] = {}
        """The hidden rows that no scan decides about yet, with their reasons; the order is that of hiding."""
        self._ended: dict[int, None] = {}
        self.scanning = False
        self._scanned_victims: dict[int, str] = {}
        """Those that the scan in flight decides about."""
        self._scanned_ended: dict[int, None] = {}
        self._pinned_ended: dict[int, None] = {}
        """Rows in state ENDED that the last scan found pinned, or whose children had not ended yet."""
        self.held: dict[int, int] = {}
        """Rows that may not be evicted, by the number of reasons: a lane's pin, a pin by message, a move."""
        self._pinned: dict[int, None] = {}
        """Rows that are held because the last scan found a lane's pin."""
        self.hidden: dict[bytes, int] = {}
        """Rows in state VICTIM by key."""
        self.last_pinned: AbstractSet[int] = frozenset()
        """Span ids that the last scan found pinned."""
        self.gone: list[Gone] = []
        """Called with each batch of entries that have ended."""
        self.unblock: Callable[[int], object] = lambda row: None
        """Called for each block of a cached sequence that has ended: a row with `records`."""

    # ---- entries

    def hide(self, rows: Sequence[int], reason: str) -> None:
        """Makes victims of published rows without published children. A scan follows."""
        table, victims, hidden, by_key = self._table, self._victims, self.hidden, self._table.by_key
        if not rows:
            return
        at = np.array(rows, np.int64)
        keys = self._slots.unpublish_all(table.column("slots")[at].astype(np.int64))
        np.frombuffer(table.states, np.uint8)[at] = VICTIM
        for row, key in zip(rows, keys, strict=True):
            del by_key[key]
            if key in hidden:
                # It was put again since it was hidden.
                self.end([hidden[key]], reason)
            hidden[key] = row
            victims[row] = reason
        parents = table.column("parents")[at]
        if parents.any():
            np.subtract.at(table.column("children"), parents[parents != EDGE], 1)

    def republish(self, row: int) -> None:
        """Publishes a victim again, whose ancestors are published. No scan decides about it any more."""
        table = self._table
        self._victims.pop(row, None)
        self._scanned_victims.pop(row, None)
        key = self._slots.key(table.slots[row])
        self.hidden.pop(key, None)
        table.states[row] = LIVE
        table.by_key[key] = row
        self._slots.publish(table.slots[row])
        if table.parents[row]:
            table.children[table.parents[row]] += 1
        self._policy.may_go([row], row not in self.held)

    def recall(self, key: bytes) -> int:
        """Publishes the victim of a key again, with its hidden ancestors. Returns the row; EDGE if there is no such
        victim, or one of its ancestors has ended."""
        row = self.hidden.get(key, EDGE)
        return row if row and self._bring_back(row) else EDGE

    def _bring_back(self, row: int) -> list[int]:
        """Publishes a victim again, after its hidden ancestors. Returns all of them; none if an ancestor has ended."""
        rows = [row]
        while (above := self._table.parents[rows[0]]) and self._table.states[above] != LIVE:
            if self._table.states[above] != VICTIM:
                return []
            rows.insert(0, above)
        for each in rows:
            self.republish(each)
        return rows

    def replaced(self, key: bytes) -> None:
        """The key of a victim was put again: the victim is not published any more."""
        row = self.hidden[key]
        self.end([row], self.reason_of(row))

    def end(self, rows: Sequence[int], reason: str) -> None:
        """Ends entries, published or hidden, pinned or not. Their bytes wait for a scan. Their children stay linked to
        them, and are ended by the caller."""
        table, slots = self._table, self._slots
        for row in rows:
            if table.states[row] == VICTIM:
                self._victims.pop(row, None)
                self._scanned_victims.pop(row, None)
                self.hidden.pop(slots.key(table.slots[row]), None)
                continue
            del table.by_key[slots.key(table.slots[row])]
            slots.unpublish(table.slots[row])
            if table.parents[row]:
                table.children[table.parents[row]] -= 1
        self._leave(rows, [reason] * len(rows), evicted=False)
        self._ended.update(dict.fromkeys(rows))

    def vacated(self, row: int) -> None:
        """An entry has moved out of the bytes of this row, whose slot is not published any more: they wait for a scan
        as those of an ended entry do."""
        self._table.states[row] = ENDED
        self._ended[row] = None

    def hold(self, row: int) -> None:
        """The row is not to be evicted, for one more reason. Each call is followed by one of `release`, or by the end
        of the entry."""
        count = self.held.get(row, 0)
        self.held[row] = count + 1
        if not count and self._table.states[row] == LIVE:
            self._policy.may_go([row], False)

    def release(self, row: int) -> None:
        self.release_all([row])

    def release_all(self, rows: Sequence[int]) -> None:
        free = []
        for row in rows:
            count = self.held.get(row, 0)
            if count > 1:
                self.held[row] = count - 1
            elif self.held.pop(row, 0) and self._table.states[row] == LIVE:
                free.append(row)
        self._policy.may_go(free, True)

    def reason_of(self, row: int) -> str:
        """Why a victim is to be evicted."""
        return self._victims.get(row) or self._scanned_victims[row]

    def in_use(self) -> set[int]:
        """The rows that are not to be evicted, as far as is known: held ones, and those that the last scan found
        pinned."""
        return {*self.held, *map(self._table.row_of, self.last_pinned)}

    # ---- scans

    @property
    def ended_bytes(self) -> int:
        """Bytes of rows in state ENDED that wait for a scan."""
        sizes = self._table.sizes
        return sum(sizes[row] for rows in (self._ended, self._scanned_ended, self._pinned_ended) for row in rows)

    @property
    def scan_due(self) -> bool:
        """Whether a row was unpublished, or a grant taken back, and no scan has begun since."""
        return bool(self._victims or self._ended or self._grants.fresh)

    @property
    def waits_for_pins(self) -> bool:
        """Whether bytes are free as soon as readers or writers release them."""
        return bool(self._pinned_ended or self._grants.revoked)

    def begin_scan(self) -> None:
        """Fixes the rows that the scan decides about. A fence and the reading of all lanes follow, then `scanned`."""
        assert not self.scanning, "a scan is in flight"
        self.scanning = True
        self._scanned_victims = _first_of(self._victims)
        self._scanned_ended = _first_of(self._ended) | _first_of(self._pinned_ended)
        self._grants.begin_scan()

    def scanned(self, pinned: AbstractSet[int]) -> ScanOutcome:
        """Decides about the rows of the scan by the pins that it found."""
        assert self.scanning, "no scan was begun"
        self.scanning = False
        victims, self._scanned_victims = self._scanned_victims, {}
        ended, self._scanned_ended = self._scanned_ended, {}
        table, span_ids, states = self._table, self._table.span_ids, self._table.states
        self.last_pinned = pinned
        for row in [row for row in self._pinned if span_ids[row] not in pinned]:
            del self._pinned[row]
            self.release(row)
        outcome, gone = ScanOutcome(), [*victims]
        at = np.array(gone, np.int64)
        if not pinned.isdisjoint(table.column("span_ids")[at].tolist()):
            for row in [row for row in gone if span_ids[row] in pinned]:
                if states[row] == VICTIM:
                    self._pin(row)
                    outcome.republished += self._bring_back(row)
            gone = [row for row in gone if states[row] == VICTIM]
            at = np.array(gone, np.int64)
        if gone:
            for key in self._slots.keys(table.column("slots")[at].astype(np.int64)):
                del self.hidden[key]
            self._leave(gone, [victims[row] for row in gone], evicted=True)
            outcome.victims = len(gone)
        self._free([*gone, *ended], pinned, outcome)
        outcome.freed_bytes += self._grants.scanned(pinned)
        return outcome

    def _free(self, rows: list[int], pinned: AbstractSet[int], outcome: ScanOutcome) -> None:
        """Frees the ended rows that no reader pins, and that no children, which are about to end, lead to."""
        table, returned = self._table, self._tenants.owned_bytes
        if not rows:
            return
        at = np.array(rows, np.int64)
        if table.column("firsts")[at].any() or not pinned.isdisjoint(table.column("span_ids")[at].tolist()):
            kept = [row for row in rows if table.firsts[row] or table.span_ids[row] in pinned]
            self._pinned_ended.update(dict.fromkeys(kept))
            rows = [row for row in rows if row not in self._pinned_ended]
            at = np.array(rows, np.int64)
        self._slots.release_all(table.column("slots")[at].astype(np.int64))
        sizes: list[int] = table.column("sizes")[at].tolist()
        for owner, size in zip(table.column("owners")[at].tolist(), sizes, strict=True):
            returned[owner] -= size
        outcome.freed = rows
        outcome.freed_bytes = sum(sizes)

    def unpinned(self, rows: list[int]) -> list[int]:
        """Of rows that the policy has handed out, those that the last scan found no pin of. The others are held until a
        scan finds none: a round of victims that are all in use would free nothing."""
        pinned, span_ids = self.last_pinned, self._table.span_ids
        if not pinned or pinned.isdisjoint(self._table.column("span_ids")[rows].tolist()):
            return rows
        held = [row for row in rows if span_ids[row] in pinned]
        for row in held:
            self._pin(row)
        # A parent stays with its child.
        kept = self._families.ancestors(held).intersection(rows).difference(held)
        self._policy.may_go([*kept], True)
        return [row for row in rows if span_ids[row] not in pinned and row not in kept]

    def _pin(self, row: int) -> None:
        if row not in self._pinned:
            self._pinned[row] = None
            self.hold(row)

    def _leave(self, rows: Sequence[int], reasons: Sequence[str], *, evicted: bool) -> None:
        """What every end of entries brings about. The rows are unpublished already."""
        table, tenants = self._table, self._tenants
        for tell in self.gone:
            tell(rows, reasons)
        self._policy.removed(rows, evicted=evicted)
        at = np.array(rows, np.int64)
        for row in at[table.column("records")[at] != 0].tolist():
            self.unblock(row)
        table.column("records")[at] = 0
        table.column("ends")[at] = 0
        for row in at[table.column("parents")[at] != EDGE].tolist():
            self._families.unlink(row)
        tenants.ended(*(table.column(name)[at].tolist() for name in ("namespaces", "owners", "sizes", "tokens")))
        np.frombuffer(table.states, np.uint8)[at] = ENDED
        if self.held:
            for row in rows:
                self.held.pop(row, None)
                self._pinned.pop(row, None)

    def check_invariants(self) -> None:
        table = self._table
        victims = {**self._victims, **self._scanned_victims}
        ended = {**self._ended, **self._scanned_ended, **self._pinned_ended}
        states = {row: table.states[row] for row in table.in_order()}
        assert set(victims) == {row for row, state in states.items() if state == VICTIM} == set(self.hidden.values())
        assert set(ended) <= {row for row, state in states.items() if state == ENDED}
        assert set(self._pinned) <= set(self.held)
        assert all(states[row] in (LIVE, VICTIM) for row in self.held)


def _first_of(rows: dict[int, Reason]) -> dict[int, Reason]:
    """Takes the first SCAN_ROWS_MAX rows out."""
    if len(rows) <= SCAN_ROWS_MAX:
        taken = rows.copy()
        rows.clear()
        return taken
    return {row: rows.pop(row) for row in [*islice(rows, SCAN_ROWS_MAX)]}
