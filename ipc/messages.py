"""What both sides of a socket say: every message as a frozen, typed class.

Owns: names and fields (the governor's stand in `governance`), and which socket they belong to.
Does not own the ranges of fields (`words`), how bytes become objects (`frames`), nor who may say
what when (`connection`).

On the wire a message is a msgpack map whose `type` is the class's name. Unknown fields are ignored,
so that a field may be added without a new protocol version; an unknown `type` is told apart from a
bad message, so that it can be answered.

Invariant: what `decode` returns is within its ranges. Constructing a message checks nothing: a
sender is trusted with its own words, and pays no validation. Ranges across fields (`tree_bytes`
within `payload_bytes`, a part within its inbox) are left to whoever knows the other side of them.

`fds` in a message says how many descriptors travel with it: first declared, first taken.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from ..errors import TensordError, from_code
from .decode import UnknownMessage as UnknownMessage
from .decode import decode as decode
from .governance import AcknowledgeOrder as AcknowledgeOrder
from .governance import AdvanceWorkflow as AdvanceWorkflow
from .governance import DeviceOpened as DeviceOpened
from .governance import Drill as Drill
from .governance import Drilled as Drilled
from .governance import EndWorkflow as EndWorkflow
from .governance import ModeChanged as ModeChanged
from .governance import Modes as Modes
from .governance import OpenDevice as OpenDevice
from .governance import Order as Order
from .governance import ReadDevice as ReadDevice
from .governance import Registered as Registered
from .governance import RegisterEntry as RegisterEntry
from .governance import RegisterWorkflow as RegisterWorkflow
from .governance import ReleaseEntries as ReleaseEntries
from .governance import ReleaseReservation as ReleaseReservation
from .governance import RequestCompleted as RequestCompleted
from .governance import RequestsArrived as RequestsArrived
from .governance import Reserved as Reserved
from .governance import ReserveDevice as ReserveDevice
from .governance import Step as Step
from .governance import Subscribe as Subscribe
from .governance import TierState as TierState
from .governance import UseEntries as UseEntries
from .schema import (
    ENTRIES_MAX,
    NUMBER_MAX,
    Blocks,
    Bytes,
    Code,
    Count,
    Id,
    Key,
    Keys,
    Milliseconds,
    Name,
    NamespaceTag,
    NoneOrOne,
    One,
    PrefixBytes,
    Seconds,
    SecondsOrNone,
    SomeBytes,
    Text,
    Three,
    Token,
    Tokens,
    TreeBytes,
)
from .schema import PROTOCOL_VERSION as PROTOCOL_VERSION
from .schema import ClientLimits as ClientLimits
from .schema import ErrorBody as ErrorBody
from .schema import Message as Message

# ---- control requests


class Hello(Message, frozen=True):
    """The first message. `pid` as the client sees itself; `fence`: it registered for the fence."""

    id: Id
    protocol: Count
    name: Name
    pid: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
    fence: bool


class Attach(Message, frozen=True):
    """Asks for ring, index and a lane; a client that had a lane brings it along as a descriptor."""

    id: Id
    fds: NoneOrOne = 0


class OpenInbox(Message, frozen=True):
    """Brings a sealed inbox of `inbox_bytes`. `inbox`: its number, which no other open inbox of the connection has."""

    id: Id
    inbox_bytes: SomeBytes
    inbox: Count = 0
    fds: One = 1


class CloseInbox(Message, frozen=True):
    """No answer. The client needs the inbox no more: all of its puts from there are answered."""

    inbox: Count


class Commit(Message, frozen=True):
    """Begins a put; one or more Parts of the same id follow, `payload_bytes` in sum.

    `acks`: answer each part with PartCopied, for a sender that needs its region again before the put has ended.
    `cost_ms`: what computing the payload took, 0 where that is not known. `agent`: on whose behalf.
    `prefix_bytes`: the payload's first leaf, at `aligned(tree_bytes)`, is the record of a piece of a sequence
    (`shm.prefix`); 0: it is none. `parent_key`: the key of the piece before, None where the sequence begins.
    `inbox`: the number of the inbox in which all of the put's parts stand.
    """

    id: Id
    key: Key
    payload_bytes: SomeBytes
    tree_bytes: TreeBytes
    tokens: Count = 0
    ttl_s: Seconds | None = None
    claim: Token | None = None
    acks: bool = True
    cost_ms: Milliseconds = 0.0
    agent: Name = ""
    prefix_bytes: PrefixBytes = 0
    parent: Key | None = None
    inbox: Count = 0


class Part(Message, frozen=True):
    """The next `part_bytes` of the payload, to be found at `inbox_offset` of the put's inbox."""

    id: Id
    inbox_offset: Bytes
    part_bytes: SomeBytes
    last: bool


