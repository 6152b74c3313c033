"""The course of passes: begins one over a device's entries, carries it out slice by slice, and judges it.

Owns the unfinished passes, whether a device is stuck, and which owners a pass may ask. Does not own which of their
entries a pass chooses (passes), nor the orders that follow (device_orders).

A device is stuck after a pass that lowered nothing. Passes then ask the other owners. The owners of that pass are asked
again while a reservation waits, each time later, or once the device is not stuck any more.

`begin` does the first slice, and all of a small table; each `go_on` does the next one.

Invariant: a device has at most one current pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from ..forms.limits import GovernorLimits
from ..forms.outbox import GovernorOutbox
from . import passes
from .orders import DeviceOrders
from .passes import Circumstances, Outlook, Pass
from .ranking import SORTED_WHOLE, Steps
from .record import WAITING_RETRY_S, DeviceRecord
from .table import Mask, Rows

ROWS_A_SLICE: Final = 16_384
"""Rows ordered away at a time."""
_DONE: Final = object()


class DevicePasses:
    """The passes of all devices."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox, orders: DeviceOrders, outlook: Outlook) -> None:
        self._limits = limits
        self._outbox = outbox
        self._orders = orders
        self._outlook = outlook
        self._work: deque[Iterator[None]] = deque()
        self._now = 0.0

    @property
    def unfinished(self) -> bool:
        """Whether `go_on` has a slice to do."""
        return bool(self._work)

    def change_limits(self, limits: GovernorLimits) -> None:
        """Applies from now on."""
        self._limits = limits

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
        for owner in device.owners.values():
            owner.vain_s = 0.0

    def clear_stuck(self, device: DeviceRecord) -> None:
        """Ends `stuck`: what the last pass has shown may be different now."""
        if device.stuck:
            device.stuck = ""
            self._outbox.announce("stuck", device=device.name, why="")

    def choose(self, device: DeviceRecord, circumstances: Circumstances, now: float) -> Steps:
        """The rows that a pass orders away now. Changes nothing."""
        table = device.table
        return passes.choose(
            table,
            self._may_go(device, slice(table.end), circumstances, now),
            circumstances,
            self._limits,
            lambda: device.distances.of(table.agents, self._outlook),
            device.leaving_bytes(circumstances, now),
            now,
        )

    def begin(self, device: DeviceRecord, circumstances: Circumstances, now: float) -> None:
        """Begins a pass, unless one is under way."""
        self._now = now
        if device.current_pass is not None or not len(device.table):
            return
        lowers = passes.lowers(circumstances, self._limits)
        device.current_pass = Pass(circumstances.used_bytes, lowers, now)
        slices = self._slices(device, device.current_pass, circumstances)
        if len(device.table) > SORTED_WHOLE:
            # A pass without an entry to evict ends before its first pause.
            if next(slices, "over") is None:
                self._work.append(slices)
            return
        for _ in slices:
            pass

    def go_on(self, now: float) -> None:
        """Does the next slice of the oldest unfinished pass."""
        self._now = now
        if next(self._work[0], _DONE) is _DONE:
            self._work.popleft()

    def ask_again(self, device: DeviceRecord) -> None:
        """A reservation begins to wait: owners that returned nothing are asked again, WAITING_RETRY_S after the last
        time at the latest."""
        for owner in device.owners.values():
            owner.vain_s = min(owner.vain_s, WAITING_RETRY_S)

    def _may_go(self, device: DeviceRecord, rows: Rows | slice, circumstances: Circumstances, now: float) -> Mask:
        waiting = circumstances.wanted_bytes > 0
        return device.may_go_soon(rows, now, retry_s=self._limits.retry_s, waiting=waiting)

    def _slices(self, device: DeviceRecord, current_pass: Pass, circumstances: Circumstances) -> Iterator[None]:
        """One pass: chooses rows, then orders them away as far as they have not changed meanwhile."""
        table, last_serial = device.table, device.table.last_serial
        rows = yield from self.choose(device, circumstances, self._now)
        for begin in range(0, len(rows), ROWS_A_SLICE):
            yield
            part = rows[begin : begin + ROWS_A_SLICE]
            may_go = self._may_go(device, part, circumstances, self._now)
            part = part[may_go & (table.serial[part] <= last_serial)]
            reason = passes.reason(circumstances, self._limits)
            self._orders.order_away(device, part, circumstances.host_accepts, reason, self._now, current_pass)
        current_pass.begun, current_pass.closed_at = False, self._now
        if current_pass.ordered:
            self._outbox.counters.passes += 1
        else:
            device.current_pass = None
