# ruff: noqa: F403, F405 - a sender or handler imports this module alone
"""The messages of the control socket, each a frozen, typed class, and all else that a sender or handler needs.

Owns: the names and fields of the messages about connections and the store. `governance` has the governor's messages,
`queries` those of the status socket. Does not own the ranges of fields (`schema`), nor the base classes that name the
handler of a message (`declared`).

On the wire a message is a MessagePack map. Its `type` is the name of the class. Unknown fields are ignored, so that a
field can be added without a new protocol version. An unknown `type` is an error of its own, which can be answered.

Invariant: a message returned by `decode` has every field within its range. The constructor of a message checks
nothing: a sender does not pay for validation. Ranges across fields (a query within its inbox) are checked by the code
that handles the message.

`fds` is the number of descriptors that travel with a message. Descriptors are assigned to messages in the order in
which both arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .declared import *
from .governance import *
from .queries import *
from .schema import *

# ---- connections and the memory of a client


class Welcome(Reply, frozen=True):
    """Answers Hello. `version`: of the daemon's package. `epoch`: the number of this incarnation of the daemon.
    `remote`: there is a remote store behind the ring."""

    protocol: Count
    version: Name
    instance: Name
    epoch: Count
    limits: ClientLimits
    remote: bool = False


class Hello(GreetingRequest, frozen=True):
    """The first message of a connection. `pid`: as the client's own pid namespace counts it. `fence`: the client
    registered for the membarrier fence. `version`: of the client's package."""

    answered_by = Welcome
    protocol: Count
    name: Name
    pid: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
    fence: bool
    version: Name = ""


class Attached(Reply, frozen=True):
    """Answers Attach. Brings three descriptors: ring, index and lane, in this order. `place`: of the lane in the
    index's tables `settled` and `refusals`, as long as the lane exists."""

    lane_id: Count
    place: Count
    ring_bytes: SomeBytes
    index_bytes: SomeBytes
    fds: Three = 3


class Attach(AttachmentRequest, frozen=True):
    """Asks for the ring, the index and a lane. A client that already has a lane sends its descriptor."""

    answered_by = Attached
    fds: NoneOrOne = 0


class OpenInbox(AttachmentRequest, frozen=True):
    """Brings the descriptor of a sealed memory file of `inbox_bytes`, from which the daemon copies. A client that may
    not write into the ring writes payloads into it, at the same offsets at which the daemon lends places of the ring;
    then it is as large as the ring. Prefix queries are read from it too. A later one replaces an earlier one."""

    answered_by = Done
    inbox_bytes: SomeBytes
    fds: One = 1


class WritableRing(Reply, frozen=True):
    """Answers OpenRing. Brings a descriptor of the ring that can be mapped for writing."""

    fds: One = 1


class OpenRing(AttachmentRequest, frozen=True):
    """Asks to write payloads into the ring in place. Refused if the setting write_in_place does not allow this user."""

    answered_by = WritableRing


# ---- puts and claims


class GrantsLent(Reply, frozen=True):
    """Answers AskForGrants: places that are the client's to write in. `error`: why there is none. The client pins the
    span id of a grant and then reads the slot of the index. As long as the slot has that seq and span id, the place is
    the client's until the pin ends. For a client that writes into its own inbox, the span id is 0, and the place is at
    the same offset of the inbox."""

    grants: GrantBytes = b""
    """Of each place what GRANT says."""
    error: ErrorBody | None = None

    def places(self) -> Iterator[tuple[int, ...]]:
        """Of each place the fields of GRANT. Raises struct.error if the bytes are no whole places."""
        return GRANT.iter_unpack(self.grants)


class PutRefused(Answer, frozen=True):
    """The put with this record was not stored. `error`: None if the key was stored already."""

    number: Count
    error: ErrorBody | None = None


class Settled(Answer, frozen=True):
    """The bell: the daemon has carried out the record that the client waits for, as its lane says."""


class PlacesWanted(Answer, frozen=True):
    """A request of some client has no room beside lent places: the client gives back those it does not use."""


class AskForGrants(StoreRequest, Question, frozen=True):
    """Asks for places of `sizes` bytes each (of spans, headers included), the most urgent one first. Answered once,
    with as many as can be lent now, but only after the first can be lent or is refused. `returned`: as `ReturnGrants`.
    `ahead`: no put waits for the places; then there are none if the client has enough unused ones."""

    answered_by = GrantsLent
    pushes = (PutRefused, Settled, PlacesWanted)
    sizes: Sizes
    returned: Numbers = msgspec.field(default_factory=list)
    ahead: bool = False


class ReturnGrants(StoreRequest, frozen=True):
    """Gives grants back in which nothing more is written. The records of all that was written there are in the queue.
    No answer."""

    grants: Numbers


class Doorbell(StoreRequest, frozen=True):
    """Records were added while the daemon slept. No answer."""