class RequestClaim(Message, frozen=True):
    """`within_s`: in how many seconds the client expects to have stored it, if it is the one to compute; 0: it cannot
    tell."""

    id: Id
    key: Key
    within_s: SecondsOrNone = 0.0


class Renew(Message, frozen=True):
    """No answer. Tokens of claims that have ended are ignored."""

    tokens: Tokens


class Abandon(Message, frozen=True):
    """No answer. The claim goes to the first who waits."""

    token: Token


class Evict(Message, frozen=True):
    id: Id
    keys: Keys


class Touch(Message, frozen=True):
    """Renews recency and ttl."""

    id: Id
    keys: Keys


class Clear(Message, frozen=True):
    """Evicts a namespace, or everything."""

    id: Id
    namespace: NamespaceTag | None = None


class Invalidate(Message, frozen=True):
    """Raises a namespace's generation if it is still `generation`, and drops its entries."""

    id: Id
    namespace: NamespaceTag
    generation: Count


class Pin(Message, frozen=True):
    id: Id
    key: Key
    for_s: Seconds


class Unpin(Message, frozen=True):
    id: Id
    key: Key


class Limit(Message, frozen=True):
    """Sets the store's byte budget while it runs."""

    id: Id
    limit_bytes: SomeBytes


class MatchPrefix(Message, frozen=True):
    """Asks for the longest cached prefix of a sequence. Its record of `query_bytes` (a `shm.prefix.Piece`: all tokens,
    folded, and all media) stands at `inbox_offset` of the inbox numbered `inbox`; the place is free again with the
    answer.
    """

    id: Id
    namespace: NamespaceTag
    inbox_offset: Bytes
    query_bytes: PrefixBytes
    agent: Name = ""
    inbox: Count = 0


class EvictPrefixes(Message, frozen=True):
    """Evicts a namespace's pieces of sequences, of all its generations, and nothing else of it."""

    id: Id
    namespace: NamespaceTag


class AgentTurn(Message, frozen=True):
    """What is known of an agent's next turn: a call of it has ended in a tool call, whose result it will go on with;
    or its turn has ended, and somebody has to speak first; or it is finished, and uses nothing again."""

    id: Id
    agent: Name
    state: Literal["tool_call", "turn_ended", "finished"]


# ---- control answers and pushes


class Welcome(Message, frozen=True):
    """Answers Hello. `version` of the daemon's package, `epoch` of this incarnation."""

    id: Id
    protocol: Count
    version: Name
    instance: Name
    epoch: Count
    limits: ClientLimits


class Attached(Message, frozen=True):
    """Answers Attach, with ring, index and lane as descriptors, in this order."""

    id: Id
    lane_id: Count
    ring_bytes: SomeBytes
    index_bytes: SomeBytes
    fds: Three = 3


class Done(Message, frozen=True):
    id: Id


class Counted(Message, frozen=True):
    """How many of the keys it was true for."""

    id: Id
    count: Count


class PartCopied(Message, frozen=True):
    """The part at `inbox_offset` is in the ring, or not wanted: its place in the inbox is free."""

    id: Id
    inbox_offset: Bytes


class Committed(Message, frozen=True):
    """How a put ended; `error` says why it was refused."""

    id: Id
    outcome: Literal["stored", "existed", "refused"]
    error: ErrorBody | None = None


