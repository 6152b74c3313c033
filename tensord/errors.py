"""All errors that tensord raises or returns, as one class tree.

    TensordError
    ├── UsageError                the caller's mistake; the message names the argument
    │   ├── BadKey                the key is not 32 bytes
    │   ├── BadNamespace          a required part of a namespace is missing
    │   ├── UnsupportedLeaf       a type or dtype that no payload can hold; a tensor without memory
    │   ├── BadConfiguration      an unknown or invalid setting
    │   ├── BadGraph              a workflow with a cycle, an unknown dependency, or no steps
    │   ├── BadStep               an unknown workflow, or one that would move backwards
    │   ├── BadPrefix             a sequence whose tokens, media, layers or blocks do not fit together
    │   ├── TokensDiffer          one key with two different numbers of encoder tokens
    │   └── UnknownOrder          an acknowledgement or a reservation that the daemon does not know
    ├── Refusal                   the daemon refused; nothing changed, and no stored entry was lost
    │   ├── ObjectTooLarge        larger than the ring or than object_bytes_max
    │   ├── StoreFull             no room: what is stored is pinned, in flight, or worth more
    │   ├── LimitReached          a configured limit is reached
    │   ├── UnderPressure         the tier is in emergency mode, and accepts puts again when that ends
    │   ├── BelowFloor            room could be made only by eviction below the queueing floor
    │   ├── DeviceFull            too little of the device, or of its budget, is free
    │   ├── NoGauge               the device, or its use of memory, is not known to the daemon
    │   ├── OwnedElsewhere        another client has registered the key on the device
    │   ├── ParentGone       a block whose parent is not stored
    │   ├── Invalidated           the key is of a past generation of its namespace
    │   ├── TierFull              a remote store has no room
    │   │   └── TierTooLarge      a remote store never has room for an object of this size
    │   └── TierRefused           a remote store refuses the credentials, the call, or access to its folder
    │       └── TierReadOnly      a remote store takes no writes from this host, and can be read
    ├── Unavailable               no answer; reads are misses meanwhile
    │   ├── DaemonUnavailable     no daemon listens at the socket, or it ended
    │   │   └── ProcessLimit      this process can open no file, start no thread, or not map the ring
    │   ├── SocketForbidden       the user may not connect to the socket
    │   ├── TimedOut              no answer within the caller's timeout
    │   └── TierUnavailable       a remote store cannot be reached, or has failed
    │       └── TierTimedOut      a remote store has not answered by the deadline
    ├── ReferenceLost             the items of a reference are no longer stored: send their trees
    ├── ProtocolError             a fault of the peer; its connection is closed
    │   ├── BadMessage            not a message, or a field is out of its range
    │   ├── MessageTooLarge       over message_bytes_max
    │   └── VersionMismatch       the peer speaks another protocol version
    ├── SegmentError              shared memory cannot be created or used
    │   ├── NotEnoughMemory       /dev/shm, MemAvailable, the cgroup or RLIMIT_FSIZE is too small
    │   ├── LayoutMismatch        written by another layout version, or damaged
    │   ├── NameTaken             a file has the name of a new segment
    │   ├── NoFence               the kernel or a sandbox refuses membarrier(2)
    │   └── InstanceBusy          another daemon serves this instance
    └── Corrupt                   stored bytes that do not match their checksum or header
        └── BadTree               a tree header that does not describe a payload

Owns: the error types, and how a caller's value is shown in a message. Does not own: the messages.

Invariants: `code` is the name of an error in a message; `from_code` makes the same type from it in the receiver.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class TensordError(Exception):
    """The base class of all errors of tensord.

    Example:
        >>> try:
        ...     cache.get(b"too short")
        ... except tensord.TensordError as error:
        ...     print(error.code)
        BadKey
    """

    @property
    def code(self) -> str:
        """The name of this error in messages between client and daemon."""
        return type(self).__name__


class UsageError(TensordError, ValueError):
    """A mistake of the caller. The message names the argument."""


class BadKey(UsageError):
    """The key is not 32 bytes."""


class BadNamespace(UsageError):
    """The namespace lacks a part, without which outputs of two different encoders could get one key."""


class UnsupportedLeaf(UsageError):
    """A type or dtype that no payload can hold, or a tensor that has no memory, or none any more."""


class BadConfiguration(UsageError):
    """An unknown or invalid setting."""


class BadGraph(UsageError):
    """The steps of a workflow have a cycle or an unknown dependency, or there are none."""


class BadStep(UsageError):
    """The workflow is not registered, or would move backwards."""


class UnknownOrder(UsageError):
    """The daemon does not know the acknowledged order or the reservation. Nothing has changed."""


class BadPrefix(UsageError):
    """The tokens, media, layers, blocks or parents of a sequence do not fit together."""


class TokensDiffer(UsageError):
    """One key has two token counts: two contents have the same name, or the encoder was changed."""


class Refusal(TensordError):
    """The daemon refused the request. Nothing has changed, and no stored entry was lost."""


class ObjectTooLarge(Refusal):
    """The payload is larger than the ring, or than object_bytes_max."""


class StoreFull(Refusal):
    """No room: the stored entries are pinned, in flight, entries of uids within their shares, or likely to be used more
    than the later blocks of a long sequence. The message says which."""


class LimitReached(Refusal):
    """A configured limit is reached. The message names it."""


class UnderPressure(Refusal):
    """The tier is in emergency mode. It accepts no new entries until that ends."""


class BelowFloor(Refusal):
    """Room could be made only by eviction below the queueing floor."""


class DeviceFull(Refusal):
    """Too few bytes of the device are free, or left in its budget."""


class NoGauge(Refusal):
    """The daemon does not know the device, has no gauge of the device's memory, or cannot read that gauge now."""


