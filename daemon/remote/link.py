"""What this host knows of the remote store, and agrees on with other hosts by way of it: whether the store serves, how
quickly, what this host claims there, and the generations of namespaces.

    error                       what follows
    of one object               nothing
    TierFull, TierReadOnly      `taking` opens at once: the store is read, and a write is tried from time to time
    TierRefused                 `breaker` opens at once: the store is left alone
    others                      `breaker` opens after a few in a row; if the store was never reached, at once

Averages are exponential, with a weight of 1/8 for each new measurement. What was measured of the store more than
FORGOTTEN_S ago counts no longer: so a store that was too slow to ask is asked again, by one client a minute.

A claim among hosts ends by itself once the entry is written, or its daemon was killed. One of which nothing comes is
withdrawn, so that no host waits in vain. A key that is claimed again meanwhile may lose the new claim: another host may
compute it too.

An invalidation raises a namespace's generation on its own host. Two hosts that do so count alike, though their entries
may be of different weights. So the store gives the numbers out, each one once, and only entries of the generation that
store and host agree on are shared:

    the store's generation     what follows
    the host's                 entries are shared
    higher                     another host has invalidated: this host invalidates too, and shares
    lower                      the store has not heard, or has lost its number: it is raised to the host's. If another
                               host was first, to a higher one, which this host follows

Every answer of the store about keys tells its generation of their namespace, so nothing of another one is read or
written. That of stored entries is also asked for, every EVERY_S. The question is also the probe of a store that is left
alone, and the first one at the start.

Owns: the breakers and their announcements, the averages, the claims, what the store has to raise, and when it is asked.
Does not own the table of the host's generations (`shm.index.generations`), nor the end of entries.

Invariant: from an invalidation until the store has given out its number, nothing of the namespace is shared. Limit:
what was not told to the store is forgotten with the daemon. If it is killed first, and another host invalidates the
namespace too, both may have the same number, and the two invalidations count as one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, compress, islice
from typing import Final

from ...errors import LimitReached, TensordError, TierFull, TierReadOnly, TierRefused, TierTooLarge
from ...shm.index.generations import GenerationWriter
from ...shm.index.keys import generation_of
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..claims.claims import NOBODY, ClaimTable
from ..forms.effects import AskGenerations, RaiseGeneration, RemoteTurned, WithdrawClaim
from ..forms.limits import StoreLimits
from ..forms.outbox import StoreOutbox
from ..store.tenants import Tenants

FAILURES_MAX: Final = 3
"""Failures in a row that open a breaker. One may be a connection that the server has closed."""
FIRST_S: Final = 1.0
"""From the opening of a breaker to the first try; LONGEST_S: between two tries."""
LONGEST_S: Final = 60.0
WEIGHT: Final = 1 / 8
FORGOTTEN_S: Final = 60.0
LARGE_BYTES: Final = 256 << 10
"""The least bytes of a payload whose reading takes longer than the store's answer, over any network worth using."""
NAMESPACES_MAX: Final = 1024
"""Namespaces whose costs are known at once. The one that was reported longest ago goes first."""
CLAIMS_MAX: Final = 4096
"""Claims of this host that are known at once. The oldest is forgotten, and ends by itself."""
EVERY_S: Final = 5.0
"""How often the store is asked. So much later than the invalidation, at most, other hosts end their entries."""
TAGS_MAX: Final = 1024
"""Namespaces that are asked for at once."""


class Breaker:
    """A circuit breaker. Each failure of a try doubles the time until the next one. A success closes it."""

    def __init__(self) -> None:
        self.why = ""
        """The error that has opened the breaker; empty while it is closed."""
        self.tries_at = 0.0
        """From when on an open breaker lets a request through."""
        self._failures = 0
        self._wait_s = FIRST_S

    @property
    def closed(self) -> bool:
        return not self.why

    def may_try(self, now: float) -> bool:
        """Whether a request may be made, be it to see if the store serves again."""
        return self.closed or now >= self.tries_at

    def succeeded(self) -> bool:
        """The store has answered. Returns whether this has closed the breaker."""
        was_open = not self.closed
        self.why, self._failures, self._wait_s = "", 0, FIRST_S
        return was_open

    def failed(self, why: str, now: float, *, refused: bool) -> bool:
        """A request has failed; `refused`: so would the next one. Returns whether this has opened the breaker."""
        opens = self.closed
        if opens:
            self._failures += 1
            if self._failures < FAILURES_MAX and not refused:
                return False
            self.why = why
        elif now < self.tries_at:
            # The request was begun before the breaker opened, and says nothing new.
            return False
        else:
            self._wait_s = min(2 * self._wait_s, LONGEST_S)
        self.tries_at = now + self._wait_s
        return opens


