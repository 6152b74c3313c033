"""Fetches: missing keys that the daemon seeks in the remote store before a client computes them.

    a claim of a missing key ─ Seek → Sought ─ nothing, too late or an error → the first waiter gets the claim
                                         └─ found → `arrivals` → stored: every waiter hits

Owns: which key is sought and for how long, the fetches under way, and what is counted. Does not own the claims, the way
of an entry into the ring (`arrivals`), nor the writes to the store.

A client waits for the store no longer than it would take to compute the entry: for the time that it has announced
itself, else for the average of its namespace, else for UNKNOWN_S. A store that is slower than that is not asked. Keys
beyond SEEKS_MAX wait for their turn in this time.

An entry that another host computes is waited for, until WAIT_TIMES what computing takes have passed since that host has
claimed the key: it is done by then, or late. So a client waits at most WAIT_TIMES as long as it would compute. The
store is asked again from time to time meanwhile, which shows a claim that was withdrawn, too.

Invariants: a key is sought at most once at a time. Once the breaker is open, keys that wait for their turn are given
up, and no others are sought: `agreement` probes the store. At most SEEKS_MAX keys, besides those of runs, are asked for
or read at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final

from ...errors import TensordError, TierRefused, TierUnavailable
from ...ipc.messages import control as messages
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..claims.claims import ClaimTable, Verdict
from ..claims.deadlines import Deadlines
from ..core.effects import Seek
from ..core.events import RemoteFound, Sought
from ..core.outbox import StoreOutbox
from .agreement import Agreement
from .arrivals import Arrivals, Fetch
from .host_claims import HostClaims
from .link import RemoteLink
from .writes import Writes

SEEKS_MAX: Final = 16
"""Keys that are asked for or read at once."""
QUEUED_MAX: Final = 1024
"""Keys that are sought at once, those that wait for their turn or for another host included."""
UNKNOWN_S: Final = 0.05
"""How long a client waits if nobody knows how long computing takes."""
CLAIM_TIMES: Final = 3.0
"""How long a host's claim lasts, in times of what computing takes. What was computed is in the store by then."""
CLAIM_S_LEAST: Final = 1.0
CLAIM_S_MOST: Final = 900.0
WAIT_TIMES: Final = 1.25
"""How long after another host has claimed a key its entry must be in the store, in times of what computing takes."""
WAIT_S_MOST: Final = 600.0
"""The longest wait for another host."""
LOOKS: Final = 20
"""How often the store is asked for an entry that another host computes, in the time that computing takes."""
LOOK_S_LEAST: Final = 0.002
LOOK_S_MOST: Final = 0.25


