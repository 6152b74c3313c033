"""The messages of the control socket, each a frozen, typed class.

Owns: the names and fields of the messages about connections and the store. `governance` has the governor's messages,
`queries` those of the status socket; both can be imported from here too. Does not own the ranges of fields (`schema`),
the framing (`frames`), the base classes that name the handler of a message (`declared`), nor the order in which
messages may be sent (`states`, `connection`).

On the wire a message is a MessagePack map. Its `type` is the name of the class. Unknown fields are ignored, so that a
field can be added without a new protocol version. An unknown `type` is an error of its own, which can be answered.

Invariant: a message returned by `decode` has every field within its range. The constructor of a message checks
nothing: a sender does not pay for validation. Ranges across fields (`tree_bytes` within `payload_bytes`, a part within
its inbox) are checked by the code that handles the message.

`fds` is the number of descriptors that travel with a message. Descriptors are assigned to messages in the order in
which both arrive.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .attachment import *  # noqa: F403
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
    PrefixBytes,
    Seconds,
    SecondsOrNone,
    SomeBytes,
    Token,
    Tokens,
    TreeBytes,
    Word,
)
from .schema import PROTOCOL_VERSION as PROTOCOL_VERSION
from .schema import ClientLimits as ClientLimits
from .schema import ErrorBody as ErrorBody
from .schema import Message as Message

# ---- puts and claims


class PartCopied(Answer, frozen=True):
    """The part at `inbox_offset` is in the ring, or is not needed. The client may reuse its bytes in the inbox."""

    id: Id
    inbox_offset: Bytes


class Committed(Answer, frozen=True):
    """The outcome of a put. `error`: why the put was refused."""

    id: Id
    outcome: Literal["stored", "existed", "refused"]
    error: ErrorBody | None = None


class SpanTaken(Answer, frozen=True):
    """Answers TakeSpan. `offset`: of the span's header in the ring. `slot`: the number of its slot in the index, whose
    sequence number is `seq` as long as the span is the client's.

    The client pins `span_id` and then reads the slot. If the slot is unchanged, the span stays the client's until the
    pin ends, and the client may write a payload.
    """

    id: Id
    slot: Count
    seq: Word
    span_id: Word
    offset: Bytes


class TakeSpan(StoreRequest, frozen=True):
    """Asks for a span of the ring, to write a payload of up to `payload_bytes` into. Only for a client that was sent a
    WritableRing. The span is the client's until a Commit names it, ReturnSpan returns it, or its time is over.

    `ahead`: no payload waits for the span yet. It is refused if clients have taken a certain share of the ring. The
    entry of the client's last Commit stays while such a span waits for room, because the next put may continue it.
    `parent`: the key that the Commit of the span will name as its parent. The parent's entry stays until the span is
    used, returned or taken back; without `ahead` only.
    """

    answered_by = SpanTaken
    id: Id
    payload_bytes: SomeBytes
    ahead: bool = False
    parent: Key | None = None


class ReturnSpan(StoreRequest, frozen=True):
    """Returns a span that is not needed. No answer. `span`: the id of the TakeSpan."""

    span: Id


class Commit(StoreRequest, frozen=True):
    """Begins a put. The payload is in one of three places:

    - `at`: the offset in the inbox where the whole payload stands.
    - `span`: the id of the TakeSpan whose span has the whole payload. The client writes no more into the span, and
      `checksum` is the xxh3-64 of its bytes.
    - Both None: one or more Parts with the same id follow; together they have `payload_bytes`.

    `acks`: the daemon answers each Part with PartCopied, for a sender that reuses its region before the put has ended.
    `cost_ms`: the time that computing the payload took; 0 if it is not known. `agent`: the agent that the put is for.
    `prefix_bytes`: the size of the payload's first leaf, at `aligned(tree_bytes)`, if that leaf is the record of a
    block of a sequence (`shm.prefix`); 0 if the payload has no record. `parent`: the key of the parent, which the entry
    does not outlive; None if it has none. `inbox`: the number of the inbox that holds the payload.
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
    at: Bytes | None = None
    span: Id | None = None
    checksum: Word | None = None


class Part(StoreRequest, frozen=True):
    """The next `part_bytes` of the payload are at `inbox_offset` of the put's inbox."""

    id: Id
    inbox_offset: Bytes
    part_bytes: SomeBytes
    last: bool


class Claimed(Answer, frozen=True):
    """Answers RequestClaim. After `wait` another Claimed with this id follows. `alone`: compute without a claim.

    `lasts_s`: with `compute`, the time until the claim has to be renewed. With `wait`, the time in which the holder
    expects to have stored the payload; 0 if the holder did not say.
    """

    id: Id
    answer: Literal["hit", "compute", "wait", "alone"]
    token: Annotated[int, Meta(ge=0, le=NUMBER_MAX)] = 0
    lasts_s: SecondsOrNone = 0.0