class Claimed(Reply, frozen=True):
    """Answers RequestClaim. After `wait` another Claimed with this id follows. `alone`: compute without a claim.
    `lasts_s`: with `compute`, the time until the claim has to be renewed. With `wait`, the time in which the holder
    expects to have stored the payload; 0 if the holder did not say."""

    answer: Literal["hit", "compute", "wait", "alone"]
    token: Annotated[int, Meta(ge=0, le=NUMBER_MAX)] = 0
    lasts_s: SecondsOrNone = 0.0


class RequestClaim(StoreRequest, Question, frozen=True):
    """Asks for the entry or for the claim on its key. `within_s`: the time in which the client expects to have stored
    the entry if it gets the claim; 0 if not known."""

    answered_by = Claimed
    key: Key
    within_s: SecondsOrNone = 0.0


class Renew(StoreRequest, frozen=True):
    """Renews claims. No answer. Tokens of claims that have ended are ignored."""

    tokens: Tokens


class Abandon(StoreRequest, frozen=True):
    """Gives a claim up. No answer. The claim is handed over to the first waiting client, at most once. `error`: why the
    value cannot be stored, by any client. Then all waiting clients compute, and for a minute nobody gets a claim."""

    token: Token
    error: ErrorBody | None = None


class FetchRun(StoreRequest, Question, frozen=True):
    """Has a daemon whose Welcome says `remote` read entries into the ring. The answer counts the keys, from the first
    one on, whose entries are in the ring then. It comes at once if asking the store is not worth it. `keys`: of one
    namespace and generation, an entry's parent before it. `within_s`: the time that computing the entries would take;
    0 if not known."""

    answered_by = Counted
    keys: Keys
    within_s: SecondsOrNone = 0.0


# ---- entries


class Evict(StoreRequest, Question, frozen=True):
    """Evicts entries. The answer counts the entries that were stored."""

    answered_by = Counted
    needs_lane = False
    keys: Keys


class Touch(StoreRequest, Question, frozen=True):
    """Renews the recency and the time to live of entries. The answer counts the entries that are stored."""

    answered_by = Counted
    needs_lane = False
    keys: Keys


class Clear(StoreRequest, Question, frozen=True):
    """Evicts all entries of a namespace; without one, all entries."""

    answered_by = Counted
    needs_lane = False
    namespace: NamespaceTag | None = None


class Generation(Reply, frozen=True):
    """Answers Invalidate: the namespace's generation now, and the number of entries dropped."""

    generation: Count
    dropped: Count


class Invalidate(StoreRequest, Question, frozen=True):
    """Raises a namespace's generation to `generation` + 1 and drops the namespace's entries. Does neither if the
    namespace's generation is above `generation` already."""

    answered_by = Generation
    needs_lane = False
    namespace: NamespaceTag
    generation: Count


class Pinned(Reply, frozen=True):
    """Answers Pin. `lasts_s`: how long the pin lasts; 0 if the key has no entry."""

    lasts_s: SecondsOrNone


class Pin(StoreRequest, Question, frozen=True):
    """Pins an entry for `for_s` at most."""

    answered_by = Pinned
    key: Key
    for_s: Seconds


class Unpin(StoreRequest, Question, frozen=True):
    """Ends a Pin."""

    answered_by = Done
    key: Key


class Limited(Reply, frozen=True):
    """Answers Limit: the store's byte budget before and after."""

    before_bytes: Bytes
    after_bytes: Bytes


class Limit(StoreRequest, Question, frozen=True):
    """Sets the byte budget of the running store."""

    answered_by = Limited
    needs_lane = False
    limit_bytes: SomeBytes


# ---- sequences and agents


class Matched(Reply, frozen=True):
    """Answers MatchPrefix: the first `offset` tokens are cached. `blocks`: the blocks with these tokens, in order; the
    last one may have more tokens. `snapshot`: the one at exactly that offset. Nothing is pinned: if a block is evicted
    before the client looks it up, the match is shorter."""

    offset: Count
    blocks: Blocks
    snapshot: Key | None = None


class MatchPrefix(PrefixRequest, frozen=True):
    """Asks for the longest cached prefix of a sequence. The query is a packed `shm.payloads.prefix.PrefixRecord` of
    `query_bytes`: all tokens, with the identities of media folded in, and all media. It is at `inbox_offset` of the
    inbox, until the answer has come."""

    answered_by = Matched
    namespace: NamespaceTag
    inbox_offset: Bytes
    query_bytes: PrefixBytes
    agent: Name = ""


class NameAgent(StoreRequest, frozen=True):
    """The name of an agent that records name by `agent_number` of it (shm/lanes/records). Once a connection and name;
    its order among records does not matter. No answer."""

    agent: Name


class AgentTurn(StoreRequest, Question, frozen=True):
    """Says when an agent runs. "began": a turn of it begins. "tool_call": its model call ended in a tool call, and it
    continues with the result. "turn_ended": it continues after the next input. "finished": it never runs again."""

    answered_by = Done
    needs_lane = False
    agent: Name
    state: Literal["began", "tool_call", "turn_ended", "finished"]
