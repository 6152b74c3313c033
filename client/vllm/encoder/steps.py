"""The steps of an engine: the messages between the connector's two sides, one each way in a step, and the leases of the
steps in progress.

Owns: the messages' fields; which inputs the workers load and store in the step that is being made; which ring
each rank maps; which inputs are in the engine's own encoder cache, according to the engine's calls. Does not own: the
choice between loading and encoding (scheduler.py).

Invariants: a lease is held until all ranks are done with its step. The messages cross processes, pickled by vLLM: they
contain only bytes, numbers, strings, containers and numpy arrays.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from ...caches.measures import Counts
from ...reading.lease import Lease


def ranks_of(vllm_config: Any) -> int:
    """Number of workers that run the encoder's pipeline stage. Each has its own encoder cache, and loads each input."""
    parallel = vllm_config.parallel_config
    ranks: int = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return ranks


@dataclass(frozen=True, slots=True)
class Load:
    """An encoder output to load into the worker's encoder cache, of `shape` (rows, width).

    `handle` names the output in the ring. If it is None, `payload` is the output itself.
    """

    shape: tuple[int, int]
    handle: bytes | None
    payload: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """An encoder output of `rows` encoder tokens to store under `key`. With `check`, to compare with what is stored.

    `claim` is the token of the scheduler's claim on the key, 0 for none. With the token, clients that wait for the key
    learn at once that the output will not be stored, even if the engine runs no further step.
    """

    key: bytes
    rows: int
    claim: int = 0
    check: bool = False


@dataclass(frozen=True, slots=True)
class StepMetadata(ECConnectorMetadata):  # type: ignore[misc, unused-ignore]
    """From the scheduler to the workers: the outputs to load before the encoder runs, and to store, by identifier.

    `step` is a number that rises, and is reported back when the loads are done. `rows`: the rows of encoder output made
    in the step.
    """

    step: int = 0
    loads: dict[str, Load] = field(default_factory=dict)
    saves: dict[str, Save] = field(default_factory=dict)
    rows: int = 0


NOTHING: Final = StepMetadata()
"""The metadata of most steps: no loads and no saves."""


@dataclass(slots=True)
class Report(ECConnectorWorkerMetadata):  # type: ignore[misc, unused-ignore]
    """From the workers to the scheduler, of one rank or merged from several.

    loaded: by rank, the step whose loads are done; the rank no longer reads any entry that it named. rings: by rank,
        the ring that the rank is attached to; the one that it reported before stays mapped for a while.
    settled: keys of saves that are over; the output is stored, or will not be.
    failed: identifiers whose load failed; the encoder cache has zeros in their place.
    differs: keys of stored outputs that differ from the output encoded here, and the difference (`canary.difference`).
    encode_s: seconds for the `encoded_rows`, their part of the time from the step's beginning until they were stored.
    """

    loaded: dict[int, int] = field(default_factory=dict)
    rings: dict[int, bytes] = field(default_factory=dict)
    settled: list[bytes] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    differs: list[tuple[bytes, float]] = field(default_factory=list)
    encoded_rows: int = 0
    encode_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: Report) -> Report:
        loaded = {rank: max(step, other.loaded.get(rank, 0)) for rank, step in self.loaded.items()}
        return Report(
            {**other.loaded, **loaded},
            {**self.rings, **other.rings},
            self.settled + other.settled,
            self.failed | other.failed,
            self.differs + other.differs,
            self.encoded_rows + other.encoded_rows,
            self.encode_s + other.encode_s,
            self.counts + other.counts,
        )


class StepPlan:
    """The steps of one engine with `ranks` workers. For the step's thread.

    `loads` and `saves` are those of the step that is being made, by identifier. `local`: the inputs in the engine's own
    encoder cache. `in_progress`: by step, the leases of what it loads, and the ranks that are not done with it.
    `rings`: the identity of the ring that each rank maps.
    """

    def __init__(self, ranks: int, counts: Counts) -> None:
        self._ranks = ranks
        self._counts = counts
        self._step = 0
        self.local: set[str] = set()
        self._allocated: set[str] = set()
        self.loads: dict[str, Lease] = {}
        self.saves: dict[str, Save] = {}
        self.in_progress: dict[int, tuple[list[Lease], set[int]]] = {}
        self.rings: dict[int, bytes] = {}

    def is_local(self, name: str) -> bool:
        """Whether the engine's own encoder cache has the input, or will have it by the end of the step."""
        return name in self.local or name in self._allocated

    def allocate(self, name: str) -> Save | None:
        """The encoder cache has space for the input in this step. Returns what the workers were to store for an earlier
        allocation of the step, which is void now."""
        self.loads.pop(name, None)
        self._allocated.add(name)
        return self.saves.pop(name, None)

    def make(self, tokens: int, rows: int) -> StepMetadata:
        """The metadata of the step, which computes `tokens` and encodes `rows`. Begins the next one."""
        if tokens or self._allocated:
            self._step += 1
        self.local |= self._allocated
        self._allocated = set()
        if not self.loads and not self.saves:
            return NOTHING
        if self.loads:
            self.in_progress[self._step] = list(self.loads.values()), set(range(self._ranks))
        loads = {name: self._load(lease) for name, lease in self.loads.items()}
        made = StepMetadata(self._step, loads, self.saves, rows)
        self.loads, self.saves = {}, {}
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
        self._counts.count("inline")
        return Load(lease.tree.shape, None, lease.tree)
