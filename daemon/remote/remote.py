"""The door of the package: the parts of one remote store's core, and what each event does to them.

    requests ─ begin, run, evicted, invalidated ─┐
    entries  ─ published, used ──────────────────┤→ link ← agreement ← writes ← fetches
    events   ─ handle, tick ─────────────────────┘

Owns: the order of the parts. Without a remote store (`remote_s` = 0) nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..claims.claims import ClaimTable
from ..forms.effects import AskGenerations, RaiseGeneration, ReadRemote, RemoveRemote, SaveRemote, Seek, WithdrawClaim
from ..forms.events import RemoteDone
from ..forms.limits import StoreLimits
from ..forms.outbox import StoreOutbox
from ..store.entries import Entries
from .fetches import Fetches
from .link import Agreement, RemoteLink
from .writes import Writes

if TYPE_CHECKING:
    from ..room.lending import Lending


class Remote:
    """The remote store of one ring. `places`: as for Fetches; `invalidate`: as for Agreement."""

    def __init__(
        self,
        entries: Entries,
        places: Lending,
        invalidate: Callable[[bytes, int], object],
        claims: ClaimTable,
        outbox: StoreOutbox,
        limits: StoreLimits,
    ) -> None:
        self.link = link = RemoteLink(outbox, limits)
        generations = entries.memory.index.generations
        self.agreement = Agreement(link, entries.tenants, generations, invalidate, claims)
        self.writes = Writes(entries, link, self.agreement)
        self.fetches = Fetches(entries, link, self.agreement, self.writes, claims, places)
        claims.given_up = link.end_claim

    def handle(self, done: RemoteDone, now: float) -> None:
        answer, error = done.answer, done.error
        if isinstance(done.request, Seek | SaveRemote | RemoveRemote | AskGenerations):
            if error is None:
                self.link.succeeded()
            else:
                self.link.failed(error, now)
        match done.request:
            case Seek() as seek:
                self.fetches.sought(seek, answer, now)
            case ReadRemote(key):
                self.fetches.read(key, answer, error)
            case SaveRemote() as save:
                self.writes.saved(save, answer, now)
            case RemoveRemote() as remove:
                self.writes.removed(remove, error is None, now)
            case WithdrawClaim():
                # One that could not be withdrawn ends by itself.
                if answer:
                    self.link.counts["withdrawn"] += 1
            case AskGenerations():
                self.agreement.answered(answer, now)
            case RaiseGeneration() as request:
                self.agreement.raised(request, answer, error)
        # The breaker may have turned.
        self.writes.start(now)

    def tick(self, now: float) -> None:
        self.agreement.tick(now)
        self.fetches.tick(now)
        self.writes.tick(now)

    def next_timer(self) -> float | None:
        timers = (self.agreement.next_timer(), self.fetches.looks.next_timer(), self.writes.next_timer())
        return min((timer for timer in timers if timer is not None), default=None)

    def state(self, now: float) -> dict[str, Any] | None:
        """For status; None without a store. `why`: the error for which it is left alone; `refuses_writes`: the one for
        which it is only read; `not_agreed`: namespaces whose generation it does not take."""
        link, writes = self.link, self.writes
        if not link.limits.remote_s:
            return None
        refuses_writes = link.taking.why if link.limits.remote_writes else ""
        return {
            "serves": link.breaker.closed,
            "why": link.breaker.why,
            "refuses_writes": refuses_writes,
            "full": bool(refuses_writes) and link.full,
            "read_only": bool(refuses_writes) and not link.full,
            "not_agreed": len(self.agreement.to_raise) - len(self.agreement.raising),
            "not_agreed_why": self.agreement.why,
            "fetches": len(self.fetches.under_way),
            "writes": int(writes.under_way is not None),
            "queued": len(writes.queue),
            "removals": len(writes.removed_keys),
            "removals_dropped": self.link.counts["removals_dropped"],
            "answer_s": link.answer_s.known(now) or None,
        }

    def check_invariants(self) -> None:
        for part in (self.agreement, self.fetches, self.writes):
            part.check_invariants()