class Average:
    """An exponential average that is forgotten FORGOTTEN_S after its last measurement."""

    def __init__(self) -> None:
        self._value = 0.0
        self._at = -FORGOTTEN_S

    def add(self, value: float, now: float) -> None:
        known = self.known(now)
        self._value = known + WEIGHT * (value - known) if known else value
        self._at = now

    def known(self, now: float) -> float:
        """The average; 0 without a recent measurement."""
        return self._value if now - self._at <= FORGOTTEN_S else 0.0


class RemoteLink:
    """The daemon's knowledge of one remote store, and the limits in force."""

    def __init__(self, outbox: StoreOutbox, limits: StoreLimits) -> None:
        self.outbox = outbox
        self.counts = outbox.counters.remote
        self.limits = limits
        self.breaker = Breaker()
        self.taking = Breaker()
        """Open while the store takes no writes."""
        self.full = False
        """Whether `taking` was opened because the store has no room."""
        self.reached = False
        """Whether the store has ever answered."""
        self.answer_s = Average()
        """Seconds until the store says whether it has a key."""
        self.s_per_byte = Average()
        """Seconds that reading takes, for each byte of a large payload."""
        self._costs_s: OrderedDict[bytes, float] = OrderedDict()
        self._claims: dict[bytes, None] = {}

    @property
    def serves(self) -> bool:
        """Whether there is a store, and it is not left alone."""
        return self.limits.remote_s > 0 and self.breaker.closed

    @property
    def takes_writes(self) -> bool:
        """Whether entries can be written now."""
        return self.serves and self.limits.remote_writes and self.taking.closed

    def succeeded(self) -> None:
        """The store has answered."""
        self.reached = True
        if self.breaker.succeeded():
            self.outbox.add(RemoteTurned(""))

    def failed(self, error: TensordError, now: float) -> None:
        """A request of the store has ended with an error."""
        if not isinstance(error, TierFull | TierReadOnly):
            refused = isinstance(error, TierRefused) or not self.reached
            if self.breaker.failed(str(error), now, refused=refused):
                self.outbox.add(RemoteTurned(str(error)))
            return
        self.succeeded()
        if isinstance(error, TierTooLarge):
            return
        full = isinstance(error, TierFull)
        opened = self.taking.failed(str(error), now, refused=True)
        if opened or full != self.full:
            self.full, self.taking.why = full, str(error)
            self.outbox.add(RemoteTurned(str(error), "writes"))

    def changed(self) -> None:
        """The store has taken a write, or a removal although it was not full: it takes others."""
        if self.taking.succeeded():
            self.outbox.add(RemoteTurned("", "writes"))

    def read(self, size_bytes: int, took_s: float, now: float) -> None:
        """A payload was read. The time of a small one is that of an answer, and says nothing of large ones."""
        if size_bytes >= LARGE_BYTES:
            self.s_per_byte.add(took_s / size_bytes, now)

    def read_s(self, size_bytes: int, now: float) -> float:
        """The expected time of a read; as far as it is unknown, 0."""
        return self.answer_s.known(now) + size_bytes * self.s_per_byte.known(now)

    def cost_reported(self, key: bytes, cost_s: float) -> None:
        """A put has taken so long to compute; 0: unknown."""
        if cost_s > 0:
            tag, known_s = key[:NAMESPACE_TAG_BYTES], self.cost_s(key)
            self._costs_s[tag] = known_s + WEIGHT * (cost_s - known_s) if known_s else cost_s
            self._costs_s.move_to_end(tag)
            if len(self._costs_s) > NAMESPACES_MAX:
                self._costs_s.popitem(last=False)

    def cost_s(self, key: bytes) -> float:
        """How long the entries of the key's namespace take to compute, on average; 0 if no put has reported it."""
        return self._costs_s.get(key[:NAMESPACE_TAG_BYTES], 0.0)

    def claimed(self, key: bytes) -> None:
        self._claims.pop(key, None)
        self._claims[key] = None
        if len(self._claims) > CLAIMS_MAX:
            del self._claims[next(iter(self._claims))]

    def end_claim(self, key: bytes, *, written: bool = False) -> None:
        """The key's entry is in the store (`written`), or does not come: then the claim is withdrawn, if this host has
        it."""
        if key in self._claims:
            del self._claims[key]
            if not written and self.breaker.closed:
                self.outbox.add(WithdrawClaim(key))


