"""What a client and the daemon say on the control socket: every message as a frozen, typed class.

Owns: names and fields of what concerns connections and the store. The governor's messages stand in `governance`, those
of the status socket in `queries`; both can be had from here. Does not own the ranges of fields (`schema`), how bytes
become objects (`frames`), the base classes that say who handles a message (`declared`), nor who may say what when
(`connection`).

On the wire a message is a msgpack map whose `type` is the class's name. Unknown fields are ignored,
so that a field may be added without a new protocol version; an unknown `type` is told apart from a
bad message, so that it can be answered.

Invariant: what `decode` returns is within its ranges. Constructing a message checks nothing: a
sender is trusted with its own words, and pays no validation. Ranges across fields (`tree_bytes`
within `payload_bytes`, a part within its inbox) are left to whoever knows the other side of them.

`fds` in a message says how many descriptors travel with it: first declared, first taken.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .declared import Answer as Answer
from .declared import AttachmentRequest as AttachmentRequest
from .declared import ControlRequest as ControlRequest
from .declared import Counted as Counted
from .declared import DaemonQuery as DaemonQuery
from .declared import Done as Done
from .declared import Error as Error
from .declared import GaugeRequest as GaugeRequest
from .declared import GovernorRequest as GovernorRequest
from .declared import GreetingRequest as GreetingRequest
from .declared import PrefixRequest as PrefixRequest
from .declared import StatusRequest as StatusRequest
from .declared import StoreRequest as StoreRequest
from .decode import UnknownMessage as UnknownMessage
from .decode import decode as decode
from .governance import *  # noqa: F403
from .queries import *  # noqa: F403
from .schema import (
    NUMBER_MAX,
    Blocks,
    Bytes,
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
    Three,
    Token,
    Tokens,
    TreeBytes,
)
from .schema import PROTOCOL_VERSION as PROTOCOL_VERSION
from .schema import ClientLimits as ClientLimits
from .schema import ErrorBody as ErrorBody
from .schema import Message as Message

# ---- a connection's beginning, its lane and its inboxes


class Welcome(Answer, frozen=True):
    """Answers Hello. `version` of the daemon's package, `epoch` of this incarnation."""

    id: Id
    protocol: Count
    version: Name
    instance: Name
    epoch: Count
    limits: ClientLimits


class Hello(GreetingRequest, frozen=True):
    """The first message. `pid` as the client sees itself; `fence`: it registered for the fence."""

    answered_by = Welcome
    id: Id
    protocol: Count
    name: Name
    pid: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
    fence: bool


class Attached(Answer, frozen=True):
    """Answers Attach, with ring, index and lane as descriptors, in this order."""

    id: Id
    lane_id: Count
    ring_bytes: SomeBytes
    index_bytes: SomeBytes
    fds: Three = 3


class Attach(AttachmentRequest, frozen=True):
    """Asks for ring, index and a lane; a client that had a lane brings it along as a descriptor."""

    answered_by = Attached
    id: Id
    fds: NoneOrOne = 0


class OpenInbox(AttachmentRequest, frozen=True):
    """Brings a sealed inbox of `inbox_bytes`. `inbox`: its number, which no other open inbox of the connection has."""

    answered_by = Done
    id: Id
    inbox_bytes: SomeBytes
    inbox: Count = 0
    fds: One = 1


class CloseInbox(AttachmentRequest, frozen=True):
    """No answer. The client needs the inbox no more: all of its puts from there are answered."""

    inbox: Count


# ---- puts and claims


class PartCopied(Answer, frozen=True):
    """The part at `inbox_offset` is in the ring, or not wanted: its place in the inbox is free."""

    id: Id
    inbox_offset: Bytes


class Committed(Answer, frozen=True):
    """How a put ended; `error` says why it was refused."""

    id: Id
    outcome: Literal["stored", "existed", "refused"]
    error: ErrorBody | None = None


class Commit(StoreRequest, frozen=True):
    """Begins a put; one or more Parts of the same id follow, `payload_bytes` in sum.

    `acks`: answer each part with PartCopied, for a sender that needs its region again before the put has ended.
    `cost_ms`: what computing the payload took, 0 where that is not known. `agent`: on whose behalf.
    `prefix_bytes`: the payload's first leaf, at `aligned(tree_bytes)`, is the record of a block of a sequence
    (`shm.prefix`); 0: the entry is no block. `parent`: the parent block's key; None where the sequence begins.
    `inbox`: the number of the inbox in which all of the put's parts stand.
    """

    answered_by = Committed
    pushes = (PartCopied,)
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


