"""Passes over a device's entries: which entries each mode orders away, and when the next pass may begin.

Owns how many entries a pass takes and in which order, never below the queueing floor; and which owners it may ask. Does
not own order numbers, promotion, nor whether an entry is worth its copy to the host (copies).

A device is stuck after a pass that lowered nothing. Its owners are left alone for `retry_s`; passes ask the others.

Invariant: a device has at most one current pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, Protocol

from ....ipc.messages.modes import Mode
from ..forms.limits import GovernorLimits
from ..forms.outbox import GovernorOutbox
from .circumstances import Circumstances, is_for_reservations, lowers, needed_bytes
from .orders import DeviceOrders
from .record import DeviceRecord, HeldEntry, Pass

ENTRIES_MAX: Final = 4096
"""Entries that one pass orders away. So many keep the daemon from other work for some milliseconds."""
CANDIDATES_MAX: Final = 8192
"""Entries that one pass ranks: the least recently used. The next pass ranks those that were used since."""


class Outlook(Protocol):
    """What workflows know of agents."""

    def distance(self, agent: str) -> float:
        """Steps to execution; 2e9 if the agent has finished, 1e9 if no workflow contains it."""
        ...

    def up_next(self, lookahead: int) -> Sequence[str]:
        """The agents within so many steps, the nearest first."""
        ...


class DevicePasses:
    """The passes of all devices."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox, orders: DeviceOrders, outlook: Outlook) -> None:
        self._limits = limits
        self._outbox = outbox
        self._orders = orders
        self._outlook = outlook

    def settle(self, device: DeviceRecord, circumstances: Circumstances, now: float) -> None:
        """Judges the current pass by a new sample, if the sample shows its whole effect."""
        before = device.stuck
        self._orders.leave_slow_owners(device, now)
        device.settle(circumstances, now, self._limits.retry_s)
        if device.stuck != before:
            self._outbox.announce("stuck", device=device.name, why=device.stuck)
            if not before:
                self._outbox.log("warning", "device stuck", device=device.name, why=device.stuck)

    def mode_changed(self, device: DeviceRecord) -> None:
        """The next pass is of another kind, and repeats nothing: it may ask every owner."""
        self.clear_stuck(device)
        device.ask_all()

    def clear_stuck(self, device: DeviceRecord) -> None:
        """Ends `stuck`: what the last pass has shown may be different now."""
        if device.stuck:
            device.stuck = ""
            self._outbox.announce("stuck", device=device.name, why="")

    def begin(self, device: DeviceRecord, circumstances: Circumstances, now: float) -> None:
        """Orders away what the mode and the waiting reservations ask for, unless a pass is under way."""
        if device.current_pass is not None:
            return
        chosen = self.choose(device, circumstances, now)
        if not chosen:
            return
        device.current_pass = Pass(circumstances.used_bytes, lowers(circumstances, self._limits), now)
        for_reservations = is_for_reservations(circumstances, self._limits)
        reason = "reservation" if for_reservations else circumstances.mode.value
        self._orders.order_away(device, chosen, circumstances.host_accepts, reason, now, device.current_pass)
        self._outbox.counters.passes += 1

    def choose(self, device: DeviceRecord, circumstances: Circumstances, now: float) -> list[HeldEntry]:
        """The entries that a pass orders away now: first what the device lacks, then what is idle. Changes nothing."""
        limits, mode = self._limits, circumstances.mode
        spare_bytes = device.held.bytes - device.ordered.bytes - limits.block_bytes * circumstances.floor_blocks
        waiting = circumstances.wanted_bytes > 0
        may_go = device.may_go_soon(now, retry_s=limits.retry_s, waiting=waiting) if spare_bytes > 0 else ()
        entries = list(islice(may_go, CANDIDATES_MAX))
        need_bytes = needed_bytes(circumstances, limits) - device.leaving_bytes(circumstances, now)
        needed: list[HeldEntry] = []
        if need_bytes > 0 and entries:
            # The product of a share and a count may lie a rounding error above a whole number.
            most = math.ceil(limits.pass_share * len(device.entries) - 1e-9)
            if is_for_reservations(circumstances, limits) or mode in (Mode.WORKFLOW_AWARE, Mode.EMERGENCY):
                most = len(entries)
            needed = _first(self._ranked(entries, mode), need_bytes, min(most, ENTRIES_MAX), spare_bytes)
            spare_bytes -= sum(entry.size_bytes for entry in needed)
        idle_since, taken = now - _idle_s(mode, limits), set(needed)
        idle = [entry for entry in entries if entry.used_at <= idle_since and entry not in taken]
        return needed + _first(idle, math.inf, ENTRIES_MAX - len(needed), spare_bytes)

    def _ranked(self, entries: Iterable[HeldEntry], mode: Mode) -> list[HeldEntry]:
        """In the order in which entries go for what a device lacks. Of equals the least recently used goes first."""
        distance = self._outlook.distance
        if mode is Mode.WORKFLOW_AWARE:
            return sorted(entries, key=lambda entry: -distance(entry.agent))
        return sorted(entries, key=_worth)


def _worth(entry: HeldEntry) -> tuple[float, int, int]:
    """Fewest uses per token first; then more tokens, more bytes."""
    return entry.uses / max(entry.tokens, 1), -entry.tokens, -entry.size_bytes


def _idle_s(mode: Mode, limits: GovernorLimits) -> float:
    """The time for which an entry must be idle so that the mode evicts it whatever the device lacks."""
    match mode:
        case Mode.RELAXED:
            return limits.relaxed_idle_s
        case Mode.NORMAL:
            return limits.normal_idle_s
        case Mode.CRITICAL | Mode.EMERGENCY:
            return limits.critical_idle_s
        case _:
            return math.inf


def _first(entries: Iterable[HeldEntry], need_bytes: float, most: int, spare_bytes: int) -> list[HeldEntry]:
    """The first entries that meet the need, at most `most`. One that exceeds the bytes that may go is passed over."""
    taken: list[HeldEntry] = []
    for entry in entries:
        if need_bytes <= 0 or spare_bytes <= 0 or len(taken) >= most:
            break
        if entry.size_bytes <= spare_bytes:
            taken.append(entry)
            need_bytes -= entry.size_bytes
            spare_bytes -= entry.size_bytes
    return taken
