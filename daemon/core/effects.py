"""What the store asks for. The actor carries effects out in the order given; Copy, Move, Scan, Punch and Allocate may
take their time.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ...ipc import messages
from ...shm.layout import SpanHeader
from .host_memory import HostHolds


class Send(Struct, frozen=True):
    """An answer or a push, for a client that has not left. The governor asks for it too."""

    client: int
    message: messages.Answer


class Copy(Struct, frozen=True):
    """Copies `part_bytes` from the client's inbox of that number to byte `ring_offset` of the ring, for put `put_id`.

    With the last part comes the span's header: the copier checks the payload's tree, and the record of a block of a
    sequence if the header says that it is one, fills in the checksum and writes the header 128 bytes before the
    payload, whose first byte in the ring is `payload_offset`. Answered by Copied, also where the inbox turns out too
    short (`error`) and where the client has left meanwhile. Uids take turns with the copier, and so do their clients.
    """

    client: int
    put_id: int
    inbox_offset: int
    part_bytes: int
    ring_offset: int
    payload_offset: int
    last: bool
    header: SpanHeader | None = None
    uid: int = 0
    inbox: int = 0


class Move(Struct, frozen=True):
    """Copies a span of the ring, header and payload, to another place, where its header names the span `number`.

    Both are `size_bytes` long, and neither changes its place or its size until Moved has answered; `uid` stored it.
    """

    number: int
    from_offset: int
    to_offset: int
    size_bytes: int
    uid: int


class WriteExpiry(Struct, frozen=True):
    """Writes into the header of the published span at `offset` when its entry ends, for clients and the next daemon."""

    offset: int
    expires_s: float


class Drain(Struct, frozen=True):
    """Read what lanes recorded until now: events of Accessed, then one of Drained. One at a time."""


class Scan(Struct, frozen=True):
    """Fence, then read the pin words of every lane; answered by Scanned. One at a time."""


class Punch(Struct, frozen=True):
    """Gives these pages of the ring back to the system. No span stands in them. Answered by Punched."""

    offset: int
    size_bytes: int


class Allocate(Struct, frozen=True):
    """Has the system set these pages of the ring aside again, so that they may be written. Answered by Allocated."""

    offset: int
    size_bytes: int


class Forget(Struct, frozen=True):
    """Nothing of a client that left is needed any more: its inboxes may be unmapped. Once per client."""

    client: int


class Discard(Struct, frozen=True):
    """A put ended after some of its parts and before its last: what the copier keeps of it may go."""

    client: int
    put_id: int


class Announce(Struct, frozen=True):
    """Something that watchers may want to know. `body["event"]` names it; keys are hexadecimal.

    put, evict, expire, clear, invalidate, refuse, claim, limit, mode, order, owner, workflow, stuck: see where they are
    made.
    """

    body: dict[str, Any]


class Again(Struct, frozen=True):
    """The rest of a request: to be handed in as Received with `counted`, before anything else that the client sent."""

    client: int
    message: messages.Evict | messages.Touch
    counted: int


Effect = (
    Send | Copy | Move | WriteExpiry | Drain | Scan | Punch | Allocate | HostHolds | Discard | Forget | Announce | Again
)
