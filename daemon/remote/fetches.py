"""Fetches: missing keys that the daemon seeks in the remote store before a client computes them.

    a claim ─┐         ┌ nothing, too late or an error → the first waiter gets the claim
    FetchRun ┴─ Seek → Sought ─ found → a place (`Lending`) → ReadRemote → a record of the daemon's own → entry
                                                                    └ an error, or void: the place is given back

Owns: which key is sought and for how long, the fetches under way and the places they are read into, the answers of
runs, and what is counted. Does not own the claims, the commit, nor the writes to the store.

A client waits for the store no longer than it would take to compute the entry: for the time that it has announced
itself, else for the average of its namespace, else for UNKNOWN_S. A store that is slower than that is not asked. An
entry that another host computes is waited for, until WAIT_TIMES what computing takes have passed since that host has
claimed the key: it is done by then, or late. The store is asked again from time to time meanwhile, which shows a claim
that was withdrawn, too.

A run is keys in order that are fetched together for one client, such as the blocks of one sequence. It ends at the
first key that the store does not have: the entries after it may have no parent in the ring. A child is stored after
its parent, if that is on its way too.

Invariants: a key is sought at most once at a time. At most SOUGHT_MAX keys, and RUN_KEYS_MAX of runs, are sought at
once. Every FetchRun is answered once, if its client stays. A place is given back, or its record is taken. Once the
breaker is open, no key is asked for: Agreement probes the store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile, zip_longest
from math import inf
from typing import TYPE_CHECKING, Final

from ...errors import TensordError, TierRefused, TierUnavailable
from ...ipc.messages import control as messages
from ...shm.index.keys import generation_of
from ...shm.lanes.records import NO_KEY, RECORD
from ...shm.ring.layout import NAMESPACE_TAG_BYTES, span_bytes
from ..claims.claims import ClaimTable, Verdict
from ..claims.deadlines import Deadlines
from ..forms.effects import ReadRemote, Seek
from ..forms.events import RemoteEntry, Sought
from ..store.entries import Entries, OverEntries
from ..store.grants import LentGrant
from .link import Agreement, RemoteLink
from .writes import Writes

if TYPE_CHECKING:
    from ..room.lending import Lending

SOUGHT_MAX: Final = 1024
"""Keys that are sought at once, those that wait for another host included."""
RUN_KEYS_MAX: Final = 40
"""Keys of all runs that are sought or read at once."""
UNKNOWN_S: Final = 0.05
"""How long a client waits if nobody knows how long computing takes."""
CLAIM_TIMES: Final = 3.0
"""How long a host's claim lasts, in times of what computing takes. What was computed is in the store by then."""
CLAIM_S_LEAST: Final = 1.0
CLAIM_S_MOST: Final = 900.0
WAIT_TIMES: Final = 1.25
"""How long after another host has claimed a key its entry must be in the store, in times of what computing takes."""
WAIT_S_MOST: Final = 600.0
LOOKS: Final = 20
"""How often the store is asked for an entry that another host computes, in the time that computing takes."""
LOOK_S_LEAST: Final = 0.002
LOOK_S_MOST: Final = 0.25


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
    answer is overdue. `found`: what the store has; `grant`: where it is read into, since `read_at`; then `found` is
    what was read, or `error` why it could not be. `waited`: another host has claimed the key. `void`: the key was
    evicted by name meanwhile. `runs`, `children`: what waits for its end.
    """

    number: int
    key: bytes
    uid: int
    token: int
    ends_at: float
    due_at: float
    cost_s: float = 0.0
    found: RemoteEntry | None = None
    grant: LentGrant | None = None
    read_at: float = 0.0
    error: TensordError | None = None
    waited: bool = False
    void: bool = False
    runs: list[AskedRun] = field(default_factory=list)
    children: list[Fetch] = field(default_factory=list)


class Fetches(OverEntries):
    """The fetches of one store. `places`: lends the daemon places to read entries into."""

    def __init__(
        self,
        entries: Entries,
        link: RemoteLink,
        agreement: Agreement,
        writes: Writes,
        claims: ClaimTable,
        places: Lending,
    ) -> None:
        super().__init__(entries)
        self._stored = entries.table.by_key
        self._link = link
        self._agreement = agreement
        self._writes = writes
        self._claims = claims
        self._places = places
        self.commit: Callable[[memoryview, float], object]
        """(one record of the daemon's own, now): has it taken, and answers those who wait for its key. Set by the
        store."""
        self._own = places.own
        self._outbox = link.outbox
        self._counts = link.counts
        self._made = 0
        self.under_way: dict[bytes, Fetch] = {}
        self.looks: Deadlines[bytes] = Deadlines()
        """When the store is asked again for an entry that another host computes. `tick` does it."""

    def begin(self, client: int, uid: int, request: messages.RequestClaim, now: float) -> Verdict | None:
        """Seeks a missing key that nobody has claimed. Returns "wait", or None if the client is to compute at once.
        Raises LimitReached, as `ClaimTable.claim` does."""
        key = request.key
        if key in self.under_way or not self._may_be_sought(key):
            return None
        cost_s = request.within_s or self._link.cost_s(key) or UNKNOWN_S
        room = len(self.under_way) - self._run_keys < SOUGHT_MAX
        for_s = self._patience_s(cost_s, now) if room else 0.0
        if not for_s:
            self._counts["unasked"] += 1
            return None
        token, verdict = self._claims.seek(key, client, request.id, now, uid, request.within_s, for_s)
        self._ask(self._add(key, uid, token, now + for_s, cost_s), now)
        return verdict

    def run(self, client: int, uid: int, request: messages.FetchRun, now: float) -> None:
        """Seeks the missing keys of a client, or answers at once."""
        first = request.keys[0] if request.keys else b""
        alike = takewhile(lambda key: _group(key) == _group(first), dict.fromkeys(request.keys))
        missing = (key for key in alike if key not in self._stored)
        wanted = list(islice(missing, max(0, RUN_KEYS_MAX - self._run_keys)))
        own = [key for key in wanted if key not in self.under_way]
        for_s = 0.0
        if own and all(map(self._may_be_sought, own)):
            for_s = self._patience_s(request.within_s or (self._link.cost_s(first) or UNKNOWN_S) * len(own), now)
            if not for_s:
                self._counts["unasked"] += len(own)
        run = AskedRun(client, request, len(wanted))
        if not wanted or (own and not for_s):
            # What is sought already is found without this client.
            self._answer(run)
            return
        for key in own:
            self._add(key, uid, 0, now + for_s)
        for key in wanted:
            self.under_way[key].runs.append(run)
        if own:
            self._outbox.add(Seek(tuple(own)))

    def evicted(self, keys: Collection[bytes]) -> None:
        """A client has evicted keys by name: what is on its way is not to be stored."""
        for fetch in self.under_way.values():
            fetch.void |= fetch.key in keys

    def tick(self, now: float) -> None:
        """Asks again for entries that other hosts compute."""
        while (key := self.looks.pop_due(now)) is not None:
            fetch = self.under_way[key]
            if self._link.serves and now < fetch.ends_at and not fetch.void and self._claims.holds(fetch.token):
                self._ask(fetch, now)
            else:
                # Its time is over, the store is left alone, or nobody waits for it any more.
                self._end(fetch, "missed" if self._link.serves else "failed", now)

    def sought(self, seek: Seek, sought: Sought | None, now: float) -> None:
        """Processes the store's answer; None: it has failed."""
        fetches, link, first = [self.under_way[key] for key in seek.keys], self._link, seek.keys[0]
        if sought is None:
            for fetch in fetches:
                self._end(fetch, "failed", now)
            return
        self._agreement.told(first[:NAMESPACE_TAG_BYTES], sought.generation)
        link.answer_s.add(sought.answer_s, now)
        if sought.claimed:
            link.claimed(first)
        if sought.others_s is not None and self._waits(fetches[0], sought.others_s, now):
            return
        outcome, size_bytes = "", 0
        for fetch, found in zip_longest(fetches, sought.found):
            if found is None or fetch.void:
                outcome = "missed"
            else:
                size_bytes += found.payload_bytes
                left_s = fetch.ends_at - now
                if left_s <= 0:
                    self._counts["late"] += 1
                elif link.read_s(size_bytes, now) > left_s:
                    outcome = outcome or "slow"
            if outcome:
                self._end(fetch, outcome, now)
            else:
                fetch.found = found
                self._places.ask_own(span_bytes(found.payload_bytes), fetch.uid, partial(self._lent, fetch))
        if sought.claimed and first not in self._claims.by_key and not self._writes.has(first):
            link.end_claim(first)

    def read(self, key: bytes, found: RemoteEntry | None, error: TensordError | None) -> None:
        """An object was read into its place, or could not be."""
        fetch = self.under_way[key]
        fetch.found, fetch.error = found or fetch.found, error
        if found is not None:
            self._link.read(found.payload_bytes, self._outbox.now - fetch.read_at, self._outbox.now)
        parent = self.under_way.get((fetch.found and fetch.found.parent) or b"")
        # Numbers rise along a run, so no two wait for each other, whatever a store says of parents.
        if parent is not None and parent.found is not None and parent.number < fetch.number:
            parent.children.append(fetch)
        else:
            self._store(fetch)

    def check_invariants(self) -> None:
        assert self._run_keys <= RUN_KEYS_MAX
        assert len(self.under_way) <= SOUGHT_MAX + self._run_keys
        assert all(fetch.waited for fetch in self.under_way.values() if self.looks.when(fetch.key) is not None)
        grants = {fetch.grant.number for fetch in self.under_way.values() if fetch.grant is not None}
        assert grants == set(self._own.grants)

    @property
    def _run_keys(self) -> int:
        """The keys of runs that are sought now."""
        return sum(not fetch.token for fetch in self.under_way.values())

    def _may_be_sought(self, key: bytes) -> bool:
        """Whether the store may have an entry of the key that this host may show."""
        return self._link.serves and self._agreement.shares(key) and not self._writes.removes(key)

    def _patience_s(self, cost_s: float, now: float) -> float:
        """How long a client may wait for the store, which otherwise computes for `cost_s`; 0: not at all."""
        for_s = min(cost_s, self._link.limits.remote_s)
        # A store that has not answered in time is slow now, and would only delay this client too.
        overdue = any(fetch.due_at < now for fetch in self.under_way.values())
        return 0.0 if overdue or self._link.answer_s.known(now) >= for_s else for_s

    def _add(self, key: bytes, uid: int, token: int, ends_at: float, cost_s: float = 0.0) -> Fetch:
        self._made += 1
        self.under_way[key] = fetch = Fetch(self._made, key, uid, token, ends_at, ends_at, cost_s)
        return fetch

    def _ask(self, fetch: Fetch, now: float) -> None:
        fetch.due_at = now + min(fetch.cost_s, self._link.limits.remote_s)
        claims_s = min(max(CLAIM_TIMES * fetch.cost_s, CLAIM_S_LEAST), CLAIM_S_MOST)
        self._outbox.add(Seek((fetch.key,), claims_s if self._link.takes_writes else 0.0))

    def _waits(self, fetch: Fetch, others_s: float, now: float) -> bool:
        """Whether the entry that another host computes since so many seconds is waited for."""
        if fetch.void or not self._claims.holds(fetch.token):
            return False
        if not fetch.waited:
            done_at, latest = now - others_s + fetch.cost_s, now + WAIT_S_MOST
            ends_at = min(now - others_s + WAIT_TIMES * fetch.cost_s, latest)
            if ends_at <= now or done_at > latest:
                return False
            fetch.waited, fetch.ends_at = True, ends_at
            self._claims.extend(fetch.token, ends_at)
            self._counts["waited"] += 1
        if now >= fetch.ends_at:
            return False
        look_s = min(max(fetch.cost_s / LOOKS, LOOK_S_LEAST), LOOK_S_MOST)
        self.looks.set(fetch.key, min(now + max(look_s, LOOK_S_LEAST * len(self.under_way)), fetch.ends_at))
        fetch.due_at = inf
        return True

    def _lent(self, fetch: Fetch, place: int | TensordError) -> None:
        if isinstance(place, TensordError):
            self._end(fetch, "failed", self._outbox.now)
            return
        assert fetch.found is not None
        fetch.grant = next(grant for grant in self._own.grants.values() if place in grant.pieces)
        fetch.read_at = self._outbox.now
        self._outbox.add(ReadRemote(fetch.key, self._table.offsets[place], fetch.found.payload_bytes))

    def _store(self, fetch: Fetch) -> None:
        key, grant, found, now = fetch.key, fetch.grant, fetch.found, self._outbox.now
        assert grant is not None and found is not None
        outcome = "failed"
        if fetch.error is None and not fetch.void:
            if key in self._stored:
                outcome = "overtaken"
            else:
                self._commit_one(key, grant, found)
                if key in self._stored:
                    outcome = "fetched"
                    self._writes.fetched(self._stored[key])
                    self._outbox.counters.remote_read_bytes += found.payload_bytes
        self._places.returned(self._own.client, [grant.number])
        # Any other error concerns the entry: its bytes are wrong.
        if isinstance(fetch.error, TierUnavailable | TierRefused):
            self._link.failed(fetch.error, now)
        self._end(fetch, outcome, now)
        for child in fetch.children:
            self._store(child)

    def _commit_one(self, key: bytes, grant: LentGrant, found: RemoteEntry) -> None:
        table, own, row = self._table, self._own, grant.pieces[0]
        own.owner = table.owners[row]
        ttl_s, parent, tokens = found.lives_s or 0.0, found.parent or NO_KEY, min(found.tokens, 0xFFFF_FFFF)
        record = RECORD.pack(
            own.expected, key, table.offsets[row], found.payload_bytes, found.checksum, 0, parent, found.cost_ms,
            ttl_s, grant.number, found.tree_bytes, tokens, found.prefix_bytes, 0, 0,
        )  # fmt: skip
        self.commit(memoryview(record), self._outbox.now)

    def _end(self, fetch: Fetch, outcome: str, now: float) -> None:
        del self.under_way[fetch.key]
        self._counts[outcome] += 1
        for run in fetch.runs:
            run.waits_for -= 1
            if not run.waits_for:
                self._answer(run)
        if fetch.token and outcome not in ("fetched", "overtaken"):
            self._outbox.send_verdicts(self._claims.sought(fetch.token, now))

    def _answer(self, run: AskedRun) -> None:
        count = sum(1 for _ in takewhile(lambda key: key in self._stored, run.request.keys))
        self._outbox.send(run.client, messages.Counted(run.request.id, count))


def _group(key: bytes) -> tuple[bytes, int]:
    """A key's namespace and generation. Keys of one group are sought together."""
    return key[:NAMESPACE_TAG_BYTES], generation_of(key)
