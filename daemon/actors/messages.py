"""The messages between the daemon's actors.

Owns: their names and fields, and the rule for a session that does not keep up (`Joined.deliver`). Does not own the
messages on sockets (`ipc.messages.control`), nor the handling of any message.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec import Struct

from ...errors import TensordError
from ...ipc.messages import control as messages
from ...ipc.wire.descriptors import Peer
from ..config.config import Config
from ..forms import events as store
from ..forms.effects import Move
from ..forms.limits import StoreLimits
from ..governor.forms import events as governor
from ..memory.copier import InboxCopied
from ..memory.scrub import Scrubbed
from .mailbox import Mailbox

OUTBOX_MAX: Final = 1024
"""The most messages that wait to be sent to one client, and events that wait for one watcher. At the limit the client
is disconnected; the watcher's oldest event is dropped and counted."""


class Deliver(Struct, frozen=True):
    """To a session: a message for its peer, with the descriptors `fds`. The session closes those in `close`."""

    message: messages.Answer
    fds: Sequence[int] = ()
    close: Sequence[int] = ()


class HangUp(Struct, frozen=True):
    """To a session: close the connection."""

    reason: str


class Joined(Struct, frozen=True):
    """To the store and the governor: a client has sent Hello. `fenced`: it registered for the membarrier fence."""

    client: int
    peer: Peer
    name: str
    pid: int
    fenced: bool
    inbox: Mailbox[Deliver | HangUp]
    version: str = ""

    def may_write(self, allowed: str) -> bool:
        """Whether the setting write_in_place = `allowed` lets the client write payloads into the ring."""
        if allowed == "owner":
            return self.peer.uid == os.geteuid()
        return allowed == "group" and (self.peer.uid == os.geteuid() or self.peer.gid == os.getegid())

    def deliver(self, delivery: Deliver) -> bool:
        """Gives `delivery` to the session. If the session's inbox is full, the session gets a HangUp instead, and
        closes its connection. Returns False then; the caller still owns the descriptors."""
        if self.inbox.offer(delivery):
            return True
        self.inbox.tell_now(HangUp(f"the client does not read: {self.inbox.capacity} messages wait for it"))
        return False


class MemoryRequest(Struct, frozen=True):
    """To the store: a request about the client's lane or inboxes, with its descriptors. The store owns them now."""

    client: int
    message: messages.AttachmentRequest
    fds: Sequence[int]


class Fenced(Struct, frozen=True):
    """To the store: a thread's fence is done. `error`: why it failed."""

    error: BaseException | None = None


class Queried(Struct, frozen=True):
    """To the store or the governor: a query from the status socket. `answer` takes the body of the answer."""

    message: messages.StatusRequest
    answer: asyncio.Future[dict[str, Any]]

    def settle(self, made: Callable[[messages.StatusRequest], dict[str, Any]]) -> None:
        """Answers with the body that `made` returns, or with the TensordError that it raises."""
        if self.answer.cancelled():
            return
        try:
            self.answer.set_result(made(self.message))
        except TensordError as error:
            self.answer.set_exception(error)


class Reloaded(Struct, frozen=True):
    """To the store: the verdict of a reload, for queries; if it was accepted, the configuration and the limits."""

    verdict: dict[str, Any]
    accepted: tuple[Config, StoreLimits] | None = None


StoreMessage = Joined | MemoryRequest | Move | InboxCopied | Fenced | Scrubbed | Queried | Reloaded | store.Event

GovernorMessage = Joined | Queried | governor.Event
