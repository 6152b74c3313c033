"""What the actors say to one another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from ...ipc import messages
from ...ipc.peer import Peer
from ..config.config import Config
from ..core.effects import Copy
from ..core.events import Allocated, Copied, Moved, Punched
from ..core.governor import events as governor
from ..core.host_memory import HostHolds, Pressed
from ..core.limits import StoreLimits
from .mailbox import Mailbox


class Deliver(Struct, frozen=True):
    """To a session: a message for its peer, with `fds` along, of which `close` are the session's to close."""

    message: messages.Answer
    fds: Sequence[int] = ()
    close: Sequence[int] = ()


class HangUp(Struct, frozen=True):
    """To a session: close the connection."""

    reason: str


SessionInbox = Mailbox[Deliver | HangUp]


class Joined(Struct, frozen=True):
    """To store and governor: a client has said Hello."""

    client: int
    peer: Peer
    name: str
    pid: int
    fenced: bool
    inbox: SessionInbox

    def deliver(self, delivery: Deliver) -> bool:
        """Hands it to the session. One that does not keep up is hung up on: False, and the descriptors are ours yet."""
        if self.inbox.offer(delivery):
            return True
        self.inbox.tell_now(HangUp(f"{self.inbox.capacity} messages wait for it (queues.outbox_max)"))
        return False


class MemoryRequest(Struct, frozen=True):
    """To the store: a request that concerns memory, with the descriptors that came along; they are the store's now."""

    client: int
    message: messages.AttachmentRequest
    fds: Sequence[int]


class Requested(Struct, frozen=True):
    """To the store: a request for the core."""

    client: int
    message: messages.StoreRequest | messages.PrefixRequest
    counted: int = 0
    """Of a rest that the core hands in again: what was counted before."""


class Governed(Struct, frozen=True):
    """To the governor: a request for its core, or a reading for its gauges."""

    client: int
    message: messages.GovernorRequest | messages.GaugeRequest


class Left(Struct, frozen=True):
    """To store and governor: the connection is gone. The last that is heard of a client."""

    client: int


class Grown(Struct, frozen=True):
    """To the store, from the thread that allocates the ring: up to where it may be used, or why it ends there."""

    ring_bytes: int
    error: Exception | None = None


class Scrubbed(Struct, frozen=True):
    """To the store, from the thread that checks recovered spans: whether the span's payload is what was stored."""

    slot: int
    span_id: int
    sound: bool


class Fenced(Struct, frozen=True):
    """To the store, from the thread that makes slow fences: lanes may be read now, or `error`: why not."""

    error: Exception | None = None


class Question(Struct, frozen=True):
    """To store or governor: something that a status socket's reader wants to know."""

    message: messages.StatusRequest
    answer: asyncio.Future[dict[str, Any]]


class Reconfigured(Struct, frozen=True):
    """To the store: the configuration was read again."""

    limits: StoreLimits
    config: Config


StoreMessage = (
    Joined
    | MemoryRequest
    | Requested
    | Left
    | Copy
    | Copied
    | Moved
    | Fenced
    | Grown
    | Scrubbed
    | Question
    | Reconfigured
    | Pressed
    | Punched
    | Allocated
)


GovernorMessage = Joined | Left | Governed | Question | governor.Sampled | HostHolds | governor.GovernorLimitsChanged


class Happened(Struct, frozen=True):
    """To the status actor: something that watchers may want to know."""

    body: dict[str, Any] = field(default_factory=dict)