class Part(StoreRequest, frozen=True):
    """The next `part_bytes` of the payload, to be found at `inbox_offset` of the put's inbox."""

    id: Id
    inbox_offset: Bytes
    part_bytes: SomeBytes
    last: bool


class Claimed(Answer, frozen=True):
    """`wait` is followed by another Claimed of this id; `alone`: compute, without a claim.

    `lasts_s`: with `compute` until the claim has to be renewed; with `wait` until its holder expects to have stored the
    payload, 0 where it did not tell.
    """

    id: Id
    answer: Literal["hit", "compute", "wait", "alone"]
    token: Annotated[int, Meta(ge=0, le=NUMBER_MAX)] = 0
    lasts_s: SecondsOrNone = 0.0


class RequestClaim(StoreRequest, frozen=True):
    """`within_s`: in how many seconds the client expects to have stored it, if it is the one to compute; 0: it cannot
    tell."""

    answered_by = Claimed
    id: Id
    key: Key
    within_s: SecondsOrNone = 0.0


class Renew(StoreRequest, frozen=True):
    """No answer. Tokens of claims that have ended are ignored."""

    tokens: Tokens


class Abandon(StoreRequest, frozen=True):
    """No answer. The claim goes to the first who waits."""

    token: Token


# ---- entries


class Evict(StoreRequest, frozen=True):
    answered_by = Counted
    needs_lane = False
    id: Id
    keys: Keys


class Touch(StoreRequest, frozen=True):
    """Renews recency and ttl."""

    answered_by = Counted
    needs_lane = False
    id: Id
    keys: Keys


class Clear(StoreRequest, frozen=True):
    """Evicts a namespace, or everything."""

    answered_by = Counted
    needs_lane = False
    id: Id
    namespace: NamespaceTag | None = None


class Generation(Answer, frozen=True):
    id: Id
    generation: Count
    dropped: Count


class Invalidate(StoreRequest, frozen=True):
    """Raises a namespace's generation if it is still `generation`, and drops its entries."""

    answered_by = Generation
    needs_lane = False
    id: Id
    namespace: NamespaceTag
    generation: Count


class Pinned(Answer, frozen=True):
    """`lasts_s` is 0 if the key is not there."""

    id: Id
    lasts_s: SecondsOrNone


class Pin(StoreRequest, frozen=True):
    answered_by = Pinned
    id: Id
    key: Key
    for_s: Seconds


class Unpin(StoreRequest, frozen=True):
    answered_by = Done
    id: Id
    key: Key


class Limited(Answer, frozen=True):
    id: Id
    before_bytes: Bytes
    after_bytes: Bytes


class Limit(StoreRequest, frozen=True):
    """Sets the store's byte budget while it runs."""

    answered_by = Limited
    needs_lane = False
    id: Id
    limit_bytes: SomeBytes


# ---- sequences and agents


class Matched(Answer, frozen=True):
    """The first `offset` tokens are cached: `blocks` have them, the last as far as needed. `snapshot`: the one that
    stands exactly there. Nothing is pinned: what has gone when it is looked up shortens the match."""

    id: Id
    offset: Count
    blocks: Blocks
    snapshot: Key | None = None


class MatchPrefix(PrefixRequest, frozen=True):
    """Asks for the longest cached prefix of a sequence. Its record of `query_bytes` (a packed
    `shm.prefix.PrefixRecord`: all tokens, folded, and all media) stands at `inbox_offset` of the
    inbox numbered `inbox`. The place is free again with the answer.
    """

    answered_by = Matched
    id: Id
    namespace: NamespaceTag
    inbox_offset: Bytes
    query_bytes: PrefixBytes
    agent: Name = ""
    inbox: Count = 0


class EvictPrefixes(StoreRequest, frozen=True):
    """Evicts the sequences of a namespace, of all its generations. Its other entries stay."""

    answered_by = Counted
    needs_lane = False
    id: Id
    namespace: NamespaceTag


class AgentTurn(StoreRequest, frozen=True):
    """What is known of an agent's next turn: a call of it has ended in a tool call, whose result it will go on with;
    or its turn has ended, and somebody has to speak first; or it is finished, and uses nothing again."""

    answered_by = Done
    needs_lane = False
    id: Id
    agent: Name
    state: Literal["tool_call", "turn_ended", "finished"]
