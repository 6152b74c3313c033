"""The store's effects, immutable. The actor begins them in the order given; some end later, each with an event. A
Received returns the rest of a request: it comes back before any later message of the client. Owns their fields only."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from ...ipc.messages import control as messages
from .events import Received


class Send(Struct, frozen=True):
    """An answer or a push for a client that has not left. The governor uses this effect too."""

    client: int
    message: messages.Answer


class Move(Struct, frozen=True):
    """Copies a span of the ring, header and payload, to another place, where the header names the span `number`.
    Neither changes until Moved is handled. `uid` stored the entry."""

    number: int
    from_offset: int
    to_offset: int
    size_bytes: int
    uid: int


class Drain(Struct, frozen=True):
    """Reads what the lanes have recorded until now: Accessed events, then one Drained. One Drain at a time."""


class Scan(Struct, frozen=True):
    """Fences, then reads the pin words of every lane; answered by Scanned. One Scan at a time."""


class Punch(Struct, frozen=True):
    """Returns these pages of the ring to the system. No span is in them. Answered by Punched."""

    offset: int
    size_bytes: int


class Allocate(Struct, frozen=True):
    """Allocates these pages of the ring again, so that they may be written. Answered by Allocated."""

    offset: int
    size_bytes: int


class HostHolds(Struct, frozen=True):
    """How much of the ring is in memory: an event for the governor. `wanted_bytes`: what would be without pressure.
    `settled`: the store has done all that the last Pressed asked for, as far as that is possible."""

    resident_bytes: int
    wanted_bytes: int
    settled: bool


class Announce(Struct, frozen=True):
    """An event for watchers. `body["event"]` names it; keys are hexadecimal. Its fields are listed where it is
    announced."""

    body: dict[str, Any]


class Seek(Struct, frozen=True):
    """Asks the remote store which of `keys`, from the first one on, it has. All are of one namespace and generation; if
    the store's generation is another one, it is told alone. Answered by Sought. `claims_s`: if the store does not have
    the one key, it is claimed among all hosts for so many seconds; 0: it is not."""

    keys: tuple[bytes, ...]
    claims_s: float = 0.0


class ReadRemote(Struct, frozen=True):
    """Reads the object of `key` from the remote store into the place at byte `ring_offset` of the ring, which nobody
    else knows. It must have `payload_bytes`, and a valid tree. Answered by the RemoteEntry."""

    key: bytes
    ring_offset: int
    payload_bytes: int


class SaveRemote(Struct, frozen=True):
    """Writes the published span at `offset` to the remote store. Its bytes do not change until that has ended. Answered
    by RemoteSaved. `hurried`: the entry is about to be evicted, so the write does not give way."""

    key: bytes
    offset: int
    payload_bytes: int
    hurried: bool = False


class RemoveRemote(Struct, frozen=True):
    """Removes objects from the remote store."""

    keys: tuple[bytes, ...]


class WithdrawClaim(Struct, frozen=True):
    """Ends this host's claim on a key in the remote store. Answered by whether this host had it."""

    key: bytes


class AskGenerations(Struct, frozen=True):
    """Asks the remote store for its generations of namespaces. Answered by (namespace -> generation)."""

    tags: tuple[bytes, ...]


class RaiseGeneration(Struct, frozen=True):
    """Has the remote store give out a generation that it has given to nobody, at least `least`. Answered by it. `new`:
    False if the store's own is good enough once it is at least `least`."""

    tag: bytes
    least: int
    new: bool = True


class RemoteTurned(Struct, frozen=True):
    """The remote store is left alone from now on, because of the error `why`; or, if that is empty, it serves again.
    `what`: what this concerns; "writes" are removals too."""

    why: str
    what: Literal["store", "writes"] = "store"


RemoteRequest = Seek | ReadRemote | SaveRemote | RemoveRemote | WithdrawClaim | AskGenerations | RaiseGeneration
"""What a remote store is asked. Each is answered by one RemoteDone."""

Effect = Send | Move | Drain | Scan | Punch | Allocate | HostHolds | RemoteRequest | RemoteTurned | Announce | Received
