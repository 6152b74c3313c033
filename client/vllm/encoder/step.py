"""The messages between the scheduler's side and the workers' side of the connector, one each way in a step.

Owns: their fields. Does not own: their transport. Both cross processes, pickled by vLLM.

Invariants: they contain only bytes, numbers, strings, containers and numpy arrays.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata


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
    """An encoder output of `rows` encoder tokens to store under `key`.

    `claim` is the token of the scheduler's claim on the key, 0 for none. With the token, clients that wait for the key
    learn at once that the output will not be stored, even if the engine runs no further step.
    """

    key: bytes
    rows: int
    claim: int = 0


@dataclass(frozen=True, slots=True)
class StepMetadata(ECConnectorMetadata):  # type: ignore[misc, unused-ignore]
    """From the scheduler to the workers: the outputs to load before the encoder runs, to store, and to compare with
    stored ones, of which it has the keys, by identifier.

    `step` is a number that rises, and is reported back when the loads are done. `rows`: the rows of encoder output made
    in the step.
    """

    step: int = 0
    loads: dict[str, Load] = field(default_factory=dict)
    saves: dict[str, Save] = field(default_factory=dict)
    rows: int = 0
    checks: dict[str, tuple[bytes, Load]] = field(default_factory=dict)


NOTHING: Final = StepMetadata()
"""The metadata of most steps: no loads, saves or checks."""


@dataclass(slots=True)
class Report(ECConnectorWorkerMetadata):  # type: ignore[misc, unused-ignore]
    """From the workers to the scheduler, of one rank or merged from several."""

    loaded: dict[int, int] = field(default_factory=dict)
    """By rank: the step whose loads are done. The rank no longer reads any entry that it named."""
    rings: dict[int, bytes] = field(default_factory=dict)
    """By rank: the ring that the rank is attached to. The one that it reported before stays mapped for a while."""
    settled: list[bytes] = field(default_factory=list)
    """Keys of saves that are over: the output is stored, or will not be."""
    failed: set[str] = field(default_factory=set)
    """Identifiers whose load failed. The encoder cache has zeros in their place."""
    differs: list[tuple[bytes, float]] = field(default_factory=list)
    """Keys of stored outputs that differ from the output encoded here, and the difference (`canary.difference`)."""
    encoded_rows: int = 0
    encode_s: float = 0.0
    """Seconds for the `encoded_rows`: their part of the time from the step's beginning until they were stored."""
    counts: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: Report) -> Report:
        """Merges two reports."""
        return Report(
            loaded={
                rank: max(report.loaded.get(rank, 0) for report in (self, other))
                for rank in self.loaded.keys() | other.loaded.keys()
            },
            rings={**self.rings, **other.rings},
            settled=self.settled + other.settled,
            failed=self.failed | other.failed,
            differs=self.differs + other.differs,
            encoded_rows=self.encoded_rows + other.encoded_rows,
            encode_s=self.encode_s + other.encode_s,
            counts=self.counts + other.counts,
        )
