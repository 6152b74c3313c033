"""Agreement of hosts on the generations of namespaces, by way of the remote store.

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

Owns: what the store has to raise, and when it is asked. Does not own the table of the host (`shm.index.generations`),
nor the end of entries. Invariant: from an invalidation until the store has given out its number, nothing of the
namespace is shared. Limit: what was not told to the store is forgotten with the daemon. If it is killed first, and
another host invalidates the namespace too, both may have the same number, and the two invalidations count as one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, compress, islice
from typing import Final

from ...errors import LimitReached, TensordError
from ...shm.index.generations import GenerationWriter
from ...shm.index.keys import generation_of
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..claims.claims import NOBODY, ClaimTable
from ..forms.effects import AskGenerations, RaiseGeneration
from ..store.tenants import Tenants
from .link import RemoteLink

EVERY_S: Final = 5.0
"""How often the store is asked. So much later than the invalidation, at most, other hosts end their entries."""
TAGS_MAX: Final = 1024
"""Namespaces that are asked for at once."""


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
