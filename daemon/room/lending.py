"""Lends places of the ring to clients, and to the daemon itself for entries that it fetches.

    AskForGrants ─ unfit? pressure? ─ turns of uids and clients ─ the first place: there, or made (`runway`), or refused
                                                                └ further places: as many as are there now

Places are lent ahead of need, so a stopped client holds some: at most 1/CLIENT_SHARE of the ring, or less than
1/ALL_SHARE together with all others, since what is lent and unused holds no entry. The first place that a put waits for
is lent also if its client has no more than 1/BUSY_SHARE, for copies under way in its other threads, or as much again as
it asks for; if not, the request waits for its own client and for nobody else.

Owns: which client has which grants (`Submitter`), and the requests that wait. Does not own: the room (`runway`), nor
what is written into places (`Commits`).

A request that has no room beside unused places waits for them: their clients are asked to give them back, once.

Invariants: a request has one answer. At most WAITING_MAX requests of one client wait. A grant is not taken back while
its client is connected. What is lent counts against the ring, `max_bytes`, and the share of the client's uid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ...errors import LimitReached, StoreFull, TensordError, UnderPressure
from ...ipc.messages import control as messages
from ...shm.ring.layout import span_bytes
from ..claims.claims import NOBODY
from ..claims.turns import Turns
from ..forms.limits import RingBudget, StoreLimits
from ..forms.outbox import StoreOutbox
from ..store.commit import Submitter
from ..store.entries import Entries, OverEntries
from ..store.grants import LentGrant
from . import refusals
from .runway import Runway
from .survey import Survey

CLIENT_SHARE: Final = 64
BUSY_SHARE: Final = 8
ALL_SHARE: Final = 32
LEAST_BYTES: Final = span_bytes(1)
WAITING_MAX: Final = 64
"""Requests of one client that wait at once."""
UNUSED_S: Final = 0.05
"""How long a request that has no room waits for the unused places of clients."""
KEYS_MAX: Final = 16
"""Random keys that are tried for one grant."""

Then = Callable[[int | TensordError], None]


@dataclass(slots=True, eq=False)
class PlaceRequest:
    """A request that waits. `owner`: whose bytes they are. `then`: of the daemon's own, takes the place.
    `ahead`: as for `ask`. `waits_until`: for the unused places of clients, which are asked for them once."""

    submitter: Submitter
    owner: int
    number: int
    sizes: Sequence[int]
    then: Then | None = None
    ahead: bool = False
    waits_until: float | None = None


class Lending(OverEntries):
    """All grants of one store."""

    def __init__(
        self,
        entries: Entries,
        runway: Runway,
        limits: StoreLimits,
        budget: RingBudget,
        outbox: StoreOutbox,
        own_uid: int,
    ) -> None:
        super().__init__(entries)
        self._entries = entries
        self.runway = runway
        self._shares = runway.shares
        self.limits = limits
        self._budget = budget
        self._outbox = outbox
        self.own = Submitter(NOBODY, entries.tenants.owner(own_uid))
        self.submitters: dict[int, Submitter] = {NOBODY: self.own}
        self._turns: Turns[PlaceRequest] = Turns()
        self._held: list[PlaceRequest] = []
        """Requests that wait for their clients to use what they have, or for the ring to grow."""
        self.pressure: str | None = None
        """Why requests are refused while host memory is short."""

    # ---- clients

    def joined(self, client: int, uid: int) -> Submitter:
        """A client has connected. Raises LimitReached if too many uids have used the daemon."""
        submitter = self.submitters[client] = Submitter(client, self._tenants.owner(uid))
        self._shares.joined(submitter.owner)
        return submitter

    def left(self, client: int) -> None:
        """A client has left, and its records are carried out. Its places are free once no lane pins them."""
        submitter = self.submitters.pop(client, None)
        if submitter is None:
            return
        self._shares.left(submitter.owner)
        for grant in submitter.grants.values():
            self._grants.revoke(grant)
        submitter.grants.clear()
        head = self._turns.head()
        for request in [each for each in self._turns if each.submitter is submitter]:
            self._turns.remove(request.owner, client, request)
        self._held = [each for each in self._held if each.submitter is not submitter]
        if head is not self._turns.head():
            self.runway.drop_attempt()

    def is_lent(self, client: int, number: int, offset: int, size: int) -> bool:
        """Whether these bytes of the ring are those of a client's grant."""
        submitter = self.submitters.get(client)
        grant = submitter.grants.get(number) if submitter is not None else None
        if grant is None:
            return False
        table = self._table
        return any(table.offsets[row] <= offset and offset + size <= table.end(row) for row in grant.pieces)

    # ---- requests

    def ask(self, client: int, request: int, sizes: Sequence[int], *, ahead: bool = False) -> None:
        """A client asks for places, the most urgent one first. What it returned with the request was taken before.
        `ahead`: no put waits for them; so it does not wait until the client has used what it has."""
        submitter = self.submitters[client]
        # A place is a span: a header, and at least one line of payload.
        sizes = [size + 63 & -64 if size > LEAST_BYTES else LEAST_BYTES for size in sizes]
        asked = PlaceRequest(submitter, submitter.owner, request, sizes, ahead=ahead)
        waiting = self._turns.waiting(submitter.owner, client) + sum(each.submitter is submitter for each in self._held)
        if waiting < WAITING_MAX:
            self._push(asked)
        else:
            why = f"{waiting} requests for places of this client wait already, as many as may: put less at once"
            self._refuse(asked, LimitReached(why))

    def ask_own(self, size: int, uid: int, then: Then) -> None:
        """The daemon asks for one place, for an entry of a uid. `then` is called by `serve`, with a row in state LENT,
        the piece of a grant of `own`, or with the refusal."""
        self._push(PlaceRequest(self.own, self._tenants.owner(uid), 0, [size], then))

    def returned(self, client: int, numbers: Iterable[int]) -> None:
        """A client gives grants back, and its records are carried out. Numbers of grants that are used up are usual."""
        submitter = self.submitters.get(client)
        for number in numbers:
            grant = submitter.grants.pop(number, None) if submitter is not None else None
            if grant is not None:
                self.runway.places.free(self._grants.give_back(grant))

    @property
    def waiting(self) -> int:
        return len(self._turns) + len(self._held)

    def serve(self, now: float) -> None:
        """Serves the requests that wait, one after the other, until one waits for room. After each event."""
        while self._held:
            self._push(self._held.pop(0))
        while (request := self._turns.head()) is not None:
            if request.waits_until is not None and now < request.waits_until and self._grants.lent:
                return
            if self.pressure is not None:
                why = f"puts are refused while memory is short: {self.pressure}. Compute without storing it"
                self._refuse(request, UnderPressure(why))
            elif (error := refusals.unfit(request.sizes[0], self.limits, self._budget, self.ring_bytes)) is not None:
                self._refuse(request, error)
            elif not self._may_have(request):
                if request.ahead:
                    self._send_none(request)
                else:
                    self._held.append(request)
            elif row := self.runway.places.take(request.sizes[0]):
                self._lend(request, row)
            elif self.runway.is_growing and request.sizes[0] <= self._budget.put_bytes_max:
                # Those behind it may fit before the ring has grown.
                self._held.append(request)
            elif self.runway.make_room(request.sizes[0], request.owner, now, ahead=request.ahead):
                return
            elif request.ahead:
                self._send_none(request)
            elif request.waits_until is None and self._ask_for_unused(request, now):
                return
            else:
                self._refuse(request, self._no_room(request))
            self._turns.take()
            self.runway.drop_attempt()

    def next_timer(self) -> float | None:
        """When a request has waited long enough for the unused places of clients."""
        head = self._turns.head()
        until = None if head is None else head.waits_until
        return None if until is None or until <= self._outbox.now else until

    # ---- answers

    def _push(self, request: PlaceRequest) -> None:
        self._turns.push(request.owner, request.submitter.client, request)

    def _send_none(self, request: PlaceRequest) -> None:
        """The answer to a request ahead of need for which there is no place."""
        self._outbox.send(request.submitter.client, messages.GrantsLent(request.number))

    @property
    def ring_bytes(self) -> int:
        """The ring's final size."""
        return self.limits.ring_bytes if self.runway.is_growing else self._holes.capacity_bytes

    def _may_have(self, request: PlaceRequest) -> bool:
        """Whether a request's first place may be lent to its client now."""
        capacity = self._holes.capacity_bytes
        if (self._grants.lent_bytes + request.sizes[0]) * ALL_SHARE <= capacity or request.then is not None:
            return True
        unused, ring_bytes = self._unused(request.submitter), self.limits.ring_bytes
        if request.ahead:
            return unused + request.sizes[0] <= ring_bytes // CLIENT_SHARE
        # A client that waits gives back what it has above the share (client/writing/arena.py).
        return unused <= max(ring_bytes // BUSY_SHARE, request.sizes[0])

    def _unused(self, submitter: Submitter) -> int:
        sizes, total = self._table.sizes, 0
        for grant in submitter.grants.values():
            for row in grant.pieces:
                total += sizes[row]
        return total

    def _lend(self, request: PlaceRequest, first: int) -> None:
        runway, submitter, rows = self.runway, request.submitter, [first]
        runway.places.asked(request.sizes, request.owner)
        if len(request.sizes) > 1:
            capacity, used = self._holes.capacity_bytes, self._table.sizes[first]
            most = min(
                capacity // CLIENT_SHARE - self._unused(submitter), capacity // ALL_SHARE - self._grants.lent_bytes
            )
            rows += runway.places.take_all(request.sizes[1:], most - used)
        lent: list[LentGrant] = []
        for _ in range(KEYS_MAX):
            lent += self._grants.lend_all(rows[len(lent) :], request.owner)
            if len(lent) == len(rows):
                break
        if len(lent) < len(rows):
            runway.places.free(rows[len(lent) :])
        if not lent:
            self._refuse(request, StoreFull("no room (index bucket): the index is full; raise max_entries"))
            return
        grants = submitter.grants
        for grant in lent:
            grants[grant.number] = grant
        if request.then is not None:
            request.then(lent[0].pieces[0])
            return
        offsets, sizes = self._table.offsets, self._table.sizes
        pack, in_place = messages.GRANT.pack, submitter.in_place
        places = [
            pack(grant.number, offsets[row], sizes[row], grant.span_id if in_place else 0, grant.slot, grant.seq)
            for grant, row in zip(lent, rows, strict=False)
        ]
        self._outbox.send(submitter.client, messages.GrantsLent(request.number, b"".join(places)))

    def _ask_for_unused(self, request: PlaceRequest, now: float) -> bool:
        """Asks all clients for the places that they do not use, if the request has room without them. Returns whether
        it waits for them."""
        lenders = [client for client, submitter in self.submitters.items() if submitter.grants]
        survey = Survey(self._entries, lent=False)
        if not lenders or survey.obstacle(request.sizes[0], self._budget) is not None:
            return False
        for client in lenders:
            self._outbox.send(client, messages.PlacesWanted())
        request.waits_until = now + UNUSED_S
        self.runway.drop_attempt()
        return True

    def _refuse(self, request: PlaceRequest, error: TensordError) -> None:
        if request.then is not None:
            request.then(error)
            return
        client = request.submitter.client
        self._outbox.count_refusal(client, error)
        self._outbox.send(client, messages.GrantsLent(request.number, error=messages.ErrorBody.of(error)))

    def _no_room(self, request: PlaceRequest) -> TensordError:
        size, holes, budget = request.sizes[0], self._holes, self._budget
        survey, pages = Survey(self._entries), self.runway.pages
        obstacle = survey.obstacle(size, budget)
        given_back = pages.withdrawn.size_bytes
        if given_back and (error := pages.residency.error):
            obstacle = f"{given_back} bytes of the ring could not be allocated again: {error}"
        owners = self._shares.evictable(request.owner, size)
        if obstacle is None and owners is not None and request.owner in owners:
            tenants, owner = self._tenants, request.owner
            holding = (tenants.owned_bytes[owner], tenants.owned_entries[owner])
            return refusals.over_share(size, tenants.uids[owner], holding, self._shares.rivals(owner), budget)
        return refusals.no_room(size, obstacle, survey.kept_bytes, holes.largest_bytes, holes.capacity_bytes, budget)

    def check_invariants(self) -> None:
        self._grants.check_invariants([each for s in self.submitters.values() for each in s.grants.values()])
        for request in (*self._turns, *self._held):
            assert self.submitters[request.submitter.client] is request.submitter
