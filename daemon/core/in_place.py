"""Puts whose clients write the payload into the ring by themselves.

    Commit in place ─→ room, as for any put ─→ Placed ─→ the client pins the span and writes ─→ Fill ─→ Seal

Owns which client may do so, what it is told, and what follows from its Fill. Does not own the way of a put (`intake`),
nor spans (`span_table`).

Invariant: once a client was told of a span, the span is freed only after a scan, since the client may be writing it.
"""

from __future__ import annotations

from ...errors import BadMessage, TensordError
from ...ipc import messages
from ...shm.layout import SPAN_HEADER_BYTES
from .admission import given_up
from .claims import ClaimTable
from .effects import Seal
from .outbox import StoreOutbox
from .publication import Publication
from .puts import PutProgress, PutTable
from .span_table import SpanTable


class InPlace:
    """Places and fills the spans of such puts."""

    def __init__(
        self, memory: SpanTable, puts: PutTable, publication: Publication, claims: ClaimTable, outbox: StoreOutbox
    ) -> None:
        self._memory = memory
        self._puts = puts
        self._publication = publication
        self._claims = claims
        self._outbox = outbox

    def refusal(self, client: int, commit: messages.Commit) -> TensordError | None:
        """The refusal of a put in place of a client that may not write the ring; None for any other put."""
        if commit.in_place and not self._outbox.clients[client].writes:
            return BadMessage(
                "a Commit in place of a client that write_in_place does not allow to write the ring: put by an inbox"
            )
        return None

    def tell(self, put: PutProgress, now: float) -> None:
        """Tells the client the span of its put. The time for writing begins now."""
        entry = put.entry
        assert entry is not None
        put.told = True
        self._puts.renew(put, now)
        seq, span_id = (word.to_bytes(8, "little") for word in (self._memory.index.read(entry.slot).seq, entry.span_id))
        self._outbox.send(put.client, messages.Placed(put.commit.id, entry.slot, seq, span_id, entry.offset))

    def fill(self, put: PutProgress, checksum: bytes | None, now: float) -> TensordError | None:
        """Has a written payload checked and sealed. Returns why the put has to be refused instead, or None.

        Without a checksum, the client gives the put up, which is answered here. The claim stays: the client puts the
        payload another way.
        """
        if checksum is None:
            error = messages.ErrorBody.of(given_up(put.commit))
            self._outbox.send(put.client, messages.Committed(put.commit.id, "refused", error))
            return None
        if not put.told or put.whole:
            return BadMessage(f"Fill of put {put.commit.id}, which has no span to be filled: wait for Placed")
        commit, entry = put.commit, put.entry
        assert entry is not None
        self._puts.filled(put, now)
        if commit.claim is not None:
            self._claims.committing(commit.claim, put.uid, commit.key)
        header = self._publication.header(put)
        payload_offset = entry.offset + SPAN_HEADER_BYTES
        self._outbox.add(
            Seal(put.client, put.number, payload_offset, header, int.from_bytes(checksum, "little"), put.uid)
        )
        return None

    def free(self, put: PutProgress) -> None:
        """Frees the span of a put that has ended, now or after a scan."""
        if put.entry is not None:
            if put.told:
                self._memory.revoke(put.entry)
            else:
                self._memory.discard(put.entry)
        put.entry, put.told = None, False
