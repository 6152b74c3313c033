"""Fetches: missing keys that the daemon seeks in the remote store before a client computes them.

    a claim of a missing key ─ Seek → Sought ─ nothing, too late or an error → the first waiter gets the claim
                                         └─ found → a put of the daemon's own (`intake`) ─ Copy → Copied → published:
                                            every waiter hits

Owns: which key is sought and for how long, the fetches under way, and what is counted. Does not own the claims, the put
of what was found, nor the writes to the store.

A client waits no longer than it would take to compute the entry: for the time that it has announced itself, else for
the average of its namespace, else for UNKNOWN_S. A store that is slower than that is not asked. Within this time, an
entry that another host computes is waited for.

Invariants: a key is sought at most once at a time. No client waits while the breaker is open: it is probed on the side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from ....errors import Refusal, TensordError, TierRefused, TierUnavailable
from ....ipc import messages
from ....shm.layout import NAMESPACE_TAG_BYTES
from ..claims import ClaimTable, Verdict
from ..effects import Seek
from ..events import RemoteFound, Sought
from ..limits import StoreLimits
from ..outbox import StoreOutbox
from .agreement import Agreement
from .link import RemoteLink
from .writes import Writes

SEEKS_MAX: Final = 16
"""Keys that are sought at once."""
UNKNOWN_S: Final = 0.05
"""How long a client waits if nobody knows how long computing takes."""
CLAIM_TIMES: Final = 3.0
"""How long a host's claim lasts, in times of what computing takes. Nobody ends a claim earlier: what was computed is in
the store by then, or is not computed."""
CLAIM_S_LEAST: Final = 1.0
CLAIM_S_MOST: Final = 60.0
WAIT_SHARE: Final = 0.9
"""The share of a client's wait that may be a wait for another host. The rest is for reading what that host has
written."""


@dataclass(slots=True)
class Fetch:
    """One key that is sought. `token`: the daemon's claim; None for a key of a run, and for a probe, which no client
    waits for. `putting_at`: since when the put of the entry, which was found, is under way. `void`: the key was evicted
    by name meanwhile. `then`: called when the fetch has ended."""

    number: int
    key: bytes
    uid: int
    token: int | None
    began_at: float
    ends_at: float
    payload_bytes: int = 0
    putting_at: float | None = None
    void: bool = False
    of_run: bool = False
    then: list[Callable[[], None]] = field(default_factory=list)


class Fetches:
    """The fetches of one store."""

    def __init__(
        self,
        claims: ClaimTable,
        link: RemoteLink,
        agreement: Agreement,
        writes: Writes,
        outbox: StoreOutbox,
        limits: StoreLimits,
    ) -> None:
        self._claims = claims
        self._link = link
        self._agreement = agreement
        self._writes = writes
        self._outbox = outbox
        self._limits = limits
        self._made = 0
        self._under_way: dict[int, Fetch] = {}
        self._keys: dict[bytes, Fetch] = {}
        self.run_keys = 0
        """The keys of runs that are sought now."""

    def __len__(self) -> int:
        return len(self._under_way)

    def change_limits(self, limits: StoreLimits) -> None:
        """Applies to later fetches."""
        self._limits = limits

    def begin(self, client: int, uid: int, request: messages.RequestClaim, now: float) -> Verdict | None:
        """Seeks a missing key that nobody has claimed. Returns "wait", or None if the client is to compute at once.

        Raises:
            LimitReached: as `ClaimTable.claim`.
        """
        for_s = self._worth(request.key, request.within_s, now)
        if for_s <= 0:
            return None
        if not self._link.breaker.closed:
            if self._link.breaker.may_probe(now):
                self._link.breaker.probe()
                self._seek(request.key, uid, None, self._limits.remote_s, now)
            return None
        token, verdict = self._claims.seek(request.key, client, request.id, now, uid, request.within_s, for_s)
        self._seek(request.key, uid, token, for_s, now)
        return verdict

    def sought(self, event: Sought, now: float) -> tuple[int, messages.Commit] | None:
        """Processes the store's answer. Returns the uid and the Commit of the put that carries the entry into the ring;
        None if there is nothing to put."""
        fetch = self._under_way[event.number]
        counters, found = self._outbox.counters.remote, event.found
        if event.error is not None:
            self.end(fetch, "failed")
            self._link.failed(event.error, now, probe=fetch.token is None)
            self._lost(fetch, now)
            return None
        self._link.succeeded()
        if event.generation is not None:
            self._agreement.found(fetch.key[:NAMESPACE_TAG_BYTES], event.generation, now)
        self._link.speed.answer_s.add(event.answer_s, now)
        if event.waited:
            counters["waited"] += 1
        left_s = fetch.ends_at - now
        if found is None or fetch.token is None or fetch.void:
            self.end(fetch, "probes" if fetch.token is None else "missed")
            self._lost(fetch, now)
            return None
        if left_s <= 0:
            counters["late"] += 1
        elif self._link.speed.read_s(found.payload_bytes, now) > left_s:
            self.end(fetch, "slow")
            self._lost(fetch, now)
            return None
        return fetch.uid, self.put(fetch, found, now)

    def of(self, key: bytes) -> Fetch | None:
        """The fetch of a key that is sought now."""
        return self._keys.get(key)

    def of_run(self, key: bytes, uid: int, ends_at: float, now: float, then: Callable[[], None]) -> Fetch:
        """Begins the fetch of a key that `Runs` seeks."""
        return self._add(Fetch(self._made + 1, key, uid, None, now, ends_at, of_run=True, then=[then]))

    def put(self, fetch: Fetch, found: RemoteFound, now: float) -> messages.Commit:
        """The Commit of the put that carries a found entry into the ring."""
        fetch.payload_bytes, fetch.putting_at = found.payload_bytes, now
        return messages.Commit(
            fetch.number,
            fetch.key,
            found.payload_bytes,
            found.tree_bytes,
            tokens=found.tokens,
            ttl_s=found.lives_s,
            claim=fetch.token,
            cost_ms=found.cost_ms,
            prefix_bytes=found.prefix_bytes,
            parent=found.parent,
            at=0,
        )

    def evicted(self, keys: Collection[bytes]) -> None:
        """A client has evicted keys by name: what is on its way is not to be stored."""
        for fetch in self._under_way.values():
            fetch.void |= fetch.key in keys

    def refusal(self, number: int) -> TensordError | None:
        """Why a found entry must not be published; None if it may be."""
        return Refusal("the key was evicted by name meanwhile") if self._under_way[number].void else None

    def overtaken(self, number: int) -> None:
        """The key was stored by a client before what was found could be published."""
        self.end(self._under_way[number], "overtaken")

    def ended(self, number: int, now: float, error: TensordError | None) -> None:
        """The put of a found entry has ended. Its claim was ended by `intake`."""
        fetch = self._under_way[number]
        assert fetch.putting_at is not None
        if error is None:
            self._link.speed.read(fetch.payload_bytes, now - fetch.putting_at, now)
            self._outbox.counters.remote_read_bytes += fetch.payload_bytes
            self.end(fetch, "fetched")
            return
        self.end(fetch, "failed")
        # Any other error concerns the entry: its bytes are wrong, or it has no room.
        if isinstance(error, TierUnavailable | TierRefused):
            self._link.failed(error, now, probe=False)

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        assert self._keys == {fetch.key: fetch for fetch in self._under_way.values()}
        assert self.run_keys == sum(fetch.of_run for fetch in self._under_way.values())
        assert len(self._keys) == len(self._under_way) <= SEEKS_MAX + self.run_keys

    def _worth(self, key: bytes, within_s: float, now: float) -> float:
        """How long a client may wait for the store; 0 if it is better not to ask."""
        if len(self._under_way) - self.run_keys >= SEEKS_MAX or key in self._keys or not self.may_be_sought(key):
            return 0.0
        return self.patience_s(within_s or self._link.costs.of(key[:NAMESPACE_TAG_BYTES]) or UNKNOWN_S, now)

    def may_be_sought(self, key: bytes) -> bool:
        """Whether the store may have an entry of the key that this host may show."""
        return self._agreement.shares(key) is not False and not self._writes.removes(key)

    def patience_s(self, cost_s: float, now: float) -> float:
        """How long a client may wait for the store, which otherwise computes for `cost_s`; 0: not at all."""
        # A store that has not answered in time is slow now, and would only delay this client too.
        if not self._limits.remote_s or any(fetch.ends_at < now for fetch in self._under_way.values()):
            return 0.0
        for_s = min(cost_s, self._limits.remote_s)
        return for_s if (self._link.speed.answer_s.known(now) or 0.0) < for_s else 0.0

    def _seek(self, key: bytes, uid: int, token: int | None, for_s: float, now: float) -> None:
        self._add(Fetch(self._made + 1, key, uid, token, now, now + for_s))
        claims_s = min(max(CLAIM_TIMES * for_s, CLAIM_S_LEAST), CLAIM_S_MOST) if self._limits.remote_writes else 0.0
        asks = self._agreement.shares(key) is None
        self._outbox.add(Seek(self._made, key, asks, claims_s if token is not None else 0.0, WAIT_SHARE * for_s))

    def _add(self, fetch: Fetch) -> Fetch:
        self._made = fetch.number
        self._under_way[fetch.number] = self._keys[fetch.key] = fetch
        self.run_keys += fetch.of_run
        return fetch

    def end(self, fetch: Fetch, outcome: str) -> None:
        """Ends a fetch."""
        del self._under_way[fetch.number], self._keys[fetch.key]
        self.run_keys -= fetch.of_run
        self._outbox.counters.remote[outcome] += 1
        for then in fetch.then:
            then()

    def _lost(self, fetch: Fetch, now: float) -> None:
        if fetch.token is not None:
            self._outbox.send_verdicts(self._claims.sought(fetch.token, now))
