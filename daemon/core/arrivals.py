"""Bounds the room that puts take for bytes that have not arrived, for each client and for each uid.

A put takes room for its whole span with its first part, since spans are contiguous. The missing bytes of its payload
are announced bytes. A put that would exceed the bound of its client or uid is held until enough bytes of earlier puts
have arrived. If its uid has no other announced bytes, a put of any size is admitted. Spans that clients take to write
into are no announced bytes: `taken_spans` bounds them.

Owns the sums, and the held puts. Decides nothing about room.

Invariants: a put is held only while its uid has announced bytes. A held put is refused HOLD_S after the last bytes of
its uid arrived: its parts fill its client's inbox, which the puts that it waits for may need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .deadlines import Deadlines
from .turns import Turns

if TYPE_CHECKING:
    from .puts import PutProgress

HOLD_S: Final = 1.0
"""A held put is refused after this number of seconds in which no bytes of its uid arrived."""


class Arrivals:
    """The announced bytes of puts that have at least one part."""

    def __init__(self, client_bytes_max: int, uid_bytes_max: int) -> None:
        self._client_max, self._uid_max = client_bytes_max, uid_bytes_max
        self._of_client: dict[int, int] = {}
        self._of_uid: dict[int, int] = {}
        self._came_at: dict[int, float] = {}
        self._held: Turns[PutProgress] = Turns()
        self._due: Deadlines[PutProgress] = Deadlines()

    @property
    def announced_bytes(self) -> int:
        """Announced bytes of all admitted puts."""
        return sum(self._of_uid.values())

    @property
    def held(self) -> int:
        """The number of held puts."""
        return len(self._held)

    def by_uid(self) -> dict[int, int]:
        """Announced bytes of each uid that has any."""
        return dict(self._of_uid)

    def change_limits(self, client_bytes_max: int, uid_bytes_max: int) -> None:
        """Applies to held puts and to later ones."""
        self._client_max, self._uid_max = client_bytes_max, uid_bytes_max

    def next_timer(self) -> float | None:
        """When a held put is due to be refused."""
        return self._due.next_timer()

    def began(self, put: PutProgress, now: float) -> bool:
        """Records that the put waits for room from now on. False: the put is held."""
        missing_bytes = put.missing_bytes
        if not missing_bytes:
            put.admitted = True
            return True
        if self._admits(put) and not self._held.waiting(put.uid, put.client):
            self._count(put, missing_bytes)
            put.admitted = True
            return True
        self._held.push(put.uid, put.client, put)
        self._due.set(put, now + HOLD_S)
        return False

    def came(self, put: PutProgress, part_bytes: int, now: float) -> None:
        """Records a further part of the put."""
        if put.admitted:
            self._count(put, -part_bytes)
            self._came_at[put.uid] = now

    def ended(self, put: PutProgress) -> None:
        """Forgets the missing bytes of a put that was answered or abandoned."""
        if put.admitted:
            if missing_bytes := put.missing_bytes:
                self._count(put, -missing_bytes)
            put.admitted = False
        elif self._held.remove(put.uid, put.client, put):
            self._due.drop(put)

    def admit(self, uid: int) -> list[PutProgress]:
        """Admits the held puts that fit the bounds now, client by client."""
        admitted: list[PutProgress] = []
        if not self._held:
            return admitted
        while fits := [put for put in self._held.firsts(uid) if self._admits(put)]:
            put = fits[0]
            self._held.remove(put.uid, put.client, put)
            self._due.drop(put)
            self._count(put, put.missing_bytes)
            put.admitted = True
            admitted.append(put)
        return admitted

    def overdue(self, now: float) -> PutProgress | None:
        """A held put whose uid has received no bytes for HOLD_S. It is still held; the caller refuses it."""
        while (put := self._due.pop_due(now)) is not None:
            due_at = self._came_at.get(put.uid, -HOLD_S) + HOLD_S
            if due_at <= now:
                return put
            self._due.set(put, due_at)
        return None

    def check_invariants(self, puts: list[PutProgress]) -> None:
        """Asserts that the sums are those of `puts`, and that held puts have a deadline."""
        self._due.check_invariants()
        self._held.check_invariants()
        sums: dict[str, dict[int, int]] = {"uid": {}, "client": {}}
        for put in puts:
            if put.admitted and put.missing_bytes:
                for what, number in (("uid", put.uid), ("client", put.client)):
                    sums[what][number] = sums[what].get(number, 0) + put.missing_bytes
        assert (sums["uid"], sums["client"]) == (self._of_uid, self._of_client)
        assert len(self._held) == len(self._due)
        for put in self._held:
            assert put.received_bytes and not put.takes and not put.admitted and put in self._due
            assert put.uid in self._of_uid, "a put is held although its uid has no announced bytes"

    def _admits(self, put: PutProgress) -> bool:
        mine, of_uid = put.missing_bytes, self._of_uid.get(put.uid, 0)
        if not mine or not of_uid:
            return True
        of_client = self._of_client.get(put.client, 0)
        return of_uid + mine <= self._uid_max and (not of_client or of_client + mine <= self._client_max)

    def _count(self, put: PutProgress, size_bytes: int) -> None:
        for table, number in ((self._of_uid, put.uid), (self._of_client, put.client)):
            left = table.get(number, 0) + size_bytes
            if left:
                table[number] = left
            else:
                table.pop(number, None)
        if put.uid not in self._of_uid:
            self._came_at.pop(put.uid, None)
