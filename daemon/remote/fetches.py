"""Fetches: missing keys that the daemon seeks in the remote store before a client computes them.

    a claim of a missing key, or a run ─ Seek → Sought ─ nothing, too late or an error → the first waiter gets the claim
                                                   └─ found → `arrivals` → stored: every waiter hits

Owns: which key is sought and for how long, the fetches under way, and what is counted. Does not own the claims, the way
of an entry into the ring (`arrivals`), nor the writes to the store.

A client waits for the store no longer than it would take to compute the entry: for the time that it has announced
itself, else for the average of its namespace, else for UNKNOWN_S. A store that is slower than that is not asked.

An entry that another host computes is waited for, until WAIT_TIMES what computing takes have passed since that host has
claimed the key: it is done by then, or late. So a client waits at most WAIT_TIMES as long as it would compute. The
store is asked again from time to time meanwhile, which shows a claim that was withdrawn, too.

Invariants: a key is sought at most once at a time. At most SOUGHT_MAX keys, besides those of runs, are sought at once.
Once the breaker is open, no key is asked for: `agreement` probes the store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import Final

from ...errors import TensordError, TierRefused, TierUnavailable
from ...ipc.messages import control as messages
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..claims.claims import ClaimTable, Verdict
from ..claims.deadlines import Deadlines
from ..core.effects import Seek
from ..core.events import Sought
from ..core.outbox import StoreOutbox
from .agreement import Agreement
from .arrivals import Arrivals, Fetch
from .host_claims import HostClaims
from .link import RemoteLink
from .writes import Writes

SOUGHT_MAX: Final = 1024
"""Keys that are sought at once, those that wait for another host included."""
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
        self._under_way: dict[bytes, Fetch] = {}
        self._busy: dict[bytes, Fetch] = {}
        """Those whose key is asked for or read now."""
        self._looks: Deadlines[bytes] = Deadlines()
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
        if key in self._under_way or not self.may_be_sought(key):
            return None
        cost_s = request.within_s or self._link.costs.of(key[:NAMESPACE_TAG_BYTES]) or UNKNOWN_S
        for_s = self.patience_s(cost_s, now) if len(self._under_way) - self.run_keys < SOUGHT_MAX else 0.0
        if for_s <= 0:
            self.declined(1)
            return None
        token, verdict = self._claims.seek(key, client, request.id, now, uid, request.within_s, for_s)
        self._ask(self._add(key, uid, token, now, now + for_s, cost_s), now)
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
        while (key := self._looks.pop_due(now)) is not None:
            fetch = self._under_way[key]
            left_alone = not self._link.breaker.closed
            if left_alone or now >= fetch.ends_at or fetch.void or not self._claims.holds(fetch.token):
                # Its time is over, the store is left alone, or nobody waits for it any more.
                self._forget(fetch, "failed" if left_alone else "missed", now)
            else:
                self._ask(fetch, now)

    def sought(self, seek: Seek, sought: Sought | None, error: TensordError | None, now: float) -> None:
        """Processes the store's answer."""
        fetches, speed = [self._busy[key] for key in seek.keys], self._link.speed
        if error is not None or sought is None:
            if error is not None:
                self._link.failed(error, now)
            for fetch in fetches:
                self._end(fetch, "failed", now)
            return
        self._link.succeeded()
        self._agreement.told(seek.keys[0][:NAMESPACE_TAG_BYTES], sought.generation)
        speed.answer_s.add(sought.answer_s, now)
        if sought.claimed:
            self._host_claims.taken(seek.keys[0])
        if sought.others_s is not None and self._waits(fetches[0], sought.others_s, now):
            del self._busy[fetches[0].key]
            return
        outcome, size_bytes = "", 0
        for fetch, found in zip_longest(fetches, sought.found):
            if found is None or fetch.void:
                outcome = "missed"
            else:
                size_bytes += found.payload_bytes
                left_s = fetch.ends_at - now
                if left_s <= 0:
                    self._outbox.counters.remote["late"] += 1
                elif speed.read_s(size_bytes, now) > left_s:
                    outcome = outcome or "slow"
            if outcome:
                self._end(fetch, outcome, now)
            else:
                self._arrivals.begin(fetch, found)
        if sought.claimed and not self._claims.claimed(seek.keys[0]) and not self._writes.has(seek.keys[0]):
            self._host_claims.given_up(seek.keys[0])

    def of(self, key: bytes) -> Fetch | None:
        """The fetch of a key that is sought now."""
        return self._under_way.get(key)

    def run(self, keys: Sequence[bytes], uid: int, ends_at: float, now: float, then: Callable[[], None]) -> None:
        """Seeks keys of a run, none of which is sought now. `then` is called for each, when its fetch has ended."""
        for key in keys:
            fetch = self._add(key, uid, 0, now, ends_at)
            fetch.due_at = ends_at
            fetch.then.append(then)
            self._busy[key] = fetch
        self._outbox.add(Seek(tuple(keys)))

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
        # Any other error concerns the entry: its bytes are wrong, or it has no room.
        if isinstance(error, TierUnavailable | TierRefused):
            self._link.failed(error, now)
        self._end(fetch, outcome, now)

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        assert self.run_keys == sum(not fetch.token for fetch in self._under_way.values())
        assert len(self._under_way) <= SOUGHT_MAX + self.run_keys
        looks = {key for key in self._under_way if self._looks.when(key) is not None}
        assert self._busy.keys() | looks == self._under_way.keys() and not self._busy.keys() & looks

    def may_be_sought(self, key: bytes) -> bool:
        """Whether the store may have an entry of the key that this host may show."""
        return self._agreement.shares(key) and not self._writes.removes(key)

    def patience_s(self, cost_s: float, now: float) -> float:
        """How long a client may wait for the store, which otherwise computes for `cost_s`; 0: not at all."""
        # A store that has not answered in time is slow now, and would only delay this client too.
        if not self._link.limits.remote_s or any(fetch.due_at < now for fetch in self._busy.values()):
            return 0.0
        for_s = min(cost_s, self._link.limits.remote_s)
        return for_s if (self._link.speed.answer_s.known(now) or 0.0) < for_s else 0.0

    def _ask(self, fetch: Fetch, now: float) -> None:
        fetch.due_at = now + min(fetch.cost_s, self._link.limits.remote_s)
        claims = self._link.limits.remote_writes and self._link.taking.closed
        claims_s = min(max(CLAIM_TIMES * fetch.cost_s, CLAIM_S_LEAST), CLAIM_S_MOST) if claims else 0.0
        self._busy[fetch.key] = fetch
        self._outbox.add(Seek((fetch.key,), claims_s))

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
        self._looks.set(fetch.key, min(now + max(look_s, LOOK_S_LEAST * len(self._under_way)), fetch.ends_at))
        return True

    def _add(self, key: bytes, uid: int, token: int, now: float, ends_at: float, cost_s: float = 0.0) -> Fetch:
        self._made += 1
        self.run_keys += not token
        self._under_way[key] = fetch = Fetch(self._made, key, uid, token, now, ends_at, cost_s)
        return fetch

    def _end(self, fetch: Fetch, outcome: str, now: float) -> None:
        """Ends a fetch that is asked for or read."""
        del self._busy[fetch.key]
        self._forget(fetch, outcome, now)

    def _forget(self, fetch: Fetch, outcome: str, now: float) -> None:
        del self._under_way[fetch.key]
        self.run_keys -= not fetch.token
        self._outbox.counters.remote[outcome] += 1
        for then in fetch.then:
            then()
        if fetch.token and outcome not in ("fetched", "overtaken"):
            self._outbox.send_verdicts(self._claims.sought(fetch.token, now))
