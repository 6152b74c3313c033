"""The step that is being made, and the steps in progress.

Owns: which inputs the workers load, store and compare in the step; the leases of the steps in progress; which ring each
rank maps; and which inputs are in the engine's own encoder cache, according to the engine's calls. Does not own: the
choice between loading and encoding (scheduler.py). Only the step's thread uses it.
Invariants: a lease is held until all ranks are done with its step, or LAG_STEPS_MAX steps have been made since.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ...reading.lease import Lease
from .stats import LookupCounts
from .step import NOTHING, Check, Load, Report, Save, StepMetadata

LAG_STEPS_MAX: Final = 256
"""Ranks run steps in order, and are at most a few steps behind. A rank that is this many steps behind is taken as done;
its report was lost."""


class StepPlan:
    """The steps of one engine with `ranks` workers."""

    def __init__(self, ranks: int, counts: LookupCounts) -> None:
        self._ranks = ranks
        self._counts = counts
        self._step = 0
        self._local: set[str] = set()
        self._allocated: set[str] = set()
        self._loads: dict[str, Lease] = {}
        self._saves: dict[str, Save] = {}
        self._checks: dict[str, tuple[bytes, Lease]] = {}
        self._in_progress: dict[int, tuple[list[Lease], set[int]]] = {}
        self.rings: dict[int, bytes] = {}
        """The identity of the ring that each rank maps."""

    def __len__(self) -> int:
        """The number of steps in progress that load or compare inputs."""
        return len(self._in_progress)

    # ---- the encoder cache

    def is_local(self, name: str) -> bool:
        """Whether the engine's own encoder cache has the input, or will have it by the end of the step."""
        return name in self._local or name in self._allocated

    def free(self, names: Iterable[str]) -> None:
        """The engine's encoder cache has dropped these inputs."""
        self._local.difference_update(names)

    def free_all(self) -> None:
        """The engine's encoder cache was reset."""
        self._local.clear()

    # ---- the step that is being made

    def allocate(self, name: str) -> Save | None:
        """The encoder cache has space for the input in this step. Returns what the workers were to store for an earlier
        allocation of the step, which is void now."""
        self._loads.pop(name, None)
        self._checks.pop(name, None)
        self._allocated.add(name)
        return self._saves.pop(name, None)

    def load(self, name: str, lease: Lease) -> None:
        """The workers load the input."""
        self._loads[name] = lease

    def save(self, name: str, save: Save) -> None:
        """The workers store the input's output."""
        self._saves[name] = save

    def check(self, name: str, key: bytes, lease: Lease) -> None:
        """The workers compare the output that they encode with the stored one."""
        self._checks[name] = key, lease

    def advance(self, tokens: int) -> bool:
        """Counts the step, unless it has neither tokens nor inputs. Returns whether it was counted."""
        if tokens or self._allocated:
            self._step += 1
            return True
        return False

    def make(self, rows: int) -> StepMetadata:
        """The metadata of the step, which encodes `rows`. Begins the next one."""
        if self._in_progress:
            self._drop_lost()
        self._local |= self._allocated
        self._allocated = set()
        if not self._loads and not self._saves and not self._checks:
            return NOTHING
        loads = {name: self._load(lease) for name, lease in self._loads.items()}
        checks = {name: Check(key, self._load(lease)) for name, (key, lease) in self._checks.items()}
        leases = [*self._loads.values(), *(lease for _, lease in self._checks.values())]
        if leases:
            self._in_progress[self._step] = leases, set(range(self._ranks))
        made = StepMetadata(self._step, loads, self._saves, rows, checks)
        self._loads, self._saves, self._checks = {}, {}, {}
        return made

    # ---- the steps in progress

    def take_in(self, report: Report) -> None:
        """Processes which rings the workers map, and how far they are."""
        self.rings.update(report.rings)
        for rank, done in report.loaded.items():
            for step in [step for step in self._in_progress if step <= done]:
                missing = self._in_progress[step][1]
                missing.discard(rank)
                if not missing:
                    del self._in_progress[step]

    def close(self) -> None:
        """Releases the leases of the steps in progress."""
        self._in_progress.clear()

    def _load(self, lease: Lease) -> Load:
        shape = lease.tree.shape
        handle = lease.handle()
        if handle is not None and all(handle[:16] == self.rings.get(rank) for rank in range(self._ranks)):
            return Load(shape, handle)
        self._counts.add("inline")
        return Load(shape, None, lease.tree)

    def _drop_lost(self) -> None:
        for step in [step for step in self._in_progress if step + LAG_STEPS_MAX < self._step]:
            del self._in_progress[step]
