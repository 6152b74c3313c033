"""The governor's limits, each under its name in the configuration and in refusals.

Owns the values. Does not own where they come from (`daemon.config`), which also checks them.

All parts of a governor share one GovernorLimits, which a reload changes: only `Governor` calls `become`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final

from .thresholds import Thresholds

DEVICES_MAX: Final = 64
BASELINE_SHARE_MAX: Final = 0.95
"""Modes about a smaller rest of a device would change with every allocation."""


@dataclass(frozen=True, slots=True)
class NeighbourPlace:
    """Where a neighbour is: a server that is no client, and can be asked to give memory of its card back.

    `kind`: the adapter, as "ollama". `card`: the device that it uses; "" if it may be any.
    """

    kind: str
    host: str
    port: int
    card: str = ""

    @property
    def name(self) -> str:
        """The neighbour's name in status and answers, as "ollama 127.0.0.1:11434"."""
        return f"{self.kind} [{self.host}]:{self.port}" if ":" in self.host else f"{self.kind} {self.host}:{self.port}"


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
        """Takes the values of other limits, which apply from now on."""
        for each in fields(self):
            setattr(self, each.name, getattr(limits, each.name))

    def baseline_bytes(self, device: str, total_bytes: int) -> int:
        """What is held by plan of a device of `total_bytes`, BASELINE_SHARE_MAX of it at most."""
        configured = dict(self.baselines)
        return min(configured.get(device, configured.get("", 0)), int(BASELINE_SHARE_MAX * total_bytes))

    def capacity_blocks(self, total_bytes: int | None) -> int:
        """The capacity of a device of `total_bytes` for entries, in blocks of the queueing floor.

        None: the size is unknown, and the budget is the capacity; 0: there is no budget either.
        """
        known = [most for most in (self.max_bytes, total_bytes) if most is not None]
        return min(known, default=0) // self.block_bytes
