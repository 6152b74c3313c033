"""Makes room for a registration: checks a device's budgets and chooses the entries that must go.

Owns the checks of max_bytes, max_tokens and max_entries, the floor as a limit on what may go, and the refusals. Does
not own orders.

Invariant: nothing here changes a table. A refusal is found after at most one look at each row.
"""

from __future__ import annotations

import numpy as np

from ....errors import BelowFloor, DeviceFull
from ....ipc.messages import control as messages
from ..forms.limits import GovernorLimits
from ..reservations.queue import FreeRoom
from . import passes, ranking
from .passes import Circumstances
from .ranking import Amounts
from .record import DeviceRecord
from .table import ORDERED, Rows


def victims(
    device: DeviceRecord,
    row: int | None,
    message: messages.RegisterEntry,
    circumstances: Circumstances,
    limits: GovernorLimits,
    now: float,
) -> Rows:
    """The rows to order away so that an entry fits, least recently used first. `row`: the entry's present row, if any.

    Raises:
        DeviceFull: evicting every entry that may go would not make room; the text names the budget.
        BelowFloor: it would, but the rest would be below the queueing floor.
    """
    _check_alone(message, limits)
    table = device.table
    nothing = np.zeros(0, np.int64)
    if row is not None and table.state[row] == ORDERED:
        return nothing  # ordered away already, whatever its size
    known_bytes, known_tokens = (0, 0) if row is None else (int(table.size_bytes[row]), int(table.tokens[row]))
    after_bytes = table.bytes - table.ordered_bytes - known_bytes + message.size_bytes
    after = Amounts(
        after_bytes,
        table.all_tokens - table.ordered_tokens - known_tokens + message.tokens,
        len(table) - table.ordered_entries + (row is None),
    )
    needs = lacking(after, limits)
    if not needs:
        return nothing
    floor_bytes = circumstances.floor_blocks * limits.block_bytes
    capacity = limits.capacity_blocks(circumstances.total_bytes)
    if floor_bytes and circumstances.floor_blocks >= capacity:
        raise BelowFloor(
            f"{device.name}: {_exceeded(after, limits)}, and no entry may be evicted: the queueing floor is "
            f"{circumstances.floor_blocks} blocks of {limits.block_bytes} bytes and the capacity {capacity}; "
            "serve fewer requests at once, or raise max_bytes"
        )
    found = _find_victims(device, row, needs, after_bytes - floor_bytes, now)
    if found is not None:
        return found
    if floor_bytes and _find_victims(device, row, needs, after_bytes, now) is not None:
        raise BelowFloor(
            f"{device.name}: {_exceeded(after, limits)}, and only {max(0, after_bytes - floor_bytes)} bytes are above "
            f"the queueing floor of {floor_bytes}, of a capacity of {capacity} blocks of {limits.block_bytes} bytes; "
            "serve fewer requests at once, or raise max_bytes"
        )
    raise DeviceFull(
        f"{device.name}: {_exceeded(after, limits)}, and the evictable entries do not suffice: release entries, "
        "raise the budget, or wait until owners have carried out their orders"
    )


def room(
    device: DeviceRecord | None, circumstances: Circumstances, coming_bytes: int, limits: GovernorLimits, now: float
) -> FreeRoom:
    """A device's memory, for a reservation. `coming_bytes`: of promotions under way."""
    total_bytes, free_bytes = circumstances.total_bytes, circumstances.total_bytes - circumstances.used_bytes
    calm_bytes = passes.calm_bytes(circumstances, limits) - coming_bytes
    if device is None:
        return FreeRoom(total_bytes, free_bytes, calm_bytes)
    cached = device.table.bytes, device.pinned_bytes(now), device.going_bytes(now), device.silent_bytes(now)
    return FreeRoom(total_bytes, free_bytes, calm_bytes, *cached)


def has_room(device: DeviceRecord, more: Amounts, limits: GovernorLimits) -> bool:
    """Whether these amounts fit every budget without an eviction."""
    table = device.table
    after = Amounts(
        table.bytes - table.ordered_bytes + more.bytes,
        table.all_tokens - table.ordered_tokens + more.tokens,
        len(table) - table.ordered_entries + more.entries,
    )
    return not lacking(after, limits)


def lacking(after: Amounts, limits: GovernorLimits) -> Amounts:
    """By how much each budget would be exceeded."""
    return Amounts(
        0 if limits.max_bytes is None else max(0, after.bytes - limits.max_bytes),
        0 if limits.max_tokens is None else max(0, after.tokens - limits.max_tokens),
        max(0, after.entries - limits.max_entries),
    )


def _find_victims(device: DeviceRecord, row: int | None, needs: Amounts, spare_bytes: int, now: float) -> Rows | None:
    if spare_bytes < needs.bytes:
        return None
    table = device.table
    for rows in device.coldest.ahead(device, now):
        others = rows if row is None else rows[rows != row]
        found = ranking.enough(table.size_bytes[others], table.tokens[others], needs, spare_bytes)
        if found is not None:
            return others[found]
    return None


def _check_alone(message: messages.RegisterEntry, limits: GovernorLimits) -> None:
    """Refuses an entry that would not fit even alone."""
    if limits.max_bytes is not None and message.size_bytes > limits.max_bytes:
        raise DeviceFull(f"size_bytes = {message.size_bytes} alone is over max_bytes = {limits.max_bytes}: raise it")
    if limits.max_tokens is not None and message.tokens > limits.max_tokens:
        raise DeviceFull(f"tokens = {message.tokens} alone is over max_tokens = {limits.max_tokens}: raise it")


def _exceeded(after: Amounts, limits: GovernorLimits) -> str:
    """The budgets that would be exceeded, in words."""
    passed = [
        f"{name} = {most} would be exceeded ({would_be} with this entry)"
        for name, most, would_be in (
            ("max_bytes", limits.max_bytes, after.bytes),
            ("max_tokens", limits.max_tokens, after.tokens),
            ("max_entries", limits.max_entries, after.entries),
        )
        if most is not None and would_be > most
    ]
    return ", ".join(passed)
