"""The messages about a connection's beginning, and about the memory that a client gets or brings: ring, lane, inboxes.

Owns: the names and fields of these messages. Does not own the memory itself (the daemon's and the client's).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .declared import Answer, AttachmentRequest, Done, GreetingRequest
from .schema import ClientLimits, Count, Id, Name, NoneOrOne, One, SomeBytes, Three


class Welcome(Answer, frozen=True):
    """Answers Hello. `version`: the version of the daemon's package. `epoch`: the number of this incarnation of the
    daemon. `remote`: there is a remote store behind the ring."""

    id: Id
    protocol: Count
    version: Name
    instance: Name
    epoch: Count
    limits: ClientLimits
    remote: bool = False


class Hello(GreetingRequest, frozen=True):
    """The first message of a connection.

    `pid`: as the client's own pid namespace counts it. `fence`: the client registered for the membarrier fence.
    `version`: the version of the client's package; empty in releases that do not send it.
    """

    answered_by = Welcome
    id: Id
    protocol: Count
    name: Name
    pid: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
    fence: bool
    version: Name = ""


class Attached(Answer, frozen=True):
    """Answers Attach. Brings three descriptors: ring, index and lane, in this order.

    `place`: of the lane in the index's tables `settled` and `refusals`, as long as the lane exists.
    """

    id: Id
    lane_id: Count
    place: Count
    ring_bytes: SomeBytes
    index_bytes: SomeBytes
    fds: Three = 3


class Attach(AttachmentRequest, frozen=True):
    """Asks for the ring, the index and a lane. A client that already has a lane sends its descriptor."""

    answered_by = Attached
    id: Id
    fds: NoneOrOne = 0


class OpenInbox(AttachmentRequest, frozen=True):
    """Brings the descriptor of a sealed memory file of `inbox_bytes`, from which the daemon copies.

    A client that may not write into the ring writes payloads into it, at the same offsets at which the daemon lends
    places of the ring; then it is as large as the ring. Prefix queries are read from it too. A later one takes the
    place of an earlier one.
    """

    answered_by = Done
    id: Id
    inbox_bytes: SomeBytes
    fds: One = 1


class WritableRing(Answer, frozen=True):
    """Answers OpenRing. Brings a descriptor of the ring that can be mapped for writing."""

    id: Id
    fds: One = 1


class OpenRing(AttachmentRequest, frozen=True):
    """Asks to write payloads into the ring in place. Refused if the setting write_in_place does not allow this user."""

    answered_by = WritableRing
    id: Id
