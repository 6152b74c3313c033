"""What the scheduler's side and the workers' side of the connector say to each other in a step.

Both cross processes, pickled by vLLM; they hold bytes, numbers and numpy arrays only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata


@dataclass(frozen=True, slots=True)
class Load:
    """An encoder output to be put into the worker's encoder cache.

    `handle` names it in the ring; without one `payload` is the output itself, (rows, width).
    """

    shape: tuple[int, int]
    handle: bytes | None
    payload: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """An encoder output that is to be stored under `key`; it is `rows` encoder tokens.

    `claim` is the token of the claim that the scheduler's side holds for it, 0 where it has none: with it whoever waits
    hears at once that nothing will be stored, also from an engine that makes no more steps.
    """

    key: bytes
    rows: int
    claim: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """An encoder output that was found under `key`, to be compared with what this step encodes."""

    key: bytes
    found: Load


@dataclass(frozen=True, slots=True)
class StepMetadata(ECConnectorMetadata):  # type: ignore[misc, unused-ignore]
    """Scheduler to workers: what to load before the encoder runs, what of its outputs to store, and what to compare, by
    identifier.

    `step` counts up, and is named again when the loads are done. `left`: by rank, rings that no later step names.
    `rows` of encoder outputs are made in it. `adapters`: of saves and checks with a LoRA adapter, its number in vLLM,
    and the digest of the weights that the key stands for.
    """

    step: int = 0
    loads: dict[str, Load] = field(default_factory=dict)
    saves: dict[str, Save] = field(default_factory=dict)
    left: dict[int, set[bytes]] = field(default_factory=dict)
    rows: int = 0
    checks: dict[str, Check] = field(default_factory=dict)
    adapters: dict[str, tuple[int, str]] = field(default_factory=dict)


NOTHING: Final = StepMetadata()
"""What most steps say."""


@dataclass(slots=True)
class Report(ECConnectorWorkerMetadata):  # type: ignore[misc, unused-ignore]
    """Workers to scheduler, of one rank or several."""

    loaded: dict[int, int] = field(default_factory=dict)
    """By rank: the step whose loads are done. Nothing of what it named is read any more."""
    rings: dict[int, bytes] = field(default_factory=dict)
    """By rank: the ring that it is attached to. Another one, said before, it maps until a step says that it is left."""
    adapters: dict[int, dict[int, str]] = field(default_factory=dict)
    """By rank, if they have changed: the LoRA adapters that it holds, by their number in vLLM, and their digests."""
    settled: list[bytes] = field(default_factory=list)
    """Keys of saves that are over: stored, or not to be."""
    failed: set[str] = field(default_factory=set)
    """Identifiers whose load failed: zeros stand in their place."""
    differs: list[tuple[bytes, float]] = field(default_factory=list)
    """Keys of outputs that differ from what was encoded here, and by how much (`canary.difference`)."""
    encoded_rows: int = 0
    encode_s: float = 0.0
    """These rows' part of the time from their step's beginning until they were stored."""
    counts: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: Report) -> Report:
        """Both reports in one."""
        return Report(
            loaded={
                rank: max(report.loaded.get(rank, 0) for report in (self, other))
                for rank in self.loaded.keys() | other.loaded.keys()
            },
            rings={**self.rings, **other.rings},
            adapters={**self.adapters, **other.adapters},
            settled=self.settled + other.settled,
            failed=self.failed | other.failed,
            differs=self.differs + other.differs,
            encoded_rows=self.encoded_rows + other.encoded_rows,
            encode_s=self.encode_s + other.encode_s,
            counts=self.counts + other.counts,
        )