class OwnedElsewhere(Refusal):
    """Another client has registered that key on that device."""


class ParentGone(Refusal):
    """The parent of a block, or of another entry that was put with `parent`, is not stored."""


class Invalidated(Refusal):
    """The key is older than the last invalidation of its namespace: it names a result of old weights."""


class TierFull(Refusal):
    """A remote store has no room for the object. The message names the store and its limit."""


class TierTooLarge(TierFull):
    """A remote store never takes an object of this size. It may have room for others."""


class TierRefused(Refusal):
    """A remote store refuses the credentials, the call, or access to its folder."""


class TierReadOnly(TierRefused):
    """A remote store takes no writes from this host, and can be read."""


class Unavailable(TensordError):
    """The daemon did not answer. Reads are misses meanwhile."""


class DaemonUnavailable(Unavailable):
    """No daemon listens at the socket, or the daemon ended."""


class ProcessLimit(DaemonUnavailable):
    """This process can open no file, start no thread, or not map the ring, so the daemon is out of its reach. The
    message names the limit."""


class SocketForbidden(Unavailable):
    """The socket exists, but this user may not connect to it."""


class TimedOut(Unavailable, TimeoutError):
    """No answer within the caller's timeout."""


class TierUnavailable(Unavailable):
    """A remote store cannot be reached, or has failed. Entries of the host are served as before."""


class TierTimedOut(TierUnavailable, TimeoutError):
    """A remote store has not answered by the deadline of the call."""


class ReferenceLost(TensordError):
    """Items of a call are no longer stored. `hashes` names all of them; send their trees."""

    def __init__(self, message: str, hashes: Sequence[str | bytes] = ()) -> None:
        super().__init__(message)
        self.hashes = list(hashes)


class ProtocolError(TensordError):
    """A fault of the peer. Its connection is closed."""


class BadMessage(ProtocolError):
    """Bytes that are not a message, or a field that is out of its range."""


class MessageTooLarge(ProtocolError):
    """A message is larger than message_bytes_max."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""


class SegmentError(TensordError):
    """Shared memory cannot be created or used."""


class NotEnoughMemory(SegmentError):
    """/dev/shm, MemAvailable, the cgroup or RLIMIT_FSIZE cannot hold the bytes asked for."""


class LayoutMismatch(SegmentError):
    """A segment has another layout version, or is damaged."""


class NameTaken(SegmentError):
    """A file has the name of a new segment. The message describes the file and its owner."""


class NoFence(SegmentError):
    """The kernel or a sandbox refuses membarrier(2), without which no span can be reused."""


class InstanceBusy(SegmentError):
    """Another daemon serves this instance."""


class Corrupt(TensordError):
    """Stored bytes do not match their checksum or header."""


class BadTree(Corrupt):
    """A tree header does not describe a payload."""


CANNOT_BE_STORED = (ObjectTooLarge, UnsupportedLeaf, BadTree, BadPrefix)
"""Errors of a put that every process would get for the same value, now and later."""


def _family(root: type[TensordError]) -> dict[str, type[TensordError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _family(child)
    return found


_BY_CODE = _family(TensordError)


def from_code(code: str, text: str) -> TensordError:
    """The error named `code`, with the message `text`. An unknown code gives a plain TensordError."""
    return _BY_CODE.get(code, TensordError)(text)


def without_frames(error: _Error) -> _Error:
    """The error, without its traceback and those of the errors that it came from. Frames refer to payloads, tensors and
    pins, also by way of the frames that called them, and all of that would live as long as the error."""
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        each = chain.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            chain += each.__cause__, each.__context__
    return error


def shown(value: object, *, brief: bool = False) -> str:
    """`repr(value)`, with `brief` of at most some 30 characters. Never raises: Python has no text for an int of more
    than 4,300 digits, and a class's own `__repr__` may fail.
    """
    try:
        return reprlib.repr(value) if brief else repr(value)
    except Exception:
        if isinstance(value, int):
            return f"an int of {value.bit_length()} bits"
        return f"a {type(value).__name__} that cannot be shown"
