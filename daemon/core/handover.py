"""Hands the payload of a placed put to the copier: its parts as they come, or the span that its client has written.

Owns the order and the places of the copies of one put. Does not own the put (`intake`), nor what follows from a copy.

Invariant: every effect added here is answered by one Copied, for which `copying` has one offset.
"""

from __future__ import annotations

from ...shm.layout import SPAN_HEADER_BYTES
from .effects import Copy, Seal
from .outbox import StoreOutbox
from .publication import Publication
from .puts import PutProgress


class Handover:
    """Adds the effects of copies to the outbox."""

    def __init__(self, publication: Publication, outbox: StoreOutbox) -> None:
        self._publication = publication
        self._outbox = outbox

    def parts(self, put: PutProgress) -> None:
        """Hands over the parts that have arrived."""
        entry, commit = put.entry, put.commit
        assert entry is not None
        payload_offset = entry.offset + SPAN_HEADER_BYTES
        while put.parts:
            part = put.parts.popleft()
            ring_offset = payload_offset + put.handed_bytes
            put.handed_bytes += part.part_bytes
            put.copying.append(part.inbox_offset)
            self._outbox.add(
                Copy(
                    put.client,
                    put.number,
                    part.inbox_offset,
                    part.part_bytes,
                    ring_offset,
                    payload_offset,
                    part.last,
                    self._publication.header(put) if part.last else None,
                    put.uid,
                    commit.inbox,
                )
            )
        assert put.handed_bytes <= commit.payload_bytes

    def seal(self, put: PutProgress) -> None:
        """Has the payload checked that the client has written."""
        entry, commit = put.entry, put.commit
        assert entry is not None and commit.checksum is not None
        put.handed_bytes = commit.payload_bytes
        put.copying.append(0)
        header, checksum = self._publication.header(put), int.from_bytes(commit.checksum, "little")
        payload_offset = entry.offset + SPAN_HEADER_BYTES
        self._outbox.add(Seal(put.client, put.number, payload_offset, header, checksum, put.uid))
