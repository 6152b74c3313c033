"""The governor's limits, each under its name in the configuration and in refusals. The configuration gives them.

All parts of a governor share one GovernorLimits, which a reload changes: only `Governor` calls `become`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Final

from ....errors import BadConfiguration

DEVICES_MAX: Final = 64
BASELINE_SHARE_MAX: Final = 0.95
"""Modes about a smaller rest of a device would change with every allocation."""


@dataclass(frozen=True, slots=True)
class NeighbourPlace:
    """Where a neighbour is: a server that is no client, and can be asked to give memory of its card back. `kind`: the
    adapter, as "ollama". `card`: the device that it uses; "" if it may be any."""

    kind: str
    host: str
    port: int
    card: str = ""

    @property
    def name(self) -> str:
        """The neighbour's name in status and answers, as "ollama 127.0.0.1:11434"."""
        return f"{self.kind} [{self.host}]:{self.port}" if ":" in self.host else f"{self.kind} {self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The share of a tier at which each level begins. Relaxed begins at 0. Raises BadConfiguration, which names the
    settings, if a threshold is not above the one before it by more than the hysteresis, or `normal` is below the
    hysteresis, so that it would never end."""

    normal: float = 0.70
    pressure: float = 0.85
    critical: float = 0.92
    emergency: float = 0.96
    hysteresis: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.hysteresis < 1:
            raise BadConfiguration(f"hysteresis = {self.hysteresis:g}: give a share of at least 0 and below 1")
        if not max(self.hysteresis, 1e-9) <= self.normal:
            raise BadConfiguration(
                f"normal = {self.normal:g} with a hysteresis of {self.hysteresis:g}: it must be above 0, and not "
                "below the hysteresis, or the mode would never end"
            )
        for (low, begins), (high, ends) in pairwise(self.rising()):
            if not begins < _below(ends, self.hysteresis) <= ends <= 1:
                raise BadConfiguration(
                    f"{low} = {begins:g} and {high} = {ends:g} with a hysteresis of {self.hysteresis:g}: each must "
                    "be above the one before by more than the hysteresis, and at most 1"
                )

    def rising(self) -> list[tuple[str, float]]:
        """The names of the levels with their thresholds, from low to high, without relaxed."""
        names = "normal", "pressure", "critical", "emergency"
        return [(name, getattr(self, name)) for name in names]

    def level(self, share: float) -> int:
        """The level of a share, as an index of LEVELS. A threshold belongs to the level that begins there."""
        return sum(share >= begins for _, begins in self.rising())

    def kept(self, share: float) -> int:
        """The highest level that a sample of `share` does not end, as an index of LEVELS; at least `level`. A share
        that is below a threshold by the hysteresis, or by more, ends the level that begins there."""
        kept = sum(share > _below(begins, self.hysteresis) for _, begins in self.rising())
        return max(kept, self.level(share))


@dataclass(slots=True, kw_only=True)
class GovernorLimits:
    """Bytes, counts, seconds and shares. None stands for "no limit".

    `baselines`: bytes by device; the empty name: of all other devices. `neighbours`: in the order in which they are
    asked for memory. Those from `pass_share` on are no settings. `pass_share`: the share of a device's entries that one
    pass in pressure and critical evicts at most. At most `devices_max` devices are known by name, and at most
    `remembered_max` offloaded entries are remembered for promotion; the oldest are forgotten first.
    """

    thresholds: Thresholds = field(default_factory=Thresholds)
    sample_s: float = 2.0
    sample_pressed_s: float = 0.25
    relaxed_idle_s: float = 600.0
    normal_idle_s: float = 120.0
    critical_idle_s: float = 30.0
    ack_s: float = 10.0
    retry_s: float = 30.0
    max_bytes: int | None = None
    keys_per_request_max: int = 1024
    neighbours: tuple[NeighbourPlace, ...] = ()
    neighbour_answer_s: float = 20.0
    baselines: tuple[tuple[str, int], ...] = ()
    block_bytes: int = 2 << 20
    pass_share: float = 0.25
    copy_bytes_per_s: int = 4 << 30
    compute_s_per_token: float = 60e-6
    max_entries: int = 65_536
    devices_max: int = DEVICES_MAX
    remembered_max: int = 65_536
    reservations_max: int = 64
    reserve_s_max: float = 60.0
    room_s_max: float = 3600.0
    workflows_max: int = 256
    workflow_steps_max: int = 16_384
    lookahead_steps: int = 1

    def become(self, limits: GovernorLimits) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(limits, each.name))

    def baseline_bytes(self, device: str, total_bytes: int) -> int:
        """What is held by plan of a device of `total_bytes`, BASELINE_SHARE_MAX of it at most."""
        configured = dict(self.baselines)
        return min(configured.get(device, configured.get("", 0)), int(BASELINE_SHARE_MAX * total_bytes))

    def capacity_blocks(self, total_bytes: int | None) -> int:
        """The capacity of a device of `total_bytes` for entries, in blocks of the queueing floor. None: the size is
        unknown, and the budget is the capacity; 0: there is no budget either."""
        known = [most for most in (self.max_bytes, total_bytes) if most is not None]
        return min(known, default=0) // self.block_bytes


def _below(threshold: float, hysteresis: float) -> float:
    """The decimal difference: 0.02 below 0.7 is 0.68, while floats give 0.6799999999999999."""
    return round(threshold - hysteresis, 12)
