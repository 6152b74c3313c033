"""Arrivals: entries that were found in the remote store, on their way into the ring.

    found ─ a place, one after the other (`OwnPlaces`) ─ ReadRemote ─ a record of the daemon's own → entry
                                                               └ an error, or void: the place is given back

Owns: the entries that wait for a place or are read. Does not own: which are fetched (`fetches`), nor the commit.

A child is stored after its parent, if that is on its way too: nothing else waits for a parent.

Invariants: at most one place is asked for at once. A place is given back, or its record is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ...errors import Refusal, TensordError
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
class Fetch:
    """One key that is sought. `number` rises from one to the next.

    `token`: the daemon's claim; 0 for a key of a run. `cost_s`: what computing takes. `due_at`: when the store's
    answer is overdue. `found`: what the store has; `grant`: where it is read into, since `read_at`, in `read_s`;
    `read`: what was read, or the error. `waited`: another host has claimed the key. `void`: the key was evicted
    by name meanwhile. `then`: called when the fetch has ended.
    """

    number: int
    key: bytes
    uid: int
    token: int
    began_at: float
    ends_at: float
    cost_s: float = 0.0
    due_at: float = 0.0
    found: RemoteEntry | None = None
    grant: LentGrant | None = None
    read_at: float = 0.0
    read_s: float = 0.0
    read: RemoteEntry | TensordError | None = None
    waited: bool = False
    void: bool = False
    then: list[Callable[[], None]] = field(default_factory=list)


class Arrivals:
    """The arrivals of one store.

    Args:
        own: the daemon's own side of a queue; `places` adds its grants.
        commit: (one record of `own`, now): has it taken, and answers those who wait for the key (`Commits.take`).
        fetched: called with the row of each entry that was stored.
    """

    def __init__(
        self,
        table: RowTable,
        tenants: Tenants,
        own: Submitter,
        places: OwnPlaces,
        commit: Callable[[memoryview, float], object],
        fetched: Callable[[int], object],
        outbox: StoreOutbox,
    ) -> None:
        self._table = table
        self._tenants = tenants
        self._own = own
        self._places = places
        self._commit = commit
        self._fetched = fetched
        self._outbox = outbox
        self.ended: Callable[[Fetch, str, TensordError | None], object] = lambda *_: None
        """Called once for each: "fetched", "overtaken" by a client's put of the key, or "failed", perhaps with the
        error."""
        self._by_key: dict[bytes, Fetch] = {}
        self._waiting: deque[Fetch] = deque()
        self._asks = False
        self._children: dict[bytes, list[Fetch]] = {}
        """Those that were read and wait for the arrival of their parent, by its key."""

    def __len__(self) -> int:
        return len(self._by_key)

    def begin(self, fetch: Fetch, found: RemoteEntry) -> None:
        """Has a found entry read into the ring, once there is a place."""
        fetch.found = found
        self._by_key[fetch.key] = fetch
        self._waiting.append(fetch)
        self._ask()

    def read(self, key: bytes, read: RemoteEntry | TensordError) -> None:
        """An object was read, or could not be."""
        fetch = self._by_key[key]
        assert fetch.found is not None
        fetch.read, fetch.read_s = read, self._outbox.now - fetch.read_at
        parent = self._by_key.get(fetch.found.parent or b"")
        # Numbers rise along a run, so no two wait for each other, whatever a store says of parents.
        if parent is not None and parent.number < fetch.number:
            self._children.setdefault(parent.key, []).append(fetch)
        else:
            self._store(fetch)

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        waiting = {each.key for each in self._waiting}
        lent = {key: each.grant.number for key, each in self._by_key.items() if each.grant is not None}
        assert not waiting & lent.keys() and len(self._by_key) - len(waiting) - len(lent) == self._asks
        assert not self._waiting or self._asks
        assert set(lent.values()) == set(self._own.grants)
        for key, children in self._children.items():
            assert key in self._by_key and all(each.read is not None for each in children)

    def _ask(self) -> None:
        if self._waiting and not self._asks:
            fetch = self._waiting.popleft()
            assert fetch.found is not None
            self._asks = True
            self._places.ask_own(span_bytes(fetch.found.payload_bytes), fetch.uid, partial(self._lent, fetch))

    def _lent(self, fetch: Fetch, place: int | TensordError) -> None:
        self._asks = False
        if isinstance(place, TensordError):
            self._end(fetch, "failed", place)
        else:
            fetch.grant = next(grant for grant in self._own.grants.values() if place in grant.pieces)
            fetch.read_at = self._outbox.now
            assert fetch.found is not None
            self._outbox.add(ReadRemote(fetch.key, self._table.offsets[place], fetch.found.payload_bytes))
        self._ask()

    def _store(self, fetch: Fetch) -> None:
        """Stores what was read."""
        key, read, grant, by_key = fetch.key, fetch.read, fetch.grant, self._table.by_key
        assert read is not None and grant is not None
        outcome, error = "failed", None
        if isinstance(read, TensordError):
            error = read
        elif fetch.void:
            error = Refusal("the key was evicted by name meanwhile")
        elif key in by_key:
            outcome = "overtaken"
        else:
            self._commit_one(fetch, grant, read)
            if key in by_key:
                self._fetched(by_key[key])
                outcome = "fetched"
        if grant.number in self._own.grants:
            self._places.give_back_own(grant)
        self._end(fetch, outcome, error)

    def _commit_one(self, fetch: Fetch, grant: LentGrant, found: RemoteEntry) -> None:
        table, own, row = self._table, self._own, grant.pieces[0]
        own.owner = table.owners[row]
        own.uid = self._tenants.uids[own.owner]
        ttl_s, parent, tokens = found.lives_s or 0.0, found.parent or NO_KEY, min(found.tokens, 0xFFFF_FFFF)
        record = RECORD.pack(
            own.expected, fetch.key, table.offsets[row], found.payload_bytes, found.checksum, 0, parent,
            found.cost_ms, ttl_s, grant.number, found.tree_bytes, tokens, found.prefix_bytes, 0, 0,
        )  # fmt: skip
        self._commit(memoryview(record), self._outbox.now)

    def _end(self, fetch: Fetch, outcome: str, error: TensordError | None) -> None:
        del self._by_key[fetch.key]
        fetch.grant = None
        self.ended(fetch, outcome, error)
        for child in self._children.pop(fetch.key, ()):
            self._store(child)
