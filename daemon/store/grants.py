"""Grants: places of the ring that are lent to clients to write in, and what each has left.

    LENT row ──records──→ LIVE rows, and what is left of the grant
       └─ given back, or its client is gone: REVOKED ─ a scan finds no pin of it → hole

A grant's bytes are its pieces: rows in state LENT. Records of several threads may name its bytes in any order, so a
record in the middle of a piece splits it. The grant has a slot of its own in the index, under a key that nobody has:
the next daemon leaves its bytes alone until no lane pins it.

Owns: the grants, and which rows are pieces of which. Does not own: whether a client gets one (turns and limits), nor
where the room for it comes from (`runway`).

Invariants: the pieces of a grant are LENT, or REVOKED once it was taken back. A piece is not empty. A grant without
pieces has ended, and its slot is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np
from msgspec import Struct

from ...shm.ring.layout import KEY_BYTES
from .holes import Holes
from .slots import Slots
from .table import EDGE, ENDED, LENT, REVOKED, RowTable
from .tenants import Tenants

PIECES_MAX: Final = 64
"""Pieces of one grant. A client that writes its puts in turn has one."""


class LentGrant(Struct, eq=False, gc=False):
    """One grant. `span_id`: what its client pins. `seq`: of its slot, while the grant is the client's. `also`: span ids
    and slots of a former daemon's grants of some of the same bytes: which one has them is not known any more."""

    number: int
    owner: int
    span_id: int
    slot: int
    seq: int
    pieces: list[int]
    also: list[tuple[int, int]] = []


class Grants:
    """All grants of one store."""

    def __init__(
        self, table: RowTable, holes: Holes, slots: Slots, tenants: Tenants, random_bytes: Callable[[int], bytes]
    ) -> None:
        """`random_bytes(n)`: for keys that nobody has."""
        self._random_bytes = random_bytes
        self._tenants = tenants
        self._table = table
        self._holes = holes
        self._slots = slots
        self._last_number = 0
        self.revoked: dict[int, LentGrant] = {}
        """By span id: grants that wait for a scan."""
        self.fresh: dict[int, None] = {}
        """Span ids of those that no scan has begun for."""
        self.lent_bytes = 0
        self.lent = 0
        """Grants that clients have."""

    def lend_all(self, rows: Sequence[int], owner: int) -> list[LentGrant]:
        """Makes grants of rows without slots: of all, or up to the first one whose key finds no free slot."""
        table, at = self._table, np.array(rows, np.int64)
        keys = np.frombuffer(self._random_bytes(KEY_BYTES * len(rows)), np.uint64).reshape(-1, KEY_BYTES // 8)
        # A place without a tree is a grant: its length is that of all its bytes.
        sizes, span_ids = table.column("sizes")[at], table.renew_all(at)
        slots = self._slots.take_all(keys, span_ids, table.column("offsets")[at], sizes)
        at, lent_bytes = at[: len(slots)], int(sizes[: len(slots)].sum())
        np.frombuffer(table.states, np.uint8)[at] = LENT
        table.column("owners")[at] = owner
        self.lent_bytes += lent_bytes
        self.lent += len(at)
        self._tenants.owned_bytes[owner] += lent_bytes
        lent = []
        columns = (at.tolist(), span_ids.tolist(), slots.tolist(), self._slots.seqs(slots).tolist())
        for row, span_id, slot, seq in zip(*columns, strict=False):
            self._last_number = number = self._last_number % 0xFFFF_FFFF + 1
            lent.append(LentGrant(number, owner, span_id, slot, seq, [row]))
        return lent

    def give_back(self, grant: LentGrant) -> list[int]:
        """Ends a grant in which nothing is written any more, and which nobody reads: no scan is needed. Returns what is
        left of it, as rows in state ENDED for the caller to lend or free."""
        rows, table = grant.pieces, self._table
        for row in rows:
            table.states[row] = ENDED
            self.lent_bytes -= table.sizes[row]
            self._tenants.owned_bytes[grant.owner] -= table.sizes[row]
        if rows:
            self.lent -= 1
            self._slots.release(grant.slot)
        return rows

    def carve(self, grant: LentGrant, offset: int, size: int) -> int:
        """Takes [offset, offset + size) out of a grant, as a row in state ENDED with a new span id. Returns the row;
        EDGE if these bytes are not the grant's, or it has too many pieces, or no row is free."""
        table = self._table
        for piece in grant.pieces:
            before, behind = offset - table.offsets[piece], table.end(piece) - offset - size
            if before >= 0 and behind >= 0:
                break
        else:
            return EDGE
        new_rows = (before > 0) + (behind > 0)
        if table.row_mask - table.count < new_rows or (new_rows == 2 and len(grant.pieces) == PIECES_MAX):
            return EDGE
        row = piece
        if before:
            row = end = table.add(ENDED, offset, size, piece)
            table.sizes[piece] = before
            if behind:
                end = table.add(LENT, offset + size, behind, row)
                table.owners[end] = table.owners[piece]
                grant.pieces.append(end)
            self._holes.renamed(piece, end)
        elif behind:
            # The piece begins later: the new row stands before it.
            row = table.add(ENDED, offset, size, table.prevs[piece])
            table.offsets[piece], table.sizes[piece] = offset + size, behind
        else:
            # The usual case: the row changes hands.
            grant.pieces.remove(piece)
            table.renew(piece)
            table.states[piece] = ENDED
        self.lent_bytes -= size
        if not grant.pieces:
            self.lent -= 1
            self._slots.release(grant.slot)
        return row

    def revoke(self, grant: LentGrant) -> None:
        """Takes a grant back. Its bytes are free after a scan that finds no pin of it."""
        for piece in grant.pieces:
            self._table.states[piece] = REVOKED
            self.lent_bytes -= self._table.sizes[piece]
        if grant.pieces:
            self.lent -= 1
            self._slots.revoke(grant.slot)
            self.revoked[grant.span_id] = grant
            self.fresh[grant.span_id] = None

    def begin_scan(self) -> None:
        self.fresh.clear()

    def scanned(self, pinned: AbstractSet[int]) -> int:
        """Frees the revoked grants that no lane pins, and that were revoked before the scan. Returns the bytes that
        became free."""
        freed = 0
        for span_id, grant in list(self.revoked.items()):
            if span_id in pinned or span_id in self.fresh or any(each in pinned for each, _ in grant.also):
                continue
            del self.revoked[span_id]
            for slot in (grant.slot, *(slot for _, slot in grant.also)):
                self._slots.release(slot)
            for piece in grant.pieces:
                freed += self._table.sizes[piece]
                self._tenants.owned_bytes[self._table.owners[piece]] -= self._table.sizes[piece]
                self._holes.free(piece)
        return freed

    def check_invariants(self, lent: list[LentGrant]) -> None:
        """Asserts what the module's docstring promises. `lent`: those that clients have."""
        pieces: dict[int, int] = {}
        for state, grants in ((LENT, lent), (REVOKED, list(self.revoked.values()))):
            for grant in grants:
                for piece in grant.pieces:
                    assert piece not in pieces and self._table.sizes[piece] > 0
                    pieces[piece] = state
        states = self._table.states
        assert pieces == {row: states[row] for row in self._table.in_order() if states[row] in (LENT, REVOKED)}
        assert self.lent_bytes == sum(self._table.sizes[piece] for piece, state in pieces.items() if state == LENT)
        assert self.lent == len(lent)
