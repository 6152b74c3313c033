"""Every error that tensord raises or hands back, as one family.

    TensordError
    ├── UsageError                the caller's mistake; the message names the argument
    │   ├── BadKey                not 32 bytes
    │   ├── BadNamespace          a namespace without what makes two encoders' outputs differ
    │   ├── UnsupportedLeaf       a type or dtype that no payload tree can hold
    │   ├── BadConfiguration      an unknown or invalid setting
    │   ├── BadGraph              a workflow with a cycle, an unknown dependency, or no steps
    │   ├── BadStep               a workflow that is not known, or moved backwards
    │   ├── BadGaugeFile          a line that is no reading
    │   ├── BadPrefix             a sequence whose tokens, media, layers or blocks do not fit together
    │   ├── TokensDiffer          one key with two counts of encoder tokens
    │   └── UnknownOrder          an acknowledgement, or a reservation, that the daemon knows nothing of
    ├── Refusal                   the daemon said no; nothing changed, nothing stored was lost
    │   ├── ObjectTooLarge        larger than the ring or than object_bytes_max
    │   ├── StoreFull             no room: what is there is pinned or in flight
    │   ├── LimitReached          one of the configured limits
    │   ├── UnderPressure         the tier is in emergency; it accepts again when that ends
    │   ├── BelowFloor            only by evicting below the queueing floor would there be room
    │   ├── DeviceFull            not so much of the device is free, or within its budget
    │   ├── NoGauge               nothing is known of the device, or of how full it is
    │   ├── OwnedElsewhere        another client has registered that key on that device
    │   ├── PredecessorGone       a piece of a sequence whose piece before is not stored
    │   └── Invalidated           the key is of a past generation of its namespace
    ├── Unavailable               nobody answered; reads are misses meanwhile
    │   ├── DaemonUnavailable     no daemon at the socket, or it went away
    │   ├── SocketForbidden       the socket is there, and we may not use it
    │   └── TimedOut              the answer did not come within the caller's time
    ├── ReferenceLost             what a reference names is not stored any more: send the tree
    ├── ProtocolError             the peer's fault; its connection ends
    │   ├── BadMessage            not a message, or a field is out of its range
    │   ├── MessageTooLarge       over message_bytes_max
    │   └── VersionMismatch       the peer speaks another protocol version
    ├── SegmentError              shared memory cannot be had or used
    │   ├── NotEnoughMemory       /dev/shm, MemAvailable or the cgroup cannot hold it
    │   ├── LayoutMismatch        written by another layout version
    │   ├── NameTaken             a file stands where a new segment was to be
    │   ├── NoFence               the kernel or a sandbox refuses membarrier(2)
    │   └── InstanceBusy          another daemon serves this instance
    └── Corrupt                   stored bytes that do not match their checksum or description
        └── BadTree               a tree header that describes no payload

`code` is what crosses the socket; `from_code` turns it back into the same type on the other side.
"""

from __future__ import annotations

from collections.abc import Sequence


class TensordError(Exception):
    """The base of the family.

    Example:
        >>> try:
        ...     cache.get(b"too short")
        ... except tensord.TensordError as error:
        ...     print(error.code)
        BadKey
    """

    @property
    def code(self) -> str:
        """The name under which this error crosses the socket."""
        return type(self).__name__


class UsageError(TensordError, ValueError):
    """The caller's mistake."""


class BadKey(UsageError):
    """A key that is not 32 bytes."""


class BadNamespace(UsageError):
    """A namespace that lacks what makes two encoders' outputs differ."""


class UnsupportedLeaf(UsageError):
    """A type or dtype that no payload tree can hold."""


class BadConfiguration(UsageError):
    """An unknown or invalid setting."""


class BadGraph(UsageError):
    """A workflow's steps that have a cycle or an unknown dependency."""


class BadStep(UsageError):
    """A workflow that nobody registered, or that would move backwards."""


class BadGaugeFile(UsageError):
    """A line of a gauge file that is no reading; the message names line and field."""


class UnknownOrder(UsageError):
    """An acknowledgement or a reservation that the daemon knows nothing of; nothing has changed."""


class BadPrefix(UsageError):
    """A sequence whose tokens, media, layers or blocks do not fit together."""


class TokensDiffer(UsageError):
    """One key with two token counts: two contents under one name, or an encoder that was changed."""


class Refusal(TensordError):
    """The daemon said no; nothing changed, and nothing stored was lost."""


class ObjectTooLarge(Refusal):
    """Larger than the ring, or than object_bytes_max."""


class StoreFull(Refusal):
    """No room: whatever is stored is pinned or in flight."""


class LimitReached(Refusal):
    """One of the configured limits; the message names it."""


class UnderPressure(Refusal):
    """The tier is in emergency: nothing new is taken in until that ends."""


class BelowFloor(Refusal):
    """Only by evicting below the queueing floor would there be room."""


class DeviceFull(Refusal):
    """Not so much of the device is free, or left of its budget."""


class NoGauge(Refusal):
    """The device is not known here, or nobody knows how full it is."""


class OwnedElsewhere(Refusal):
    """Another client has registered that key on that device."""


class PredecessorGone(Refusal):
    """A piece of a sequence whose piece before is not stored."""


class Invalidated(Refusal):
    """The key was made before its namespace was last invalidated, so that it names what old weights make."""


class Unavailable(TensordError):
    """Nobody answered. Reads are misses meanwhile."""


class DaemonUnavailable(Unavailable):
    """No daemon listens at the socket, or it went away."""


class SocketForbidden(Unavailable):
    """The socket exists, and this user may not connect to it."""


class TimedOut(Unavailable, TimeoutError):
    """No answer within the time the caller gave."""


class ReferenceLost(TensordError):
    """Items that are not there any more, all of one call. `hashes` names them: send their trees."""

    def __init__(self, message: str, hashes: Sequence[str | bytes] = ()) -> None:
        super().__init__(message)
        self.hashes = list(hashes)


class ProtocolError(TensordError):
    """The peer's fault. Its connection ends."""


class BadMessage(ProtocolError):
    """Bytes that are no message, or a field out of its range."""


class MessageTooLarge(ProtocolError):
    """A message over message_bytes_max."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""


class SegmentError(TensordError):
    """Shared memory that cannot be had or used."""


class NotEnoughMemory(SegmentError):
    """/dev/shm, MemAvailable or the cgroup cannot hold what was asked for."""


class LayoutMismatch(SegmentError):
    """A segment written by another layout version."""


class NameTaken(SegmentError):
    """A file stands where a new segment was to be; the message says whose."""


class NoFence(SegmentError):
    """The kernel or a sandbox refuses membarrier(2), without which no span can be reused."""


class InstanceBusy(SegmentError):
    """Another daemon serves this instance."""


class Corrupt(TensordError):
    """Stored bytes that do not match their checksum or description."""


class BadTree(Corrupt):
    """A tree header that describes no payload."""


def _family(root: type[TensordError]) -> dict[str, type[TensordError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _family(child)
    return found


_BY_CODE = _family(TensordError)


def from_code(code: str, text: str) -> TensordError:
    """The error named `code`, with its message; an unknown code gives a plain TensordError."""
    return _BY_CODE.get(code, TensordError)(text)
