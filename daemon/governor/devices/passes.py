"""One pass over a device's entries: the entries that each mode orders away, and when the next pass may begin.

Owns which entries each mode chooses and how many, never below the queueing floor; when a pass is over; and that a pass
which lowered nothing is not repeated. Does not own messages, order numbers, promotion, nor whether an entry is worth
its copy to the host (copies).

Invariant: nothing here changes a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ....ipc.messages.modes import Mode
from ..forms.limits import GovernorLimits
from . import ranking
from .table import Agents, Mask, Rows, Table, exact_sum

STUCK_FALL: Final = 0.01
"""A device is no longer stuck once its gauge has fallen by this share of the total."""
_LOWERING: Final = (Mode.PRESSURE, Mode.WORKFLOW_AWARE, Mode.CRITICAL, Mode.EMERGENCY)
"""Modes whose passes bring the device under the pressure threshold, whatever entries are idle."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The circumstances of a device by its last sample, which was begun at `began_at`.

    `host_accepts`: the host tier is below pressure. `refuses`: why new entries are refused; empty if they are accepted.
    `reserved_bytes`: memory that the sample shows as free and that is promised to reservations, that they wait for, or
    that entries have taken since. `wanted_bytes`: what must leave for waiting reservations. `baseline_bytes`: the used
    bytes that are held by plan.
    """

    mode: Mode
    used_bytes: int
    total_bytes: int
    began_at: float
    host_accepts: bool
    floor_blocks: int = 0
    refuses: str = ""
    reserved_bytes: int = 0
    wanted_bytes: int = 0
    baseline_bytes: int = 0

    def at(self, share: float) -> float:
        """The used bytes at this share of what is left beside the baseline."""
        return self.baseline_bytes + share * (self.total_bytes - self.baseline_bytes)


class Outlook(Protocol):
    """What workflows know of agents. `version` changes whenever a distance may have changed."""

    @property
    def version(self) -> int: ...

    def distance(self, agent: str) -> float:
        """Steps to execution; 2e9 if the agent has finished, 1e9 if no workflow contains it."""
        ...

    def up_next(self, lookahead: int) -> Sequence[str]:
        """The agents within so many steps, the nearest first."""
        ...


class Distances:
    """The distances of one table's agents, by number. Read again only after a possible change."""

    def __init__(self) -> None:
        self._known: tuple[int, int] | None = None
        self._steps: NDArray[np.float64] = np.zeros(0)

    def of(self, agents: Agents, outlook: Outlook) -> NDArray[np.float64]:
        """Steps to execution, float64, one for each number of an agent."""
        version = (agents.version, outlook.version)
        if version != self._known:
            self._steps = np.array([outlook.distance(name) for name in agents.names], np.float64)
            self._known = version
        return self._steps


@dataclass(frozen=True, slots=True)
class PassPlan:
    """What a pass would order."""

    offload_entries: int = 0
    offload_bytes: int = 0
    drop_entries: int = 0
    drop_bytes: int = 0


@dataclass(slots=True)
class Pass:
    """A pass that has begun and is not settled. `begun`: rows are still being chosen and ordered.

    `ordered`: entries ordered so far. `open_orders`: orders neither acknowledged nor late; `closed_at`: when the last
    of them was closed. `left`: entries that are gone, of the clients `left_of`; `freed_bytes`: bytes that drivers got
    back for them. `fell`: a reading that was begun after `began_at` showed less than the `used_bytes` before: memory
    that came back, and may have been taken since. `lowers`: the pass is meant to lower the gauge. Below pressure a pass
    evicts idle entries whatever the gauge shows afterwards.
    """

    used_bytes: int
    lowers: bool
    began_at: float
    begun: bool = True
    ordered: int = 0
    open_orders: int = 0
    closed_at: float = 0.0
    left: int = 0
    left_of: set[int] = field(default_factory=set)
    freed_bytes: int = 0
    fell: bool = False

    def watch(self, circumstances: Circumstances) -> None:
        """Takes a sample that came while the pass was not over, or the one that ends it."""
        if circumstances.began_at > self.began_at and circumstances.used_bytes < self.used_bytes:
            self.fell = True

    def over(self, circumstances: Circumstances) -> bool:
        """Whether the sample can show the whole effect of the pass."""
        return not self.begun and self.open_orders == 0 and circumstances.began_at > self.closed_at

    def why_stuck(self, circumstances: Circumstances) -> str:
        """Why another pass would be useless: entries left, and the gauge did not fall. Empty otherwise."""
        if not self.lowers or not self.left or self.freed_bytes or self.fell:
            return ""
        return (
            f"{self.left} entries left in the last pass, and {circumstances.used_bytes} bytes are still used "
            f"({self.used_bytes} before): their owners returned nothing to the driver. They are not asked again until "
            f"the mode changes, an entry is registered, the gauge falls by {STUCK_FALL:.0%}, or a reservation waits"
        )


