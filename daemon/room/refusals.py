"""The refusals of places for want of room, and of records: each function returns the error to send.

Owns: the texts. Does not own: the order of the checks (`lending`, and `Commits`). Invariant: each text names the value,
the limit and what to do.
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
    UnderPressure,
)
from ...shm.index.keys import shortened
from ...shm.ring.layout import SPAN_HEADER_BYTES, TREE_BYTES_MAX, span_bytes
from ..forms.limits import RingBudget, StoreLimits
from ..store import commit


def unfit(size: int, limits: StoreLimits, budget: RingBudget, ring_bytes: int) -> TensordError | None:
    """The refusal of a place of `size` bytes that an empty store has no room for; None if it has. `ring_bytes`: the
    final size of the ring."""
    payload_bytes = size - SPAN_HEADER_BYTES
    if size > span_bytes(limits.object_bytes_max):
        return ObjectTooLarge(
            f"{payload_bytes} bytes, and object_bytes_max is {limits.object_bytes_max}: "
            "store it in smaller parts, or raise object_bytes_max"
        )
    for name, most in (("ring_bytes", ring_bytes), ("max_bytes", budget.max_bytes)):
        if size > most:
            return ObjectTooLarge(
                f"{payload_bytes} bytes take {size} in the ring, and {name} is {most}: "
                f"store it in smaller parts, or raise {name}"
            )
    return None


def over_share(size: int, uid: int, holding: tuple[int, int], rivals: int, budget: RingBudget) -> StoreFull:
    """The refusal of a uid over its share, if no evictable entry of the uids over their shares makes room. `holding`:
    the uid's bytes and entries."""
    return StoreFull(
        f"no room for {size} bytes of uid {uid}, which has {holding[0]} bytes in {holding[1]} entries: {rivals} uids "
        f"share max_bytes = {budget.max_bytes} and max_entries = {budget.max_entries} equally, and entries over the "
        "shares are pinned, or not adjacent. Release leases, or evict entries of this uid"
    )


def no_room(
    size: int, obstacle: str | None, kept_bytes: int, largest_bytes: int, ring_bytes: int, budget: RingBudget
) -> StoreFull | UnderPressure:
    """The refusal of a place for which no evictable entry makes room. `obstacle`: the limit or resource that is in the
    way; `kept_bytes`: what is not evictable; `largest_bytes`: of the largest hole."""
    short = budget.resident_bytes_max
    if obstacle == "resident_bytes_max" and short is not None and short < budget.max_bytes:
        return UnderPressure(
            f"no room for {size} bytes: host memory is under pressure, and the ring may keep {short} bytes of its "
            f"{ring_bytes} in memory now; {kept_bytes} bytes are pinned or lent. Compute without storing, or put again "
            "after the pressure has ended"
        )
    limits = {"max_entries": budget.max_entries, "max_tokens": budget.max_tokens, "max_bytes": budget.max_bytes}
    if obstacle == "max_bytes" and budget.max_bytes >= ring_bytes:
        obstacle = "ring"
    why = f"{obstacle} is {limits[obstacle]}" if obstacle in limits else obstacle or "the pins changed meanwhile"
    return StoreFull(
        f"no room for {size} bytes ({why}): largest_free_bytes is {largest_bytes} of {ring_bytes}, and {kept_bytes} "
        "bytes are pinned or lent. Release leases (`tensorctl clients` shows who holds them) and put again, or raise "
        f"{obstacle if obstacle in limits else 'ring_bytes'}"
    )


def of_record(reason: int, key: bytes, tokens: int, limits: StoreLimits) -> TensordError:
    """The refusal of a record, for a reason of `Commits`. Not for PAST and BAD_BLOCK, whose errors the generations and
    the index of sequences have."""
    name = shortened(key)
    match reason:
        case commit.NOT_LENT:
            return BadMessage(
                f"the put of {name} names bytes of the ring that are not lent to its client: it writes where "
                "GrantsLent says, and a place that it gave back is not its own any more"
            )
        case commit.BAD_TREE:
            return BadMessage(
                f"the put of {name} has a tree header of no bytes, of more than {TREE_BYTES_MAX}, or of more than its "
                "payload"
            )
        case commit.NO_PARENT:
            return ParentGone(f"the parent of {name} is not stored: put the sequence again from there")
        case commit.BAD_PARENT:
            return BadPrefix(
                f"the parent of {name} is that key itself, or of another namespace: name an entry whose key begins "
                "with the same 8 bytes, or none"
            )
        case commit.NO_SLOT:
            return StoreFull(f"no room for {name} (index bucket): put it again later, or raise max_entries")
        case commit.TOO_MANY_TOKENS:
            return LimitReached(
                f"the put of {name} has {tokens} tokens, and max_tokens of the whole store is {limits.max_tokens}: "
                "store it in smaller parts, or raise max_tokens"
            )
        case commit.NOT_WORTH_IT:
            return StoreFull(
                "the entries to evict are likely to be used more than the rest of a sequence this long. The "
                "sequence's beginning is stored; raise ring_bytes to store more"
            )
    raise AssertionError(f"reason {reason}")
