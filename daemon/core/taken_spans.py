"""Spans that clients have taken in advance, to write payloads into the ring by themselves.

    TakeSpan ─→ room, as for any put ─→ SpanTaken ─→ the client pins the span and writes ─→ Commit names it ─→ the put
                                                  └→ ReturnSpan, the client left, or SPAN_S have passed ─→ revoked
    SPAN_S have passed ─→ revoked, and kept while it is pinned ─→ Commit names it after all ─→ the put

Owns which client may take spans, how many, and the spans that no Commit has named yet. Does not own the search for room
(`intake`), the table of what waits for room (`puts`), nor the put that a span goes to.

Invariants: once a client was told of a span, the span is freed only after a scan, since the client may be writing it.
All taken spans together have at most 1/TAKEN_SHARE of the ring's budget, except for a single one that a put waits for.
The parent that a span is taken for stays until the span is removed. While a span that is taken in advance waits for
room, the entry of the client's last Commit before it stays: the next put may continue it. A span whose time is over is
no taken span any more. A Commit gets it nevertheless as long as no scan has freed it: its bytes are the client's then.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Final

from ...errors import BadMessage, LimitReached
from ...ipc import messages
from ...ipc.schema import SPAN_S, SPANS_PER_CLIENT_MAX
from ...shm.keys import make_key
from ...shm.layout import NAMESPACE_TAG_BYTES, span_bytes
from .deadlines import Deadlines
from .entries import SpanEntry
from .outbox import StoreOutbox
from .puts import PutProgress, PutTable, Stage
from .span_table import SpanTable

TAKEN_SHARE: Final = 16

Place = tuple[int, int]
"""(client, id of its TakeSpan)."""


class TakenSpans:
    """The spans by client and TakeSpan."""

    def __init__(self, memory: SpanTable, outbox: StoreOutbox, puts: PutTable) -> None:
        self._memory = memory
        self._outbox = outbox
        self._puts = puts
        self._spans: dict[int, dict[int, SpanEntry]] = {}
        self._due: Deadlines[Place] = Deadlines()
        self._parents: dict[Place, bytes] = {}
        self._last: dict[int, bytes] = {}
        self._late: dict[int, dict[int, SpanEntry]] = {}
        self.size_bytes = 0
        """Total bytes of these spans."""

    def __len__(self) -> int:
        return len(self._due)

    def __iter__(self) -> Iterator[SpanEntry]:
        for own in self._spans.values():
            yield from own.values()

    def commit(self, client: int, request: messages.TakeSpan) -> messages.Commit:
        """The put as which a TakeSpan waits for room. Its key is never published.

        Raises:
            BadMessage, LimitReached: the client may not take the span.
        """
        if not self._outbox.clients[client].writes:
            raise BadMessage(
                "a TakeSpan of a client that write_in_place does not allow to write the ring: put by an inbox"
            )
        own, waiting = self._spans.get(client, {}), self._puts.takers[client]
        if request.id in own or self._puts.of_request(client, request.id) is not None:
            raise BadMessage(f"TakeSpan id {request.id} is in use already; ids are not used twice")
        if len(own) + waiting >= SPANS_PER_CLIENT_MAX:
            raise LimitReached(
                f"the client has taken {len(own)} spans and waits for {waiting}, and a client may have "
                f"{SPANS_PER_CLIENT_MAX}: put into them, or return them"
            )
        taken_bytes, size = self.size_bytes + self._puts.taking_bytes, span_bytes(request.payload_bytes)
        most = self._memory.budget.max_bytes // TAKEN_SHARE
        if taken_bytes + size > most and (taken_bytes or request.ahead):
            raise LimitReached(
                f"a span of {size} bytes, besides {taken_bytes} bytes of spans that clients have taken: all of them "
                f"may have {most} bytes, 1/{TAKEN_SHARE} of max_bytes. Put through the inbox, or raise max_bytes"
            )
        key = make_key(bytes(NAMESPACE_TAG_BYTES), hashlib.sha256(b"%d %d" % (client, request.id)).digest(), 0)
        parent = self._last.get(client) if request.ahead else request.parent
        return messages.Commit(request.id, key, request.payload_bytes, 1, acks=False, parent=parent)

    def named_by(self, client: int, commit: messages.Commit) -> SpanEntry | None:
        """Removes the span that a Commit names, and returns it. None if it names none, or the client does not have it.
        The put's key is the client's last from now on."""
        self._last[client] = commit.key
        if commit.span is None:
            return None
        return self.remove(client, commit.span) or self._restore(client, commit.span)

    def give(self, put: PutProgress, entry: SpanEntry, now: float) -> None:
        """Ends the wait of a TakeSpan: tells the client its span."""
        client, request, parent = put.client, put.commit.id, put.commit.parent
        if put.ahead:
            self._unfollow(parent)
        elif parent is not None:
            self._parents[client, request] = parent
        self._puts.answered(put)
        self._puts.forget(put)
        self._spans.setdefault(client, {})[request] = entry
        self._due.set((client, request), now + SPAN_S)
        self.size_bytes += entry.span_bytes
        seq, span_id = (word.to_bytes(8, "little") for word in (self._memory.index.read(entry.slot).seq, entry.span_id))
        self._outbox.send(client, messages.SpanTaken(request, entry.slot, seq, span_id, entry.offset))

    def remove(self, client: int, request: int) -> SpanEntry | None:
        """Removes a span, and returns it. None if the client does not have it (any more)."""
        own = self._spans.get(client, {})
        entry = own.pop(request, None)
        if entry is None:
            return None
        if not own:
            del self._spans[client]
        self._due.drop((client, request))
        self._unfollow(self._parents.pop((client, request), None))
        self.size_bytes -= entry.span_bytes
        return entry

    def take_back(self, client: int, request: int) -> None:
        """Revokes a span, if the client has it."""
        entry = self.remove(client, request)
        if entry is not None:
            self._memory.revoke(entry)

    def client_left(self, client: int) -> None:
        """Revokes all spans of the client."""
        self._last.pop(client, None)
        self._late.pop(client, None)
        for request in list(self._spans.get(client, ())):
            self.take_back(client, request)

    def expire(self, now: float, most: int) -> bool:
        """Revokes up to `most` spans whose time is over. Returns whether it revoked one."""
        for count in range(most):
            place = self._due.pop_due(now)
            if place is None:
                return count > 0
            self._revoke_late(*place)
        return True

    def _revoke_late(self, client: int, request: int) -> None:
        """Revokes a span that its client may still be writing. It counts as taken no more."""
        entry = self.remove(client, request)
        assert entry is not None
        self._memory.revoke(entry)
        late = {number: each for number, each in self._late.get(client, {}).items() if self._memory.is_retired(each)}
        if len(late) >= SPANS_PER_CLIENT_MAX:
            del late[next(iter(late))]
        self._late[client] = {**late, request: entry}

    def _restore(self, client: int, request: int) -> SpanEntry | None:
        """A span that was revoked late, and that no scan has freed: nobody else has written it."""
        entry = self._late.get(client, {}).pop(request, None)
        if entry is None or not self._memory.is_retired(entry):
            return None
        self._memory.restore_revoked(entry)
        return entry

    def next_timer(self) -> float | None:
        return self._due.next_timer()

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises of its tables."""
        self._due.check_invariants()
        places = {(client, request) for client, own in self._spans.items() for request in own}
        assert len(places) == len(self._due) and all(place in self._due for place in places)
        assert all(self._spans.values())
        assert self.size_bytes == sum(entry.span_bytes for entry in self)
        assert self._parents.keys() <= places
        assert all(len(late) <= SPANS_PER_CLIENT_MAX for late in self._late.values())
        named = [put.commit.parent for put in self._puts if put.stage is not Stage.ENDING]
        expected = Counter(parent for parent in (*named, *self._parents.values()) if parent is not None)
        assert expected == self._memory.sequences.followed, "a parent is kept for nothing, or not kept"

    def _unfollow(self, parent: bytes | None) -> None:
        if parent is not None:
            self._memory.sequences.unfollow(parent)
