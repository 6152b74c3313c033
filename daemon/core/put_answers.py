"""Answers puts, and the clients that wait for what is put.

Owns: what follows from the end of a put for its sender, for those that wait for its claim, for watchers and counters;
for a put of an entry from the remote store, for its fetch. Does not own the decision (`intake`, `publication`).
"""

from __future__ import annotations

from ...errors import CANNOT_BE_STORED, TensordError
from ...ipc import messages
from .claims import NOBODY, ClaimTable
from .entries import SpanEntry
from .expiry import Expiry
from .outbox import StoreOutbox
from .puts import PutProgress
from .remote.fetches import Fetches
from .remote.writes import Writes
from .span_table import SpanTable
from .unstorable import Unstorable


class PutAnswers:
    """Answers each put once."""

    def __init__(
        self,
        memory: SpanTable,
        expiry: Expiry,
        claims: ClaimTable,
        unstorable: Unstorable,
        fetches: Fetches,
        writes: Writes,
        outbox: StoreOutbox,
    ) -> None:
        self._memory = memory
        self._expiry = expiry
        self._claims = claims
        self._unstorable = unstorable
        self._fetches = fetches
        self._writes = writes
        self._outbox = outbox

    def part_copied(self, put: PutProgress, inbox_offset: int) -> None:
        """A part of the put is not needed any more, for a sender that waits for this."""
        if put.commit.acks and put.commit.at is None:
            self._outbox.send(put.client, messages.PartCopied(put.commit.id, inbox_offset))

    def voided(self, put: PutProgress) -> TensordError | None:
        """Why a put of an entry from the remote store must not be published; None if it may be."""
        return self._fetches.refusal(put.commit.id) if put.fetched else None

    def stored(self, put: PutProgress, entry: SpanEntry, now: float) -> None:
        """The put was published as `entry`."""
        commit = put.commit
        if put.fetched:
            self._fetches.ended(commit.id, now, None)
            entry.offered = True
        else:
            self._outbox.counters.puts["stored"] += 1
            self._outbox.counters.put_bytes += commit.payload_bytes
            self._outbox.send(put.client, messages.Committed(commit.id, "stored"))
            self._writes.published(entry, now)
        self._outbox.announce(
            "fetch" if put.fetched else "put",
            client=put.client,
            key=put.key.hex(),
            payload_bytes=commit.payload_bytes,
            tokens=commit.tokens,
        )
        self._unstorable.stored(put.key)
        self._outbox.send_verdicts(self._claims.committed(put.key))

    def existed(self, client: int, commit: messages.Commit, stored: SpanEntry, now: float) -> None:
        """The put's key is stored already. A put of a client counts as a use of the entry."""
        if client == NOBODY:
            self._fetches.overtaken(commit.id)
            return
        self._expiry.used([stored], now)
        self._writes.used([stored], now)
        self._memory.policy.put_again(stored.number)
        self._outbox.counters.puts["existed"] += 1
        self._outbox.send(client, messages.Committed(commit.id, "existed"))

    def refused(
        self,
        client: int,
        uid: int,
        commit: messages.Commit,
        error: TensordError,
        now: float,
        *,
        for_good: bool = False,
    ) -> None:
        """The put is refused. Whoever waits for its claim computes. `for_good`, or an error that says so: the same put
        would be refused again, so for a time nobody gets a claim on the key."""
        if client == NOBODY:
            self._fetches.ended(commit.id, now, error)
        else:
            self._outbox.counters.puts["refused"] += 1
            self._outbox.count_refusal(client, error)
            self._outbox.send(client, messages.Committed(commit.id, "refused", messages.ErrorBody.of(error)))
        if commit.claim is not None:
            if for_good or isinstance(error, CANNOT_BE_STORED):
                self._unstorable.note(commit.key, error, now)
            self._outbox.send_verdicts(self._claims.refused(commit.claim, uid, commit.key, now))
