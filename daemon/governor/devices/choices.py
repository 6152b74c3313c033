"""Which entries leave a device and which come back: for its mode, for waiting reservations, for a registration.

Owns how many entries are chosen and in which order, never below the queueing floor, and the refusals of a registration.

Invariant: nothing here changes a device. A refusal is found after at most two looks at each entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from ....errors import BelowFloor, DeviceFull, UnderPressure
from ....ipc.messages import control as messages
from ....ipc.messages.modes import Mode
from ..forms.limits import GovernorLimits
from ..tiers import Gauge
from ..workflows import Workflows
from .record import DeviceRecord, HeldEntry

ENTRIES_MAX: Final = 4096
"""Entries that one pass orders away. So many keep the daemon from other work for some milliseconds."""
CANDIDATES_MAX: Final = 8192
"""Entries that one pass ranks: the least recently used. The next pass ranks those that were used since."""
WAITING_RETRY_S: Final = 1.0
"""While a reservation waits, an entry that was in use is ordered again after so long, if that is less than retry_s."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The circumstances of a device by the last reading of its gauge.

    `host_accepts`: the host tier is below pressure. `reserved_bytes`: memory that the reading shows as free and that is
    promised to reservations, that they wait for, or that entries have taken since. `wanted_bytes`: what must leave for
    waiting reservations.
    """

    gauge: Gauge
    host_accepts: bool
    floor_blocks: int
    reserved_bytes: int
    wanted_bytes: int

    @property
    def mode_bytes(self) -> int:
        """How many bytes less must be used for the mode: from pressure up, until the device is under its threshold."""
        return 0 if self.gauge.mode in (Mode.RELAXED, Mode.NORMAL) else max(0, -self.gauge.calm_bytes)

    @property
    def for_reservations(self) -> bool:
        """Whether waiting reservations need more than the mode does."""
        return self.wanted_bytes > self.mode_bytes

    @property
    def lowers(self) -> bool:
        return self.gauge.calm_bytes < 0 or self.wanted_bytes > 0


def for_pass(
    device: DeviceRecord, under: Circumstances, limits: GovernorLimits, workflows: Workflows, now: float
) -> list[HeldEntry]:
    """The entries that a pass orders away now: first what the device lacks, then what is idle."""
    mode, spare_bytes = under.gauge.mode, device.staying_bytes - limits.block_bytes * under.floor_blocks
    if spare_bytes <= 0:
        return []
    vain = {owner for owner in device.owners.values() if owner.slow(now) or now < owner.vain_until}
    retry_s = max(0.0, limits.retry_s - WAITING_RETRY_S) if under.wanted_bytes else 0.0
    may_go = (entry for entry in device.may_go(now + retry_s) if entry.owner not in vain)
    entries = list(islice(may_go, CANDIDATES_MAX))
    need_bytes = max(under.mode_bytes, under.wanted_bytes) - device.going_bytes(now)
    needed: list[HeldEntry] = []
    if need_bytes > 0:
        # The product of a share and a count may lie a rounding error above a whole number.
        most = math.ceil(limits.pass_share * len(device.entries) - 1e-9)
        if under.for_reservations or mode in (Mode.WORKFLOW_AWARE, Mode.EMERGENCY):
            most = len(entries)
        if mode is Mode.WORKFLOW_AWARE:
            ranked = sorted(entries, key=lambda entry: -workflows.distance(entry.agent))
        else:
            ranked = sorted(entries, key=_worth)  # of equals the least recently used goes first
        needed, _ = _first(ranked, spare_bytes, need_bytes, most=min(most, ENTRIES_MAX))
        spare_bytes -= sum(entry.size_bytes for entry in needed)
    # Entries that are idle for so long leave whatever the device lacks.
    critical_s = limits.critical_idle_s
    idle_s = {
        Mode.RELAXED: limits.relaxed_idle_s,
        Mode.NORMAL: limits.normal_idle_s,
        Mode.CRITICAL: critical_s,
        Mode.EMERGENCY: critical_s,
    }.get(mode, math.inf)
    taken = set(needed)
    idle = [entry for entry in entries if entry.used_at <= now - idle_s and entry not in taken]
    return needed + _first(idle, spare_bytes, math.inf, most=ENTRIES_MAX - len(needed))[0]


def for_registration(
    device: DeviceRecord, message: messages.RegisterEntry, under: Circumstances, limits: GovernorLimits, now: float
) -> list[HeldEntry]:
    """The entries to order away so that one fits, least recently used first. Raises UnderPressure if the device accepts
    no new entries; DeviceFull if evicting every entry that may go would not make room; BelowFloor if it would, but the
    rest would be below the queueing floor."""
    gauge = under.gauge
    if gauge.refuses:
        beside = f" beside its baseline of {gauge.baseline_bytes} bytes" if gauge.baseline_bytes else ""
        raise UnderPressure(
            f"device {device.name} is {gauge.share:.1%} full{beside}, and emergency begins at "
            f"{limits.thresholds.emergency:.1%}: it accepts entries again when emergency ends"
        )
    if limits.max_bytes is not None and message.size_bytes > limits.max_bytes:
        raise DeviceFull(f"size_bytes = {message.size_bytes} alone is over max_bytes = {limits.max_bytes}: raise it")
    after_bytes = device.staying_bytes + message.size_bytes
    over_entries, over_bytes = _over(device, 1, message.size_bytes, limits)
    if max(over_entries, over_bytes) <= 0:
        return []
    would_be = ("max_bytes", over_bytes, after_bytes), ("max_entries", over_entries, device.staying_entries + 1)
    exceeded = f"{device.name}: " + ", ".join(
        f"{name} = {total - over} would be exceeded ({total} with this entry)"
        for name, over, total in would_be
        if over > 0
    )
    capacity = limits.capacity_blocks(gauge.sample.total_bytes)
    # A floor at the capacity leaves nothing to evict, or each entry would evict another.
    spare_bytes = after_bytes - limits.block_bytes * under.floor_blocks
    if 0 < under.floor_blocks >= capacity:
        spare_bytes = 0
    found, met = _first(device.may_go(now), spare_bytes, over_bytes, over_entries)
    if met:
        return found
    if under.floor_blocks and _first(device.may_go(now), after_bytes, over_bytes, over_entries)[1]:
        raise BelowFloor(
            f"{exceeded}, and only {max(0, spare_bytes)} bytes may be evicted: the queueing floor is "
            f"{under.floor_blocks} blocks of {limits.block_bytes} bytes and the capacity {capacity}; "
            "serve fewer requests at once, or raise max_bytes"
        )
    raise DeviceFull(
        f"{exceeded}, and the evictable entries do not suffice: release entries, "
        "raise the budget, or wait until owners have carried out their orders"
    )


def to_promote(
    device: DeviceRecord, under: Circumstances, limits: GovernorLimits, workflows: Workflows, now: float
) -> list[HeldEntry]:
    """The offloaded entries to ask back now, the nearest agents' first, and of each agent the oldest: as many as keep
    the device under its pressure threshold and its budgets, at most `keys_per_request_max`."""
    if under.gauge.mode not in (Mode.RELAXED, Mode.WORKFLOW_AWARE) or not device.offloaded:
        return []
    turns = {agent: turn for turn, agent in enumerate(workflows.up_next(limits.lookahead_steps))}
    may_come = [each for each in device.offloaded.values() if each.agent in turns and each.not_before <= now]
    coming, wanted = device.coming(now), []
    count, size_bytes = len(coming), sum(entry.size_bytes for entry in coming)
    for entry in sorted(may_come, key=lambda entry: turns[entry.agent])[: limits.keys_per_request_max]:
        count, size_bytes = count + 1, size_bytes + entry.size_bytes
        if (
            under.reserved_bytes + size_bytes > under.gauge.calm_bytes
            or max(_over(device, count, size_bytes, limits)) > 0
        ):
            break
        wanted.append(entry)
    return wanted


def is_worth_its_copy(entry: HeldEntry, limits: GovernorLimits) -> bool:
    """Whether copying takes no longer than computing again. That takes the reported milliseconds; without them it is
    estimated from the tokens. An entry of which neither is known is worth its copy."""
    compute_s = entry.cost_ms / 1000 or entry.tokens * limits.compute_s_per_token
    return not compute_s or entry.size_bytes / limits.copy_bytes_per_s <= compute_s


def _worth(entry: HeldEntry) -> tuple[float, int, int]:
    """Fewest uses per token first; then more tokens, more bytes."""
    return entry.uses / max(entry.tokens, 1), -entry.tokens, -entry.size_bytes


def _over(device: DeviceRecord, entries: int, size_bytes: int, limits: GovernorLimits) -> tuple[int, float]:
    """By how many entries and bytes the budgets would be exceeded with so many more; 0 or less: not at all."""
    bytes_max = math.inf if limits.max_bytes is None else limits.max_bytes
    return device.staying_entries + entries - limits.max_entries, device.staying_bytes + size_bytes - bytes_max


def _first(
    entries: Iterable[HeldEntry], spare_bytes: int, need_bytes: float, need_entries: int = 0, most: float = math.inf
) -> tuple[list[HeldEntry], bool]:
    """The first entries that meet both needs, at most `most`, and whether they do. One that exceeds the bytes that may
    go is passed over."""
    taken: list[HeldEntry] = []
    for entry in entries:
        if max(need_bytes, need_entries) <= 0 or spare_bytes <= 0 or len(taken) >= most:
            break
        if entry.size_bytes <= spare_bytes:
            taken.append(entry)
            need_bytes, need_entries = need_bytes - entry.size_bytes, need_entries - 1
            spare_bytes -= entry.size_bytes
    return taken, max(need_bytes, need_entries) <= 0
