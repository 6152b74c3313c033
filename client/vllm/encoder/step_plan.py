"""The step that is being made, and the steps in progress.

Owns: which inputs the workers load, store and compare in the step; the leases of the steps in progress; which ring each
rank maps; and which inputs are in the engine's own encoder cache, according to the engine's calls. Does not own: the
choice between loading and encoding (scheduler.py). Only the step's thread uses it.
Invariants: a lease is held until all ranks are done with its step, or LAG_STEPS_MAX steps have been made since.
"""

from __future__ import annotations

from typing import Final

from ...reading.lease import Lease
from .stats import LookupCounts
from .step import NOTHING, Load, Report, Save, StepMetadata

LAG_STEPS_MAX: Final = 256
"""Ranks run steps in order, and are at most a few steps behind. A rank that is this many steps behind is taken as done;
its report was lost."""


class StepPlan:
    """The steps of one engine with `ranks` workers. `loads`, `saves` and `checks` are those of the step that is being
    made, by identifier."""

    def __init__(self, ranks: int, counts: LookupCounts) -> None:
        self._ranks = ranks
        self._counts = counts
        self._step = 0
        self.local: set[str] = set()
        """The inputs in the engine's own encoder cache."""
        self._allocated: set[str] = set()
        self.loads: dict[str, Lease] = {}
        self.saves: dict[str, Save] = {}
        self.checks: dict[str, tuple[bytes, Lease]] = {}
        self.in_progress: dict[int, tuple[list[Lease], set[int]]] = {}
        """By step: the leases of what it loads and compares, and the ranks that are not done with it."""
        self.rings: dict[int, bytes] = {}
        """The identity of the ring that each rank maps."""

    def is_local(self, name: str) -> bool:
        """Whether the engine's own encoder cache has the input, or will have it by the end of the step."""
        return name in self.local or name in self._allocated

    def allocate(self, name: str) -> Save | None:
        """The encoder cache has space for the input in this step. Returns what the workers were to store for an earlier
        allocation of the step, which is void now."""
        self.loads.pop(name, None)
        self.checks.pop(name, None)
        self._allocated.add(name)
        return self.saves.pop(name, None)

    def make(self, tokens: int, rows: int) -> StepMetadata:
        """The metadata of the step, which computes `tokens` and encodes `rows`. Begins the next one."""
        if tokens or self._allocated:
            self._step += 1
        for step in [step for step in self.in_progress if step + LAG_STEPS_MAX < self._step]:
            del self.in_progress[step]
        self.local |= self._allocated
        self._allocated = set()
        if not self.loads and not self.saves and not self.checks:
            return NOTHING
        leases = [*self.loads.values(), *(lease for _, lease in self.checks.values())]
        if leases:
            self.in_progress[self._step] = leases, set(range(self._ranks))
        made = StepMetadata(
            self._step,
            {name: self._load(lease) for name, lease in self.loads.items()},
            self.saves,
            rows,
            {name: (key, self._load(lease)) for name, (key, lease) in self.checks.items()},
        )
        self.loads, self.saves, self.checks = {}, {}, {}
        return made

    def take_in(self, report: Report) -> None:
        """Processes which rings the workers map, and how far they are."""
        self.rings.update(report.rings)
        for rank, done in report.loaded.items():
            for step in [step for step in self.in_progress if step <= done]:
                missing = self.in_progress[step][1]
                missing.discard(rank)
                if not missing:
                    del self.in_progress[step]

    def _load(self, lease: Lease) -> Load:
        handle = lease.handle()
        if handle is not None and all(handle[:16] == self.rings.get(rank) for rank in range(self._ranks)):
            return Load(lease.tree.shape, handle)
        self._counts.add("inline")
        return Load(lease.tree.shape, None, lease.tree)