@dataclass(eq=False, repr=False)
class Agreement:
    """The generations that this host and one store agree on.

    Args:
        invalidate: (namespace, generation): raises the namespace's generation to this one, and ends the entries of
            earlier ones. Raises LimitReached.
        to_raise: namespaces whose generation the store has to raise to the host's. True: to one that is nobody else's,
            since this host has invalidated.
        raising: those of them that the store raises now.
        why: why the store has not raised a generation when it was told to last.
    """

    _link: RemoteLink
    _tenants: Tenants
    _generations: GenerationWriter
    _invalidate: Callable[[bytes, int], object]
    _claims: ClaimTable
    to_raise: dict[bytes, bool] = field(default_factory=dict)
    raising: set[bytes] = field(default_factory=set)
    why: str = ""
    _asking: bool = False
    _ask_at: float = 0.0

    def next_timer(self) -> float | None:
        """When `tick` is due; None while there is nothing to ask."""
        link = self._link
        if not link.limits.remote_s or self._asking:
            return None
        if not link.breaker.closed:
            return link.breaker.tries_at
        return self._ask_at if self.to_raise or self._tenants.total_entries or not link.reached else None

    def shares(self, key: bytes) -> bool:
        """Whether the key's entry may be shared, if the store's generation is the key's too."""
        tag = key[:NAMESPACE_TAG_BYTES]
        return tag not in self.to_raise and generation_of(key) == self._generations.current(tag)

    def invalidated(self, tag: bytes) -> None:
        if self._link.limits.remote_s:
            self.to_raise[tag] = True
            self._raise()

    def told(self, tag: bytes, generation: int) -> None:
        if tag in self.to_raise:
            return
        if generation < self._generations.current(tag):
            # To this host's number and no further: its clients hold it, and would share nothing under a higher one.
            self.to_raise[tag] = False
            self._raise()
        else:
            self._follow(tag, generation)

    def raised(self, request: RaiseGeneration, generation: int | None, error: TensordError | None) -> None:
        tag = request.tag
        self.raising.remove(tag)
        if error is not None or generation is None:
            # `tick` tries again.
            self.why = str(error)
            self._link.counts["raise_failed"] += 1
        elif request.least == self._generations.current(tag) <= generation:
            del self.to_raise[tag]
            self._follow(tag, generation)
        else:
            # It was invalidated once more meanwhile, and the number given out is one of before.
            self._raise()

    def answered(self, told: dict[bytes, int] | None, now: float) -> None:
        """The store has answered an AskGenerations, or could not (None)."""
        self._asking = False
        self._ask_at = now + EVERY_S
        for tag, generation in (told or {}).items():
            self.told(tag, generation)

    def tick(self, now: float) -> None:
        """Asks for the generations of stored entries, and again to raise those that the store has not raised."""
        due = self.next_timer()
        if due is not None and now >= due:
            self._asking = True
            stored = compress(self._tenants.tags, self._tenants.entries)
            tags = tuple(islice(dict.fromkeys(chain(self.to_raise, stored)), TAGS_MAX))
            self._link.outbox.add(AskGenerations(tags))
            self._raise()

    def check_invariants(self) -> None:
        assert self.raising <= self.to_raise.keys()

    def _raise(self) -> None:
        if self._link.breaker.closed:
            for tag in self.to_raise.keys() - self.raising:
                self.raising.add(tag)
                self._link.outbox.add(RaiseGeneration(tag, self._generations.current(tag), self.to_raise[tag]))

    def _follow(self, tag: bytes, generation: int) -> None:
        """This host takes over the store's generation, and ends its entries of earlier ones."""
        if generation > self._generations.current(tag):
            try:
                self._invalidate(tag, generation)
            except LimitReached as error:
                self._link.outbox.count_refusal(NOBODY, error)
                return
            self._link.outbox.send_verdicts(self._claims.void(tag))
