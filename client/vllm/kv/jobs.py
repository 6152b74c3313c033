"""The messages between the manager in the scheduler's process and the workers.

Owns: their fields. Does not own: their transport. vLLM pickles them.

Invariants: they contain only bytes, numbers, strings and containers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import LoadStoreSpec


@dataclass(slots=True)
class LoadChunks(LoadStoreSpec):  # type: ignore[misc, unused-ignore]
    """Pinned chunks to load.

    `ticket`: the number by which a worker says that it no longer reads them. `counts`: chunks of each KV cache group.
    `handles`: by rank, the handles of the chunks, group after group (`Lease.handle`).
    """

    ticket: int
    counts: list[int]
    handles: list[list[bytes]]


@dataclass(slots=True)
class StoreChunks(LoadStoreSpec):  # type: ignore[misc, unused-ignore]
    """Chunks to store.

    `counts` as in LoadChunks. `keys`: by rank, the keys of the chunks. `parents`: by rank, the key of the chunk before
    each, b"" for none. `agent`: the agent that the chunks belong to, "" for none.
    """

    counts: list[int]
    keys: list[list[bytes]]
    parents: list[list[bytes]]
    agent: str = ""


@dataclass
class WorkerReport(OffloadingWorkerMetadata):  # type: ignore[misc, unused-ignore]
    """From the workers to the manager, of one rank or merged from several, beside vLLM's own report."""

    done: Counter[int] = field(default_factory=Counter)
    """By ticket: how many ranks no longer read its chunks."""
    failed: dict[int, set[int]] = field(default_factory=dict)
    """By ticket: positions of chunks that could not be loaded."""
    damaged: set[bytes] = field(default_factory=set)
    """Keys of entries that are not what was stored, or not what this engine stores."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        theirs = super().aggregate(other)
        merged = WorkerReport(theirs.completed_jobs, theirs.transfer_stats)
        for report in (self, other):
            if isinstance(report, WorkerReport):
                merged.done.update(report.done)
                for ticket, positions in report.failed.items():
                    merged.failed.setdefault(ticket, set()).update(positions)
                merged.damaged |= report.damaged
        return merged


def with_theirs(news: WorkerReport | None, theirs: OffloadingWorkerMetadata | None) -> WorkerReport | None:
    """A rank's report with that of vLLM. It is a WorkerReport whenever there is one: vLLM merges the ranks' reports
    with the method of the first, and vLLM's own would drop what the others have of ours."""
    if theirs is None:
        return news
    report = news or WorkerReport()
    report.completed_jobs, report.transfer_stats = theirs.completed_jobs, theirs.transfer_stats
    return report
