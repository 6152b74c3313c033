"""A worker with a KV cache of its own, in host memory or on a stand-in card, and the other end of its jobs.

Owns: the worker, its KV cache, and the leases that a scheduler would hold. Does not own: the daemon.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    TransferResult,
)

import tensord
from tensord.client.gpu.torch_blocks import TorchBlocks
from tensord.client.vllm.kv.copying.copies import Copies
from tensord.client.vllm.kv.copying.host_memory import HostBlocks
from tensord.client.vllm.kv.jobs import LoadChunks, StoreChunks, WorkerReport
from tensord.client.vllm.kv.worker import KVWorker

from ...client.device.standin import Accelerator
from ...daemon_process import RING_BYTES, Daemon, until

Array = np.ndarray[Any, Any]
BLOCKS = 24
PER_CHUNK = 2
PAGES = ((4096, 4096), (3072, 2560), (512, 512))
"""For each layer the bytes from a block to the next, and the bytes that are stored."""
GROUPS = ((0, 1), (2,))
"""The layers of each group."""
STORED_BYTES = tuple(sum(PAGES[layer][1] for layer in layers) for layers in GROUPS)


def key(number: int) -> bytes:
    return hashlib.sha256(b"chunk %d" % number).digest()


@contextmanager
def whole_daemon(ring_bytes: int = RING_BYTES) -> Iterator[Daemon]:
    """A daemon whose whole ring is in memory."""
    with Daemon(memory_prefault=True, ring_bytes=ring_bytes) as daemon:
        daemon.start()
        daemon.until(lambda status: status["store"]["resident_bytes"] == ring_bytes, "the whole ring is there")
        yield daemon


class WorkerStand:
    """A worker of rank 0. `card`: a stand-in card for its KV cache; None for host memory."""

    def __init__(self, daemon: Daemon, card: Accelerator | None, *, registered_bytes_max: int = 1 << 30) -> None:
        self.daemon = daemon
        self.card = card
        self.client = tensord.Client(daemon.socket)
        assert self.client.wait_connected(30)
        self.tensors = [self._memory(BLOCKS, size_bytes) for size_bytes, _ in PAGES]
        self.copies = self._copies(registered_bytes_max)
        self.worker = KVWorker(str(daemon.socket), "worker", rank=0, copies=self.copies)
        self._jobs = 0
        self._leases: dict[int, list[tensord.Lease]] = {}
        until(lambda: self.worker._background.connected, "the worker is attached")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()
        self._leases.clear()
        self.client.close()

    # ---- the KV cache

    def write(self, seed: int) -> None:
        """Queues that all blocks hold noise of this seed."""
        for number, tensor in enumerate(self.tensors):
            values = np.random.default_rng([seed, number]).integers(0, 256, tuple(tensor.shape), np.uint8)
            self.fill(tensor, torch.from_numpy(values.view(np.int8)))

    def fill(self, tensor: torch.Tensor, values: torch.Tensor | int) -> None:
        def kernel() -> None:
            tensor.fill_(values) if isinstance(values, int) else tensor.copy_(values)

        if self.card is None:
            kernel()
        else:
            self.card.launch(kernel)

    def zero(self) -> None:
        """Queues that all blocks hold zeros."""
        for tensor in self.tensors:
            self.fill(tensor, 0)

    def blocks(self, group: int, numbers: Sequence[int]) -> Array:
        """The stored bytes of blocks, as they are now."""
        layers = [self.tensors[layer].numpy().view(np.uint8)[:, : PAGES[layer][1]] for layer in GROUPS[group]]
        return np.concatenate([layer[list(numbers)] for layer in layers], axis=1)

    # ---- jobs

    def store(self, chunks: Sequence[int], blocks: Sequence[Sequence[int]]) -> int:
        """Submits a store of whole chunks. `chunks`: the numbers that their keys are of, group after group. `blocks`:
        those of each group."""
        names = [key(number) for number in chunks]
        counts = [len(each) // PER_CHUNK for each in blocks]
        job = self._number()
        spec = StoreChunks(counts, [names], [[b""] * len(names)])
        assert self.worker.submit_store(job, _spec(blocks, [0] * len(blocks)), spec)
        return job

    def load(self, chunks: Sequence[int], blocks: Sequence[Sequence[int]], first: Sequence[int] = (0, 0)) -> int:
        """Submits a load of stored chunks, which are pinned until its ticket is back."""
        job = self._number()
        leases = [lease for number in chunks if (lease := self.client.get(key(number))) is not None]
        assert len(leases) == len(chunks)
        self._leases[job] = leases
        handles = [lease.handle() or b"" for lease in leases]
        counts = [
            -(-(begin + len(each)) // PER_CHUNK) if each else 0 for each, begin in zip(blocks, first, strict=True)
        ]
        assert self.worker.submit_load(job, LoadChunks(job, counts, [handles]), _spec(blocks, first))
        return job

    def keep(self, chunks: Sequence[int], blocks: Sequence[Sequence[int]], seed: int = 1) -> None:
        """Stores chunks of noise. Returns when they are in the ring."""
        self.write(seed)
        self.finished(self.store(chunks, blocks))
        self.stored(*chunks)

    def fetch(self, chunks: Sequence[int], blocks: Sequence[Sequence[int]], first: Sequence[int] = (0, 0)) -> int:
        """Loads chunks over zeros. Returns the job once it is over."""
        self.zero()
        job = self.load(chunks, blocks, first)
        self.finished(job)
        return job

    def finished(self, *jobs: int) -> dict[int, TransferResult]:
        """Steps until these jobs are over."""
        done: dict[int, TransferResult] = {}

        def over() -> bool:
            done.update({result.job_id: result for result in self.worker.get_finished()})
            return done.keys() >= set(jobs)

        until(over, f"jobs {jobs} are over")
        return done

    def reported(self) -> WorkerReport:
        """The worker's next report, for which a scheduler gives its pins back."""
        report = until(self.worker.report, "the worker reports")
        assert report is not None
        for ticket in report.done:
            self._leases.pop(ticket).clear()
        return report

    def stored(self, *chunks: int) -> None:
        """Returns when these chunks are in the ring."""
        until(lambda: all(self.client.contains(key(number)) for number in chunks), f"chunks {chunks} are stored")
        until(lambda: self.copies.places.taken_bytes == 0, "nothing waits to be put")

    def _number(self) -> int:
        self._jobs += 1
        return self._jobs

    def _memory(self, *shape: int) -> torch.Tensor:
        if self.card is None:
            return torch.zeros(shape, dtype=torch.int8)
        return self.card.empty(shape, torch.int8)

    def _copies(self, registered_bytes_max: int) -> Copies:
        caches = CanonicalKVCaches(
            [
                CanonicalKVCacheTensor(tensor, size_bytes)
                for tensor, (size_bytes, _) in zip(self.tensors, PAGES, strict=True)
            ],
            [[CanonicalKVCacheRef(layer, PAGES[layer][1]) for layer in layers] for layers in GROUPS],
        )
        card = self.card
        device = card and TorchBlocks(0, card.swap_blocks_batch, accelerator=card, driver=card.driver)
        return Copies(device or HostBlocks(), caches, PER_CHUNK, registered_bytes_max=registered_bytes_max)


def _spec(blocks: Sequence[Sequence[int]], first: Sequence[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec([number for each in blocks for number in each], [len(each) for each in blocks], list(first))
