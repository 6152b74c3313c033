"""The refusals of puts: each check returns the error to send, or None.

Pure functions of one put. Owns the texts. Does not own the order of the checks (`intake`). Invariant: each text names
the value, the limit and what to do.
"""

from __future__ import annotations

from ...errors import (
    BadMessage,
    BadPrefix,
    LimitReached,
    ObjectTooLarge,
    ParentGone,
    StoreFull,
    TensordError,
    TimedOut,
    UnderPressure,
)
from ...ipc import messages
from ...ipc.schema import SPAN_S
from ...shm.layout import NAMESPACE_TAG_BYTES, aligned, span_bytes
from ...shm.prefix import HEADER_BYTES, RECORD_BYTES_MAX
from .arrivals import Arrivals
from .budget import RingBudget
from .entries import SpanEntry
from .limits import StoreLimits
from .need import Need
from .residency import Residency
from .span_table import SpanTable


def unfit(commit: messages.Commit, limits: StoreLimits, budget: RingBudget, ring_bytes: int) -> TensordError | None:
    """The refusal of a put that does not fit even an empty store; None if it fits. `ring_bytes`: the final size of the
    ring."""
    if commit.tree_bytes > commit.payload_bytes:
        return BadMessage(
            f"tree_bytes = {commit.tree_bytes} is more than payload_bytes = {commit.payload_bytes}, "
            "although the tree is a part of the payload"
        )
    if commit.payload_bytes > limits.object_bytes_max:
        return ObjectTooLarge(
            f"{commit.payload_bytes} bytes, and object_bytes_max is {limits.object_bytes_max}: "
            "store it in smaller parts, or raise object_bytes_max"
        )
    size = span_bytes(commit.payload_bytes)
    for name, most in (("ring_bytes", ring_bytes), ("max_bytes", budget.max_bytes)):
        if size > most:
            return ObjectTooLarge(
                f"{commit.payload_bytes} bytes take {size} in the ring, and {name} is {most}: "
                f"store it in smaller parts, or raise {name}"
            )
    if budget.max_tokens is not None and commit.tokens > budget.max_tokens:
        return LimitReached(
            f"{commit.tokens} tokens, and max_tokens is {budget.max_tokens} for the whole store: "
            "store it in smaller parts, or raise max_tokens"
        )
    return None


def unfit_block(commit: messages.Commit) -> TensordError | None:
    """The refusal of a Commit whose parent or record cannot be those of its entry; None if they can."""
    if commit.parent is not None and commit.parent[:NAMESPACE_TAG_BYTES] != commit.key[:NAMESPACE_TAG_BYTES]:
        return BadPrefix("parent names an entry of another namespace: name one whose key begins with the same 8 bytes")
    if commit.parent == commit.key:
        return BadPrefix(f"parent is the key {commit.key.hex()[:16]}… itself: name the entry before it, or none")
    if commit.prefix_bytes == 0:
        return None
    end_bytes = aligned(commit.tree_bytes) + commit.prefix_bytes
    if not HEADER_BYTES <= commit.prefix_bytes <= RECORD_BYTES_MAX or end_bytes > commit.payload_bytes:
        return BadPrefix(
            f"prefix_bytes = {commit.prefix_bytes}: a record has {HEADER_BYTES} to {RECORD_BYTES_MAX} bytes, within "
            f"the payload of {commit.payload_bytes} bytes, in which it begins at byte {aligned(commit.tree_bytes)}"
        )
    return None


def under_pressure(why: str) -> UnderPressure:
    """The refusal of a put while memory is short."""
    return UnderPressure(f"puts are refused while memory is short: {why}. Compute without storing it")


def too_far(end: int, limits: StoreLimits) -> TensordError | None:
    """The refusal of a block that ends at token `end`, beyond the longest allowed query; None if it does not."""
    if end <= limits.prefix_tokens_max:
        return None
    return LimitReached(
        f"a block of a sequence ends at token {end}, and prefix_tokens_max is {limits.prefix_tokens_max}: store fewer "
        "tokens of the sequence, or raise prefix_tokens_max"
    )


def parent_gone(parent_key: bytes) -> ParentGone:
    """The refusal of a put whose parent is not stored."""
    return ParentGone(f"the parent {parent_key.hex()[:16]}… is not stored: put the sequence again from there")


def crowded(in_flight: int, limits: StoreLimits) -> TensordError | None:
    """The refusal of a client that has as many puts in flight as it may; None if it has fewer."""
    if in_flight < limits.commits_in_flight_max:
        return None
    return LimitReached(
        f"{in_flight} puts of this client are in flight, and commits_in_flight_max is "
        f"{limits.commits_in_flight_max}: wait for their answers, or raise it"
    )


