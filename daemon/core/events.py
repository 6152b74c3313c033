"""What can happen to the store. `Store.handle(event, now)` takes one at a time, with the time as argument.

The actor that feeds them promises:
- ClientJoined comes before anything else of a client, ClientLeft last; client numbers are not used again.
- Of a client's Received events, the order is that in which they were sent.
- Each Copy effect is answered by one Copied; those of one client in the order of its Copy effects.
- Each Drain effect is answered by one Drained, each Scan by one Scanned, each Punch by one Punched, each Allocate by
  one Allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from msgspec import Struct

from ...errors import TensordError
from ...ipc import messages
from ...shm.prefix import PrefixRecord, Tokens
from .host_memory import Pressed
from .limits import StoreLimits


class ClientJoined(Struct, frozen=True):
    """A client that may send requests from now on."""

    client: int
    uid: int
    name: str


class ClientLeft(Struct, frozen=True):
    """Its connection is gone. Answered by Forget once nothing of its inbox is needed any more."""

    client: int


class Received(Struct, frozen=True):
    """A validated request of a client. `counted`: of a rest that comes `Again`, what was counted before."""

    client: int
    message: messages.StoreRequest
    counted: int = 0


class Copied(Struct, frozen=True):
    """A Copy effect was carried out, or failed with `error`.

    `checksum` is given with the last part only: xxh3-64 of the payload in the ring, whose tree was found valid and
    whose header was written. With it `record`, of a put that said that it is one: its record, as it stands in the ring.
    """

    client: int
    put_id: int
    checksum: int | None = None
    error: TensordError | None = None
    record: PrefixRecord | None = None


class PrefixAsked(Struct, frozen=True):
    """A client asks for the longest cached prefix. `record`: the query, as it was found in the client's inbox, and
    copied from there; `folded`: its tokens, (record.count,) uint32. Answered by Matched, or Error.
    """

    client: int
    message: messages.MatchPrefix
    record: PrefixRecord
    folded: Tokens


class Scanned(Struct, frozen=True):
    """A Scan effect was carried out: every span id found in any lane, after the fence."""

    pinned: AbstractSet[int]


class Moved(Struct, frozen=True):
    """A Move effect was carried out, or failed with `error`."""

    number: int
    error: TensordError | None = None


class Drained(Struct, frozen=True):
    """A Drain effect was carried out: what was read before it is told."""


class Accessed(Struct, frozen=True):
    """What a lane's access log and counters held since they were last read.

    At most 8,192 span ids an event (one lane's log), so that one event stays short. Ids that are no longer known are
    ignored. `misses` are lookups that found nothing, `lost` further hits, whose records were overwritten or left out.
    """

    span_ids: Sequence[int]
    misses: int = 0
    lost: int = 0


class HoldersCounted(Struct, frozen=True):
    """How many clients hold each of these spans now, for spans where that has changed; of any number of them, though
    one event should stay short. Ids that are no longer known are ignored.
    """

    holders: Sequence[tuple[int, int]]
    """(span id, clients)."""


class RingGrown(Struct, frozen=True):
    """The ring's first `ring_bytes` may be used now; `more` says whether it is still growing."""

    ring_bytes: int
    more: bool = True


class Punched(Struct, frozen=True):
    """A Punch effect was carried out: the pages at `offset` are the system's."""

    offset: int


class Allocated(Struct, frozen=True):
    """An Allocate effect was carried out, or failed with `error`: the pages at `offset` are as they were."""

    offset: int
    error: TensordError | None = None


class LimitsChanged(Struct, frozen=True):
    """The configuration was read again. `ring_bytes` stays what it is.

    Entries over a lowered budget are evicted; claims, pins and puts over a lowered limit stay, and no more come.
    """

    limits: StoreLimits


class FoundCorrupt(Struct, frozen=True):
    """The span's payload does not match its checksum; it is stored no more. Nothing happens if it is gone already."""

    span_id: int


class Tick(Struct, frozen=True):
    """Time has passed, or the store asked to go on (`next_timer`)."""


Event = (
    ClientJoined
    | ClientLeft
    | Received
    | Copied
    | Moved
    | PrefixAsked
    | Scanned
    | Drained
    | Accessed
    | HoldersCounted
    | RingGrown
    | Pressed
    | Punched
    | Allocated
    | LimitsChanged
    | FoundCorrupt
    | Tick
)
