"""The store's events. `Store.handle(event, now)` takes one at a time. Owns their fields only.

Invariants, which the actor guarantees: ClientJoined comes before any other event of a client, ClientLeft last, and a
client number is never used twice. The Received events of a client come in the order of sending. Each effect is answered
once: a Drain by Drained, a Scan by Scanned, a Move by Moved, a Punch by Punched, an Allocate by Allocated, a request of
the remote store by RemoteDone.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ...errors import TensordError
from ...ipc.messages import control as messages
from ...shm.payloads.prefix import PrefixRecord, Tokens
from .limits import StoreLimits

AGENTS_MAX: Final = 1024
"""Agents in one AgentsTurned, so that the event stays short."""


class ClientJoined(Struct, frozen=True):
    """A client has connected and may send requests."""

    client: int
    uid: int


class ClientLeft(Struct, frozen=True):
    """A client's connection has ended, and all records that it had added are carried out."""

    client: int


class Received(Struct, frozen=True):
    """A validated request of a client. `counted`: the entries counted so far, if this is the rest of a request, which
    the core returned as an effect."""

    client: int
    message: messages.StoreRequest | messages.PrefixRequest
    counted: int = 0


class WritesInPlace(Struct, frozen=True):
    """The client writes payloads into the ring itself, from now on. Without it, its payloads come through its inbox."""

    client: int


class RemoteEntry(Struct, frozen=True):
    """An entry of the remote store, as the header of its object has it. `tokens`, `cost_ms`: 0 if unknown.
    `prefix_bytes`: the length of the record of a block of a sequence; 0 for another entry. `lives_s`: the seconds until
    the entry expires. `parent`: the key of its parent. `checksum`: xxh3-64 of the payload."""

    payload_bytes: int
    tree_bytes: int
    tokens: int = 0
    cost_ms: float = 0.0
    prefix_bytes: int = 0
    lives_s: float | None = None
    parent: bytes | None = None
    checksum: int = 0


class Sought(Struct, frozen=True):
    """What a remote store says of keys. `generation`: the store's of their namespace. `found`: the objects of the first
    keys, up to the first key that the store does not have. `answer_s`: how long the store took to answer. `claimed`:
    this host has the claim on the key now. `others_s`: since when another host has it; None if none has."""

    generation: int
    found: tuple[RemoteEntry, ...] = ()
    answer_s: float = 0.0
    claimed: bool = False
    others_s: float | None = None


class RemoteSaved(Struct, frozen=True):
    """An entry is in the remote store. `written`: False if it was there already, or if the store's `generation` of its
    namespace is another one."""

    generation: int
    written: bool = True


class RemoteDone(Struct, frozen=True):
    """A request of the remote store was carried out, with the answer that the request names, or it failed with
    `error`."""

    request: Any
    answer: Any = None
    error: TensordError | None = None


class PrefixAsked(Struct, frozen=True):
    """A client asks for the longest cached prefix. `record`: the query, copied from the client's inbox; `folded`: its
    tokens, (record.count,) uint32. Answered by Matched, or Error."""

    client: int
    message: messages.MatchPrefix
    record: PrefixRecord
    folded: Tokens


class Scanned(Struct, frozen=True):
    """A Scan was carried out. `pinned`: every span id found in any lane after the fence."""

    pinned: AbstractSet[int]


class Moved(Struct, frozen=True):
    """A Move was carried out, or failed with `error`."""

    number: int
    error: TensordError | None = None


class Drained(Struct, frozen=True):
    """All reads before a Drain were delivered as Accessed."""


class Accessed(Struct, frozen=True):
    """The content of a lane's access log and counters since they were last read. Unknown ids are ignored. `misses`:
    lookups that found nothing. `lost`: further hits whose records were overwritten or left out."""

    span_ids: Sequence[int] | npt.NDArray[np.uint64]
    misses: int = 0
    lost: int = 0


class HoldersCounted(Struct, frozen=True):
    """The number of clients that hold each of these spans now. Unknown ids are ignored."""

    span_ids: npt.NDArray[np.uint64]
    holders: npt.NDArray[np.uint32]


class RingGrown(Struct, frozen=True):
    """The ring's first `ring_bytes` may be used now; `more`: the ring is still growing. `why`: why it stays smaller."""

    ring_bytes: int
    more: bool = True
    why: str = ""


class Pressed(Struct, frozen=True):
    """The limits that the governor sets for the store from now on, answered with HostHolds. With the defaults there is
    no pressure. `resident_bytes_max`: the ring may keep this number of bytes in memory; None: all. `refuse`: puts are
    refused, for the `reason`."""

    resident_bytes_max: int | None = None
    refuse: bool = False
    reason: str = ""


class Punched(Struct, frozen=True):
    """A Punch was carried out: the system has the pages at `offset`."""

    offset: int


class Allocated(Struct, frozen=True):
    """An Allocate was carried out, or failed with `error`, which leaves the pages at `offset` as they were."""

    offset: int
    error: TensordError | None = None


class LimitsChanged(Struct, frozen=True):
    """The configuration was reloaded. `ring_bytes` does not change. Entries over a lowered budget are evicted; claims,
    pins and puts over a lowered limit stay, and no more are accepted."""

    limits: StoreLimits


class FoundCorrupt(Struct, frozen=True):
    """The span's payload does not match its checksum: its entry ends. Does nothing if the entry has ended already."""

    span_id: int


class Tick(Struct, frozen=True):
    """Time has passed, or the store asked to continue (`next_timer`)."""


class AgentsTurned(Struct, frozen=True):
    """Step graphs have changed. Agents of `finished` have no step left in any of them, agents of `awaited` have one."""

    finished: Sequence[str] = ()
    awaited: Sequence[str] = ()


ClientEvent = ClientJoined | ClientLeft | WritesInPlace | Received | PrefixAsked
MemoryEvent = Moved | Scanned | Drained | Accessed | HoldersCounted | RingGrown | Punched | Allocated | FoundCorrupt
Event = ClientEvent | MemoryEvent | RemoteDone | Pressed | AgentsTurned | LimitsChanged | Tick