def announces_too_much(uid: int, missing_bytes: int, arrivals: Arrivals, limits: StoreLimits) -> LimitReached:
    """The refusal of a put that was held because of bytes announced by its client or uid, none of which came."""
    return LimitReached(
        f"{missing_bytes} bytes are missing, besides {arrivals.by_uid().get(uid, 0)} that uid {uid} has announced "
        f"and not sent: quotas.announced_bytes_max is {limits.announced_bytes_max} for a client, and "
        f"quotas.announced_share_max is {limits.announced_uid_bytes_max} bytes for a uid. Put fewer large payloads at "
        "once, or raise these limits"
    )


def wrong_part(commit: messages.Commit, received_bytes: int, part: messages.Part) -> BadMessage:
    """The refusal of parts whose bytes do not add up to the payload."""
    return BadMessage(
        f"parts of {received_bytes} bytes, last={part.last}, for a payload_bytes of "
        f"{commit.payload_bytes}: the part that ends the payload must be the last one, and no other part"
    )


def too_many_parts(outstanding: int, limits: StoreLimits) -> LimitReached:
    """The refusal of a put with more parts waiting for the copier than allowed."""
    return LimitReached(
        f"{outstanding} parts of one put are not copied yet, and {limits.parts_in_flight_max} may wait (a fixed "
        "limit): send larger parts, or wait for PartCopied"
    )


def overdue(received_bytes: int, commit: messages.Commit, limits: StoreLimits) -> TimedOut:
    """The refusal of a put whose sender stopped sending."""
    return TimedOut(
        f"{received_bytes} of {commit.payload_bytes} bytes arrived, and none for put_idle_s = "
        f"{limits.put_idle_s:g}: put again"
    )


def unwritten(commit: messages.Commit, span: SpanEntry | None) -> TensordError | None:
    """The refusal of a Commit whose payload is not in `span`, the span that it names; None if it is, or names none."""
    if commit.span is None:
        return None
    if commit.at is not None:
        return BadMessage("a Commit names both a span and an offset in the inbox: the payload is in one of them")
    if span is None:
        return TimedOut(
            f"the client does not have the span that it wrote {commit.payload_bytes} bytes into: the daemon takes a "
            f"span back after {SPAN_S:g} s, and frees it unless it is pinned. Put again"
        )
    if commit.checksum is None or commit.payload_bytes > span.payload_bytes:
        return BadMessage(
            f"a Commit of a span of {span.payload_bytes} bytes names a payload of {commit.payload_bytes}, checksum "
            f"{commit.checksum!r}: it needs a checksum, and no more bytes than the span has"
        )
    return None


def not_worth_it(need: Need) -> StoreFull:
    """The refusal of a put because the policy prefers to keep the entries that would be evicted for it."""
    return StoreFull(
        f"no room for {need.span_bytes} bytes: the entries to evict are likely to be used more than the rest of a "
        "sequence this long. The sequence's beginning is stored; raise ring_bytes to store more"
    )


def over_share(need: Need, memory: SpanTable) -> StoreFull:
    """The refusal of a put of a uid over its share, if no evictable entry of the uids over their shares makes room."""
    holdings, budget = memory.spans.holdings, memory.budget
    holding = holdings.of(need.uid)
    return StoreFull(
        f"no room for {need.span_bytes} bytes of uid {need.uid}, which has {holding.size_bytes} bytes in "
        f"{holding.entries} entries: {holdings.rivals(need.uid)} uids share max_bytes = {budget.max_bytes} and "
        f"max_entries = {budget.max_entries} equally, and entries over the shares are pinned, or not adjacent. "
        "Release leases, or evict entries of this uid"
    )


def no_room(
    need: Need, obstacle: str | None, memory: SpanTable, unevictable_bytes: int, residency: Residency
) -> StoreFull | UnderPressure:
    """The refusal of a put for which no evictable entry makes room. `obstacle`: the limit or resource that Room
    found."""
    ring = memory.ring
    short = residency.pressure_bytes_max
    if obstacle == "resident_bytes_max" and short is not None and short < memory.budget.max_bytes:
        return UnderPressure(
            f"no room for {need.span_bytes} bytes: host memory is under pressure, and the ring may keep {short} bytes "
            f"of its {ring.capacity_bytes} in memory now; {unevictable_bytes} bytes are pinned or in flight. Compute "
            "without storing, or put again after the pressure has ended"
        )
    if ring.withdrawn_bytes and residency.error:
        obstacle = f"{ring.withdrawn_bytes} bytes of the ring could not be allocated again: {residency.error}"
    return StoreFull(
        f"no room for {need.span_bytes} bytes and {need.tokens} tokens "
        f"({obstacle or 'the pins changed meanwhile'}): largest_free_bytes is {ring.largest_free_bytes} of "
        f"{ring.capacity_bytes}, and {unevictable_bytes} bytes are pinned or in flight. Release leases "
        "(`tensorctl clients` shows who holds them) and put again, or raise ring_bytes"
    )