class Claimed(Message, frozen=True):
    """`wait` is followed by another Claimed of this id; `alone`: compute, without a claim.

    `lasts_s`: with `compute` until the claim has to be renewed; with `wait` until its holder expects to have stored the
    payload, 0 where it did not tell.
    """

    id: Id
    answer: Literal["hit", "compute", "wait", "alone"]
    token: Annotated[int, Meta(ge=0, le=NUMBER_MAX)] = 0
    lasts_s: SecondsOrNone = 0.0


class Generation(Message, frozen=True):
    id: Id
    generation: Count
    dropped: Count


class Pinned(Message, frozen=True):
    """`lasts_s` is 0 if the key is not there."""

    id: Id
    lasts_s: SecondsOrNone


class Matched(Message, frozen=True):
    """The first `offset` tokens are cached: `blocks` have them, the last as far as needed. `snapshot`: the one that
    stands exactly there. Nothing is pinned: what has gone when it is looked up shortens the match."""

    id: Id
    offset: Count
    blocks: Blocks
    snapshot: Key | None = None


class Limited(Message, frozen=True):
    id: Id
    before_bytes: Bytes
    after_bytes: Bytes


class Error(Message, frozen=True):
    """A request was refused; without an id, the connection ends. `code`: the error's type."""

    id: Id | None
    code: Code
    text: Text

    @classmethod
    def of(cls, error: BaseException, id: int | None = None) -> Error:
        body = ErrorBody.of(error)
        return cls(id, body.code, body.text)

    def to_error(self) -> TensordError:
        return from_code(self.code, self.text)


# ---- status requests


class StatusQuery(Message, frozen=True):
    id: Id


class EntriesQuery(Message, frozen=True):
    """The next `count` entries whose keys come after `after`."""

    id: Id
    after: Key | None = None
    count: Annotated[int, Meta(ge=1, le=ENTRIES_MAX)] = 100
    namespace: NamespaceTag | None = None


class WhyQuery(Message, frozen=True):
    """The key's entry, and why it stays; or that it went, and why."""

    id: Id
    key: Key


class GoneQuery(Message, frozen=True):
    """Up to `count` keys of entries that went, the latest first: those whose first `digits` hexadecimal digits are
    `key`'s."""

    id: Id
    key: Key
    digits: Annotated[int, Meta(ge=1, le=64)]
    count: Annotated[int, Meta(ge=1, le=64)] = 8


class ClientsQuery(Message, frozen=True):
    id: Id


class HealthQuery(Message, frozen=True):
    id: Id


class Watch(Message, frozen=True):
    """Answered by a Document; Events follow until the connection ends."""

    id: Id


# ---- status answers and pushes


class Document(Message, frozen=True):
    id: Id
    body: dict[str, Any]


class Event(Message, frozen=True):
    """`dropped`: how many events before this one were not told to this watcher."""

    body: dict[str, Any]
    dropped: Count = 0


GovernorRequest = (
    Subscribe
    | OpenDevice
    | RegisterEntry
    | UseEntries
    | ReleaseEntries
    | AcknowledgeOrder
    | ReserveDevice
    | ReleaseReservation
    | ReadDevice
    | RegisterWorkflow
    | AdvanceWorkflow
    | EndWorkflow
    | RequestsArrived
    | RequestCompleted
    | Drill
)
"""What the governor is asked; the store knows nothing of these."""
GovernorAnswer = Modes | ModeChanged | DeviceOpened | Registered | Order | Reserved | Drilled
ControlRequest = (
    Hello
    | Attach
    | OpenInbox
    | CloseInbox
    | Commit
    | Part
    | RequestClaim
    | Renew
    | Abandon
    | Evict
    | Touch
    | Clear
    | Invalidate
    | Pin
    | Unpin
    | Limit
    | MatchPrefix
    | EvictPrefixes
    | AgentTurn
    | GovernorRequest
)
ControlAnswer = (
    Welcome
    | Attached
    | Done
    | Counted
    | PartCopied
    | Committed
    | Claimed
    | Generation
    | Pinned
    | Limited
    | Matched
    | Error
    | GovernorAnswer
)
StatusRequest = StatusQuery | EntriesQuery | WhyQuery | GoneQuery | ClientsQuery | HealthQuery | Watch
StatusAnswer = Document | Event | Error