class Fetches:
    """The fetches of one store."""

    def __init__(
        self,
        claims: ClaimTable,
        link: RemoteLink,
        agreement: Agreement,
        host_claims: HostClaims,
        writes: Writes,
        arrivals: Arrivals,
        outbox: StoreOutbox,
    ) -> None:
        self._claims = claims
        self._link = link
        self._agreement = agreement
        self._host_claims = host_claims
        self._writes = writes
        self._arrivals = arrivals
        arrivals.ended = self.arrived
        self._outbox = outbox
        self._made = 0
        self._under_way: dict[int, Fetch] = {}
        self._keys: dict[bytes, Fetch] = {}
        self._busy: dict[int, Fetch] = {}
        """Those whose key is asked for or read now."""
        self._turns: OrderedDict[int, None] = OrderedDict()
        """Those that wait for their turn, by number."""
        self._looks: Deadlines[int] = Deadlines()
        """When the store is asked again for an entry that another host computes."""
        self.run_keys = 0
        """The keys of runs that are sought now."""

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, client: int, uid: int, request: messages.RequestClaim, now: float) -> Verdict | None:
        """Seeks a missing key that nobody has claimed. Returns "wait", or None if the client is to compute at once.

        Raises:
            LimitReached: as `ClaimTable.claim`.
        """
        key = request.key
        if not self._link.breaker.closed or not self._link.limits.remote_s:
            return None
        if key in self._keys or not self.may_be_sought(key):
            return None
        cost_s = request.within_s or self._link.costs.of(key[:NAMESPACE_TAG_BYTES]) or UNKNOWN_S
        for_s = self.patience_s(cost_s, now) if len(self._under_way) - self.run_keys < QUEUED_MAX else 0.0
        if for_s <= 0:
            self.declined(1)
            return None
        token, verdict = self._claims.seek(key, client, request.id, now, uid, request.within_s, for_s)
        fetch = self._add(Fetch(self._made + 1, key, uid, token, now, now + for_s, cost_s))
        self._turns[fetch.number] = None
        self._serve(now)
        return verdict

    def declined(self, count: int) -> None:
        """So many keys are computed without asking the store."""
        if self._link.limits.remote_s:
            self._outbox.counters.remote["unasked"] += count

    def next_timer(self) -> float | None:
        """When `tick` is due."""
        return self._looks.next_timer()

    def tick(self, now: float) -> None:
        """Asks again for entries that other hosts compute."""
        while (number := self._looks.pop_due(now)) is not None:
            self._turns[number] = None
        self._serve(now)

    def sought(self, event: Sought, now: float) -> None:
        """Processes the store's answer."""
        fetch = self._busy.pop(event.number)
        counters, found = self._outbox.counters.remote, event.found
        if event.error is not None:
            self._link.failed(event.error, now)
            self.end(fetch, "failed")
            self._lost(fetch, now)
            return
        self._link.succeeded()
        if event.generation is not None:
            self._agreement.found(fetch.key[:NAMESPACE_TAG_BYTES], event.generation, now)
        self._link.speed.answer_s.add(event.answer_s, now)
        if event.claimed:
            self._host_claims.taken(fetch.key)
        if event.others_s is not None and self._waits(fetch, event.others_s, now):
            self._serve(now)
            return
        left_s = fetch.ends_at - now
        if found is None or fetch.void:
            self.end(fetch, "missed")
            self._lost(fetch, now)
            if event.claimed and not self._claims.claimed(fetch.key) and not self._writes.has(fetch.key):
                self._host_claims.given_up(fetch.key)
            return
        if left_s <= 0:
            counters["late"] += 1
        elif self._link.speed.read_s(found.payload_bytes, now) > left_s:
            self.end(fetch, "slow")
            self._lost(fetch, now)
            return
        self.bring(fetch, found)

    def of(self, key: bytes) -> Fetch | None:
        """The fetch of a key that is sought now."""
        return self._keys.get(key)

    def of_run(self, key: bytes, uid: int, ends_at: float, now: float, then: Callable[[], None]) -> Fetch:
        """Begins the fetch of a key that `Runs` seeks."""
        fetch = Fetch(self._made + 1, key, uid, 0, now, ends_at, due_at=ends_at, then=[then])
        self._busy[fetch.number] = fetch
        return self._add(fetch)

    def bring(self, fetch: Fetch, found: RemoteFound) -> None:
        """Has a found entry stored in the ring."""
        self._busy[fetch.number] = fetch
        self._arrivals.begin(fetch, found)

    def evicted(self, keys: Collection[bytes]) -> None:
        """A client has evicted keys by name: what is on its way is not to be stored."""
        for fetch in self._under_way.values():
            fetch.void |= fetch.key in keys

    def arrived(self, fetch: Fetch, outcome: str, error: TensordError | None) -> None:
        """A found entry was stored ("fetched"), or its key was before ("overtaken"), or it was not ("failed")."""
        now = self._outbox.now
        if fetch.found is not None and outcome == "fetched":
            self._link.speed.read(fetch.found.payload_bytes, fetch.read_s, now)
            self._outbox.counters.remote_read_bytes += fetch.found.payload_bytes
        self.end(fetch, outcome)
        # Any other error concerns the entry: its bytes are wrong, or it has no room.
        if isinstance(error, TierUnavailable | TierRefused):
            self._link.failed(error, now)
        if outcome == "failed":
            self._lost(fetch, now)

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        assert self._keys == {fetch.key: fetch for fetch in self._under_way.values()}
        assert self.run_keys == sum(not fetch.token for fetch in self._under_way.values())
        assert len(self._keys) == len(self._under_way) <= QUEUED_MAX + self.run_keys
        assert len(self._busy) <= SEEKS_MAX + self.run_keys
        looks = {number for number in self._under_way if self._looks.when(number) is not None}
        assert self._busy.keys() | self._turns.keys() | looks == self._under_way.keys()
        assert len(self._busy) + len(self._turns) + len(looks) == len(self._under_way)
        assert not self._turns or len(self._busy) - self.run_keys >= SEEKS_MAX

    def may_be_sought(self, key: bytes) -> bool:
        """Whether the store may have an entry of the key that this host may show."""
        return self._agreement.shares(key) is not False and not self._writes.removes(key)

    def patience_s(self, cost_s: float, now: float) -> float:
        """How long a client may wait for the store, which otherwise computes for `cost_s`; 0: not at all."""
        # A store that has not answered in time is slow now, and would only delay this client too.
        if not self._link.limits.remote_s or any(fetch.due_at < now for fetch in self._busy.values()):
            return 0.0
        for_s = min(cost_s, self._link.limits.remote_s)
        return for_s if (self._link.speed.answer_s.known(now) or 0.0) < for_s else 0.0

    def _serve(self, now: float) -> None:
        """Asks for as many keys as may be."""
        while self._turns and len(self._busy) - self.run_keys < SEEKS_MAX:
            number, _ = self._turns.popitem(last=False)
            fetch = self._under_way[number]
            over = fetch.ends_at - now <= (self._link.speed.answer_s.known(now) or 0.0)
            left_alone = not self._link.breaker.closed
            if over or left_alone or fetch.void or not self._claims.holds(fetch.token):
                # Its time is over, the store is left alone, or nobody waits for it any more.
                self._forget(fetch, "failed" if left_alone else "missed" if fetch.waited else "unasked")
                self._lost(fetch, now)
            else:
                self._ask(fetch, now)

    def _ask(self, fetch: Fetch, now: float) -> None:
        fetch.due_at = now + min(fetch.cost_s, self._link.limits.remote_s)
        claims = self._link.limits.remote_writes and self._link.taking.closed
        claims_s = min(max(CLAIM_TIMES * fetch.cost_s, CLAIM_S_LEAST), CLAIM_S_MOST) if claims else 0.0
        self._busy[fetch.number] = fetch
        asks = self._agreement.shares(fetch.key) is None
        self._outbox.add(Seek(fetch.number, fetch.key, asks, claims_s))

    def _waits(self, fetch: Fetch, others_s: float, now: float) -> bool:
        """Whether the entry that another host computes since so many seconds is waited for."""
        if fetch.void or not self._claims.holds(fetch.token):
            return False
        if not fetch.waited:
            done_at, latest = now - others_s + fetch.cost_s, fetch.began_at + WAIT_S_MOST
            ends_at = min(now - others_s + WAIT_TIMES * fetch.cost_s, latest)
            if ends_at <= now or done_at > latest:
                return False
            fetch.waited, fetch.ends_at = True, ends_at
            self._claims.extend(fetch.token, ends_at)
            self._outbox.counters.remote["waited"] += 1
        if now >= fetch.ends_at:
            return False
        look_s = min(max(fetch.cost_s / LOOKS, LOOK_S_LEAST), LOOK_S_MOST)
        self._looks.set(fetch.number, min(now + max(look_s, LOOK_S_LEAST * len(self._under_way)), fetch.ends_at))
        return True

    def _add(self, fetch: Fetch) -> Fetch:
        self._made = fetch.number
        self._under_way[fetch.number] = self._keys[fetch.key] = fetch
        self.run_keys += not fetch.token
        return fetch

    def end(self, fetch: Fetch, outcome: str) -> None:
        """Ends a fetch that is asked for or read."""
        self._busy.pop(fetch.number, None)
        self._forget(fetch, outcome)
        self._serve(self._outbox.now)

    def _forget(self, fetch: Fetch, outcome: str) -> None:
        del self._under_way[fetch.number], self._keys[fetch.key]
        self.run_keys -= not fetch.token
        self._outbox.counters.remote[outcome] += 1
        for then in fetch.then:
            then()

    def _lost(self, fetch: Fetch, now: float) -> None:
        if fetch.token:
            self._outbox.send_verdicts(self._claims.sought(fetch.token, now))
