"""Arrivals: entries that were found in the remote store, on their way into the ring.

    found ─ a place (`OwnPlaces`) ─ ReadRemote ─ a record of the daemon's own → entry
                                          └ an error, or void: the place is given back

Owns: the places that entries are read into. Does not own: which are fetched (`fetches`), nor the commit.

A child is stored after its parent, if that is on its way too: nothing else waits for a parent.

Invariant: a place is given back, or its record is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ...errors import Refusal, TensordError
from ...ipc.messages import control as messages
from ...shm.lanes.records import NO_KEY, RECORD
from ...shm.ring.layout import span_bytes
from ..core.effects import ReadRemote
from ..core.events import RemoteEntry
from ..core.outbox import StoreOutbox
from ..store.commit import Submitter
from ..store.grants import LentGrant
from ..store.table import RowTable
from ..store.tenants import Tenants


class OwnPlaces(Protocol):
    """Places of the ring that the daemon itself writes in."""

    def ask_own(self, size: int, uid: int, then: Callable[[int | TensordError], None]) -> None:
        """Asks for a place of `size` bytes of the ring, for an entry of this uid. `then` is called once, at once or
        later: with a row in state LENT, the piece of a grant of the daemon's, or with the refusal."""

    def give_back_own(self, grant: LentGrant) -> None:
        """Nothing is written in the rest of a grant of the daemon's any more. Nobody has pinned it."""


@dataclass(slots=True, eq=False)
class AskedRun:
    """One FetchRun of a client. `waits_for`: the number of its keys that are being fetched."""

    client: int
    request: messages.FetchRun
    waits_for: int


@dataclass(slots=True, eq=False)
class Fetch:
    """One key that is sought. `number` rises from one to the next.

    `token`: the daemon's claim; 0 for a key of a run. `cost_s`: what computing takes. `due_at`: when the store's
    answer is overdue. `found`: what the store has; `grant`: where it is read into, since `read_at`, in `read_s`; then
    `found` is what was read, or `error` why it could not be. `waited`: another host has claimed the key. `void`: the
    key was evicted by name meanwhile. `runs`, `children`: what waits for its end.
    """

    number: int
    key: bytes
    uid: int
    token: int
    began_at: float
    ends_at: float
    due_at: float
    cost_s: float = 0.0
    found: RemoteEntry | None = None
    grant: LentGrant | None = None
    read_at: float = 0.0
    read_s: float = 0.0
    error: TensordError | None = None
    waited: bool = False
    void: bool = False
    runs: list[AskedRun] = field(default_factory=list)
    children: list[Fetch] = field(default_factory=list)


class Arrivals:
    """The arrivals of one store.

    Args:
        fetches: those under way, by key.
        own: the daemon's own side of a queue; `places` adds its grants.
        commit: (one record of `own`, now): has it taken, and answers those who wait for the key (`Commits.take`).
        ended: called once for each: "fetched", "overtaken" by a client's put of the key, or "failed", perhaps with
            `error`.
    """

    def __init__(
        self,
        fetches: Mapping[bytes, Fetch],
        table: RowTable,
        tenants: Tenants,
        own: Submitter,
        places: OwnPlaces,
        commit: Callable[[memoryview, float], object],
        ended: Callable[[Fetch, str], object],
        outbox: StoreOutbox,
    ) -> None:
        self._fetches = fetches
        self._table = table
        self._tenants = tenants
        self._own = own
        self._places = places
        self._commit = commit
        self._ended = ended
        self._outbox = outbox

    def begin(self, fetch: Fetch, found: RemoteEntry) -> None:
        """Has a found entry read into the ring, once there is a place."""
        fetch.found = found
        self._places.ask_own(span_bytes(found.payload_bytes), fetch.uid, partial(self._lent, fetch))

    def read(self, key: bytes, found: RemoteEntry | None, error: TensordError | None) -> None:
        """An object was read, or could not be."""
        fetch = self._fetches[key]
        fetch.found, fetch.error, fetch.read_s = found or fetch.found, error, self._outbox.now - fetch.read_at
        parent = self._fetches.get((fetch.found and fetch.found.parent) or b"")
        # Numbers rise along a run, so no two wait for each other, whatever a store says of parents.
        if parent is not None and parent.found is not None and parent.number < fetch.number:
            parent.children.append(fetch)
        else:
            self._store(fetch)

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        assert {each.grant.number for each in self._fetches.values() if each.grant is not None} == set(self._own.grants)

    def _lent(self, fetch: Fetch, place: int | TensordError) -> None:
        if isinstance(place, TensordError):
            fetch.error = place
            self._end(fetch, "failed")
        else:
            assert fetch.found is not None
            fetch.grant = next(grant for grant in self._own.grants.values() if place in grant.pieces)
            fetch.read_at = self._outbox.now
            self._outbox.add(ReadRemote(fetch.key, self._table.offsets[place], fetch.found.payload_bytes))

    def _store(self, fetch: Fetch) -> None:
        """Stores what was read."""
        key, grant, found, by_key = fetch.key, fetch.grant, fetch.found, self._table.by_key
        assert grant is not None and found is not None
        outcome = "failed"
        if fetch.void:
            fetch.error = fetch.error or Refusal("the key was evicted by name meanwhile")
        elif fetch.error is None and key in by_key:
            outcome = "overtaken"
        elif fetch.error is None:
            self._commit_one(key, grant, found)
            outcome = "fetched" if key in by_key else "failed"
        if grant.number in self._own.grants:
            self._places.give_back_own(grant)
        fetch.grant = None
        self._end(fetch, outcome)

    def _commit_one(self, key: bytes, grant: LentGrant, found: RemoteEntry) -> None:
        table, own, row = self._table, self._own, grant.pieces[0]
        own.owner = table.owners[row]
        own.uid = self._tenants.uids[own.owner]
        ttl_s, parent, tokens = found.lives_s or 0.0, found.parent or NO_KEY, min(found.tokens, 0xFFFF_FFFF)
        record = RECORD.pack(
            own.expected, key, table.offsets[row], found.payload_bytes, found.checksum, 0, parent, found.cost_ms,
            ttl_s, grant.number, found.tree_bytes, tokens, found.prefix_bytes, 0, 0,
        )  # fmt: skip
        self._commit(memoryview(record), self._outbox.now)

    def _end(self, fetch: Fetch, outcome: str) -> None:
        self._ended(fetch, outcome)
        for child in fetch.children:
            self._store(child)