def choose(
    table: Table,
    eligible: Mask,
    circumstances: Circumstances,
    limits: GovernorLimits,
    distances: Callable[[], NDArray[np.float64]],
    leaving_bytes: int,
    now: float,
) -> ranking.Steps:
    """The rows that a pass orders away, each once. The caller rechecks rows that may have changed between two steps.

    Args:
        eligible: one bool for each row, up to the table's end.
        distances: gives steps to execution, one for each agent number; called in workflow_aware only.
        leaving_bytes: bytes that are leaving and still in the sample; they count as gone.
    """
    spare_bytes = table.bytes - table.ordered_bytes - limits.block_bytes * circumstances.floor_blocks
    if spare_bytes <= 0:
        return np.zeros(0, np.int64)
    # Both before the first pause: rows may be added during one.
    idle = eligible & (table.used_at[: table.end] <= now - _idle_s(circumstances.mode, limits))
    for_reservations = is_for_reservations(circumstances, limits)
    need_bytes = needed_bytes(circumstances, limits) - leaving_bytes
    if need_bytes <= 0:
        return (yield from _idle(table, idle, spare_bytes))
    rows = np.flatnonzero(eligible)
    # The product of a share and a count may lie a rounding error above a whole number.
    most = math.ceil(limits.pass_share * len(table) - 1e-9)
    order: Callable[[Table, Rows], ranking.Rank] = ranking.by_density
    if circumstances.mode is Mode.WORKFLOW_AWARE:
        order = partial(ranking.by_distance, distances=distances())
    if for_reservations or circumstances.mode in (Mode.WORKFLOW_AWARE, Mode.EMERGENCY):
        most = len(rows)
    needed = yield from _above_floor(table, rows, order, need_bytes, most, spare_bytes)
    idle[needed] = False
    rest = yield from _idle(table, idle, spare_bytes - exact_sum(table.size_bytes[needed]))
    return np.concatenate([needed, rest])


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


def _idle(table: Table, idle: Mask, spare_bytes: int) -> ranking.Steps:
    """All idle rows, within the bytes that may go; least recently used first if they do not all fit."""
    rows = np.flatnonzero(idle)
    if exact_sum(table.size_bytes[rows]) <= spare_bytes and len(rows) > ranking.SORTED_WHOLE:
        return rows  # unordered: sorting so many costs more than the rest of the pass
    return (yield from _above_floor(table, rows, ranking.by_age, math.inf, len(rows), spare_bytes))


def needed_bytes(circumstances: Circumstances, limits: GovernorLimits) -> int:
    """How many bytes less must be used, for the mode and for waiting reservations; the larger of both."""
    lacking = lacking_bytes(circumstances, limits) if circumstances.mode in _LOWERING else 0
    return max(lacking, circumstances.wanted_bytes)


def is_for_reservations(circumstances: Circumstances, limits: GovernorLimits) -> bool:
    """Whether waiting reservations need more than the mode does."""
    return needed_bytes(replace(circumstances, wanted_bytes=0), limits) < circumstances.wanted_bytes


def calm_bytes(circumstances: Circumstances, limits: GovernorLimits) -> int:
    """How many bytes more may be used with the device still below the pressure threshold; negative if it is not."""
    return math.ceil(circumstances.at(limits.thresholds.pressure)) - 1 - circumstances.used_bytes


def lowers(circumstances: Circumstances, limits: GovernorLimits) -> bool:
    """Whether a pass is meant to lower the gauge."""
    return lacking_bytes(circumstances, limits) > 0 or circumstances.wanted_bytes > 0


def reason(circumstances: Circumstances, limits: GovernorLimits) -> str:
    """The reason of a pass's orders."""
    return "reservation" if is_for_reservations(circumstances, limits) else circumstances.mode.value


def lacking_bytes(circumstances: Circumstances, limits: GovernorLimits) -> int:
    """How many bytes less must be used for the device to be under the pressure threshold; 0 if it is."""
    over = circumstances.used_bytes - circumstances.at(limits.thresholds.pressure)
    return math.floor(over) + 1 if over >= 0 else 0


def plan_of(table: Table, rows: Rows, offload: Mask) -> PassPlan:
    """The amounts of an order for these rows, of which those in `offload` go to the host tier."""
    return PassPlan(
        int(offload.sum()),
        exact_sum(table.size_bytes[rows[offload]]),
        int((~offload).sum()),
        exact_sum(table.size_bytes[rows[~offload]]),
    )


def _above_floor(
    table: Table,
    rows: Rows,
    order: Callable[[Table, Rows], ranking.Rank],
    need_bytes: float,
    most: int,
    spare_bytes: int,
) -> ranking.Steps:
    """The first rows of an order that meet the need, within the bytes that may go.

    The row that would exceed these bytes is left out, and smaller rows after it are tried once more.
    """
    sizes = table.size_bytes[rows]
    taken = yield from ranking.first(order(table, rows), sizes, min(need_bytes, spare_bytes + 1), most)
    if exact_sum(sizes[taken]) <= spare_bytes:
        return rows[taken]
    went = taken[:-1]
    spare_bytes -= exact_sum(sizes[went])
    smaller = sizes <= spare_bytes
    smaller[taken] = False
    rest = rows[smaller]
    need_bytes = min(need_bytes - exact_sum(sizes[went]), spare_bytes + 1)
    more = yield from ranking.first(order(table, rest), table.size_bytes[rest], need_bytes, most - len(went))
    if exact_sum(table.size_bytes[rest[more]]) > spare_bytes:
        more = more[:-1]
    return np.concatenate([rows[went], rest[more]])
