"""Gathers a device's circumstances from the governor's parts. Owns only their form (`passes.Circumstances`).

Invariant: nothing is changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import DeviceFull, NoGauge
from ...ipc.messages.modes import HOST_GAUGE, Mode
from ...ipc.messages.schema import SIZE_BYTES_MAX
from .devices.circumstances import Circumstances
from .host import accepts_offload
from .modes.tiers import Gauge

if TYPE_CHECKING:
    from .governor import Governor


def known(governor: Governor, device: str) -> bool:
    """Whether a device has a gauge or entries."""
    return governor.tiers.find(device) is not None or governor.devices.held_bytes(device) > 0


def of_device(governor: Governor, device: str, now: float) -> Circumstances:
    """The circumstances of a device, also of one without a gauge."""
    gauge = governor.tiers.find_device(device)
    if gauge is None:
        return without_gauge(governor, device, now)
    return of_gauge(governor, gauge, now)


def without_gauge(governor: Governor, device: str, now: float) -> Circumstances:
    """The circumstances of a device of unknown size: only its budgets and its floor limit it."""
    return Circumstances(
        mode=Mode.RELAXED,
        used_bytes=0,
        total_bytes=SIZE_BYTES_MAX,
        began_at=float("-inf"),
        host_accepts=accepts_offload(governor.tiers.find(HOST_GAUGE)),
        floor_blocks=governor.floors.blocks(device, now),
    )


def readable(governor: Governor, device: str, now: float, *, promotes: bool = False) -> Gauge:
    """The gauge of a device, for a reservation. `promotes`: for an entry that has a copy in the host tier.

    Raises:
        NoGauge: there is none, or it cannot be read now.
        DeviceFull: the same, and the reservation is for an entry that comes back.
    """
    gauge = governor.tiers.find_device(device)
    if gauge is None:
        if promotes:
            raise DeviceFull(f"no gauge of {device} has been read: use the host tier's copy")
        raise NoGauge(f"device {device!r} has no gauge, so no memory of it can be reserved")
    sample = gauge.sample
    if sample.stale:
        why = (
            f"the gauge of {sample.gauge} cannot be read ({sample.source}: {sample.shown.get('failure', '')}); its "
            f"last reading is {now - sample.began_at:.3g} s old, so no memory of it can be reserved"
        )
        if promotes:
            raise DeviceFull(f"{why}: use the host tier's copy")
        raise NoGauge(f"{why}: try again when `tensorctl health` no longer names it")
    return gauge


def of_gauge(governor: Governor, gauge: Gauge, now: float) -> Circumstances:
    """The circumstances of a device by its gauge."""
    sample, queue, baseline_bytes = gauge.sample, governor.queue, gauge.baseline_bytes
    refuses = ""
    if gauge.refuses:
        beside = f" beside its baseline of {baseline_bytes} bytes" if baseline_bytes else ""
        refuses = (
            f"device {sample.gauge} is {gauge.share:.1%} full{beside}, and emergency begins at "
            f"{governor.limits.thresholds.emergency:.1%}: it accepts entries again when emergency ends"
        )
    return Circumstances(
        mode=gauge.mode,
        used_bytes=sample.used_bytes,
        total_bytes=sample.total_bytes,
        began_at=sample.began_at,
        host_accepts=accepts_offload(governor.tiers.find(HOST_GAUGE)),
        floor_blocks=governor.floors.blocks(sample.gauge, now),
        refuses=refuses,
        reserved_bytes=governor.reservations.taken_bytes(sample.gauge) + queue.waiting_bytes(sample.gauge),
        wanted_bytes=queue.wanted_bytes(sample.gauge, sample.total_bytes - sample.used_bytes),
        baseline_bytes=baseline_bytes,
    )
