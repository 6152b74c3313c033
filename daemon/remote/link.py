"""What this package knows of the remote store: whether it serves, how quickly, and what this host claims there.

    error                       what follows
    of one object               nothing
    TierFull, TierReadOnly      `taking` opens at once: the store is read, and a write is tried from time to time
    TierRefused                 `breaker` opens at once: the store is left alone
    others                      `breaker` opens after a few in a row; if the store was never reached, at once

Averages are exponential, with a weight of 1/8 for each new measurement. What was measured of the store more than
FORGOTTEN_S ago counts no longer: so a store that was too slow to ask is asked again, by one client a minute.

Owns: the breakers and their announcements, the averages, and the claims. A claim among hosts ends by itself once the
entry is written, or its daemon was killed. One of which nothing comes is withdrawn, so that no host waits in vain. A
key that is claimed again meanwhile may lose the new claim: another host may compute it too.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from ...errors import TensordError, TierFull, TierReadOnly, TierRefused, TierTooLarge
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..forms.effects import RemoteTurned, WithdrawClaim
from ..forms.limits import StoreLimits
from ..forms.outbox import StoreOutbox

FAILURES_MAX: Final = 3
"""Failures in a row that open a breaker. One may be a connection that the server has closed."""
FIRST_S: Final = 1.0
"""The time from the opening of a breaker to the first try."""
LONGEST_S: Final = 60.0
"""The longest time between two tries."""
WEIGHT: Final = 1 / 8
FORGOTTEN_S: Final = 60.0
LARGE_BYTES: Final = 256 << 10
"""The least bytes of a payload whose reading takes longer than the store's answer, over any network worth using."""
NAMESPACES_MAX: Final = 1024
"""Namespaces whose costs are known at once. The one that was reported longest ago goes first."""
CLAIMS_MAX: Final = 4096
"""Claims of this host that are known at once. The oldest is forgotten, and ends by itself."""


class Breaker:
    """A circuit breaker. Each failure of a try doubles the time until the next one. A success closes it."""

    def __init__(self) -> None:
        self.why = ""
        """The error that has opened the breaker; empty while it is closed."""
        self.opened = 0
        """How often the breaker was opened."""
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
            self.opened += 1
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
        first, self.reached = not self.reached, True
        if self.breaker.succeeded():
            self.outbox.add(RemoteTurned("", first=first))

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
