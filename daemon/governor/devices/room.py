"""Makes room for a registration: checks a device's budgets and chooses the entries that must go.

Owns the checks of max_bytes and max_entries, the floor as a limit on what may go, and the refusals. Does
not own orders.

Invariant: nothing here changes a device. A refusal is found after at most two looks at each entry.
"""

from __future__ import annotations

from ....errors import BelowFloor, DeviceFull
from ....ipc.messages import control as messages
from ..forms.limits import GovernorLimits
from ..reservations.queue import FreeRoom
from .circumstances import Circumstances, calm_bytes
from .record import DeviceRecord, HeldEntry, Sums


def victims(
    device: DeviceRecord,
    message: messages.RegisterEntry,
    circumstances: Circumstances,
    limits: GovernorLimits,
    now: float,
) -> list[HeldEntry]:
    """The entries to order away so that one fits, least recently used first.

    Raises:
        DeviceFull: evicting every entry that may go would not make room; the text names the budget.
        BelowFloor: it would, but the rest would be below the queueing floor.
    """
    _check_alone(message, limits)
    after = device.held.minus(device.ordered).plus(Sums(1, message.size_bytes, message.tokens))
    needs = lacking(after, limits)
    if max(needs) <= 0:
        return []
    floor_bytes = circumstances.floor_blocks * limits.block_bytes
    capacity = limits.capacity_blocks(circumstances.total_bytes)
    if floor_bytes and circumstances.floor_blocks >= capacity:
        raise BelowFloor(
            f"{device.name}: {_exceeded(after, limits)}, and no entry may be evicted: the queueing floor is "
            f"{circumstances.floor_blocks} blocks of {limits.block_bytes} bytes and the capacity {capacity}; "
            "serve fewer requests at once, or raise max_bytes"
        )
    found = _coldest(device, needs, after.bytes - floor_bytes, now)
    if found is not None:
        return found
    if floor_bytes and _coldest(device, needs, after.bytes, now) is not None:
        raise BelowFloor(
            f"{device.name}: {_exceeded(after, limits)}, and only {max(0, after.bytes - floor_bytes)} bytes are above "
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
    left_bytes = calm_bytes(circumstances, limits) - coming_bytes
    if device is None:
        return FreeRoom(total_bytes, free_bytes, left_bytes)
    cached = device.held.bytes, device.pinned_bytes(now), device.going_bytes(now), device.silent_bytes(now)
    return FreeRoom(total_bytes, free_bytes, left_bytes, *cached)


def has_room(device: DeviceRecord, more: Sums, limits: GovernorLimits) -> bool:
    """Whether these amounts fit every budget without an eviction."""
    return max(lacking(device.held.minus(device.ordered).plus(more), limits)) <= 0


def lacking(after: Sums, limits: GovernorLimits) -> Sums:
    """By how much each budget would be exceeded; 0 or less: not at all."""
    return Sums(
        after.entries - limits.max_entries,
        0 if limits.max_bytes is None else after.bytes - limits.max_bytes,
    )


def _coldest(device: DeviceRecord, needs: Sums, spare_bytes: int, now: float) -> list[HeldEntry] | None:
    """The least recently used entries that meet every need and are at most `spare_bytes` together; None if there are
    none. One that exceeds these bytes is passed over."""
    found: list[HeldEntry] = []
    for each in device.may_go(now):
        if each.size_bytes > spare_bytes:
            continue
        found.append(each)
        needs = needs.minus(each.sums)
        spare_bytes -= each.size_bytes
        if max(needs) <= 0:
            return found
    return None


def _check_alone(message: messages.RegisterEntry, limits: GovernorLimits) -> None:
    """Refuses an entry that would not fit even alone."""
    if limits.max_bytes is not None and message.size_bytes > limits.max_bytes:
        raise DeviceFull(f"size_bytes = {message.size_bytes} alone is over max_bytes = {limits.max_bytes}: raise it")


def _exceeded(after: Sums, limits: GovernorLimits) -> str:
    """The budgets that would be exceeded, in words."""
    passed = [
        f"{name} = {most} would be exceeded ({would_be} with this entry)"
        for name, most, would_be in (
            ("max_bytes", limits.max_bytes, after.bytes),
            ("max_entries", limits.max_entries, after.entries),
        )
        if most is not None and would_be > most
    ]
    return ", ".join(passed)