class RequestClaim(StoreRequest, frozen=True):
    """Asks for the entry or for the claim on its key.

    `within_s`: the time in which the client expects to have stored the entry if it gets the claim; 0 if not known.
    """

    answered_by = Claimed
    id: Id
    key: Key
    within_s: SecondsOrNone = 0.0


class Renew(StoreRequest, frozen=True):
    """Renews claims. No answer. Tokens of claims that have ended are ignored."""

    tokens: Tokens


class Abandon(StoreRequest, frozen=True):
    """Gives a claim up. No answer. The claim is handed over to the first waiting client, at most once.

    `error`: why the value cannot be stored, by any client. Then all waiting clients compute, and for a minute nobody
    gets a claim on the key.
    """

    token: Token
    error: ErrorBody | None = None


class FetchRun(StoreRequest, frozen=True):
    """Has the daemon read entries from its remote store into the ring. The answer counts the keys, from the first one
    on, whose entries are in the ring then. It comes at once if asking the store is not worth it.

    `keys`: of one namespace and generation, in order: an entry's parent comes before it. `within_s`: the time that
    computing the entries would take; 0 if not known. Only for daemons whose Welcome says `remote`.
    """

    answered_by = Counted
    id: Id
    keys: Keys
    within_s: SecondsOrNone = 0.0


# ---- entries


class Evict(StoreRequest, frozen=True):
    """Evicts entries. The answer counts the entries that were stored."""

    answered_by = Counted
    needs_lane = False
    id: Id
    keys: Keys


class Touch(StoreRequest, frozen=True):
    """Renews the recency and the time to live of entries. The answer counts the entries that are stored."""

    answered_by = Counted
    needs_lane = False
    id: Id
    keys: Keys


class Clear(StoreRequest, frozen=True):
    """Evicts all entries of a namespace; without one, all entries."""

    answered_by = Counted
    needs_lane = False
    id: Id
    namespace: NamespaceTag | None = None


class Generation(Answer, frozen=True):
    """Answers Invalidate: the namespace's generation now, and the number of entries dropped."""

    id: Id
    generation: Count
    dropped: Count


class Invalidate(StoreRequest, frozen=True):
    """Raises a namespace's generation to `generation` + 1 and drops the namespace's entries. Does neither if the
    namespace's generation is above `generation` already."""

    answered_by = Generation
    needs_lane = False
    id: Id
    namespace: NamespaceTag
    generation: Count


class Pinned(Answer, frozen=True):
    """Answers Pin. `lasts_s`: how long the pin lasts; 0 if the key has no entry."""

    id: Id
    lasts_s: SecondsOrNone


class Pin(StoreRequest, frozen=True):
    """Pins an entry for `for_s` at most."""

    answered_by = Pinned
    id: Id
    key: Key
    for_s: Seconds


class Unpin(StoreRequest, frozen=True):
    """Ends a Pin."""

    answered_by = Done
    id: Id
    key: Key


class Limited(Answer, frozen=True):
    """Answers Limit: the store's byte budget before and after."""

    id: Id
    before_bytes: Bytes
    after_bytes: Bytes


class Limit(StoreRequest, frozen=True):
    """Sets the byte budget of the running store."""

    answered_by = Limited
    needs_lane = False
    id: Id
    limit_bytes: SomeBytes


# ---- sequences and agents


class Matched(Answer, frozen=True):
    """Answers MatchPrefix: the first `offset` tokens are cached.

    `blocks`: the blocks with these tokens, in order; the last block may have more tokens. `snapshot`: the snapshot at
    exactly that offset. Nothing is pinned: if a block is evicted before the client looks it up, the match is shorter.
    """

    id: Id
    offset: Count
    blocks: Blocks
    snapshot: Key | None = None


class MatchPrefix(PrefixRequest, frozen=True):
    """Asks for the longest cached prefix of a sequence.

    The query is a packed `shm.prefix.PrefixRecord` of `query_bytes`: all tokens, with the identities of media folded
    in, and all media. It is at `inbox_offset` of the inbox with the number `inbox`. The client may reuse these bytes
    once the answer has come.
    """

    answered_by = Matched
    id: Id
    namespace: NamespaceTag
    inbox_offset: Bytes
    query_bytes: PrefixBytes
    agent: Name = ""
    inbox: Count = 0


class EvictPrefixes(StoreRequest, frozen=True):
    """Evicts the sequences of a namespace, in all of its generations. Its other entries stay."""

    answered_by = Counted
    needs_lane = False
    id: Id
    namespace: NamespaceTag


class AgentTurn(StoreRequest, frozen=True):
    """Says when an agent runs.

    "began": a turn of it begins. "tool_call": its model call ended in a tool call, and it continues with the result.
    "turn_ended": its turn ended, and it continues after the next input. "finished": it never runs again.
    """

    answered_by = Done
    needs_lane = False
    id: Id
    agent: Name
    state: Literal["began", "tool_call", "turn_ended", "finished"]
