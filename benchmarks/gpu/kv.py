"""Checks the KV connector's worker on a real NVIDIA card: what gpu_check.py runs for `client/vllm/kv/`.

Owns: these checks. Does not own: the report, the daemon, nor an engine: the worker gets a KV cache and jobs as vLLM
gives them. Needs vLLM with CUDA; without it the checks say so and decide nothing.

    registered  the driver takes the read-only ring, and copies from there are byte-equal
    refused, staged    where the driver refuses it, or the setting is 0, copies through a buffer are byte-equal
    zeroed      bytes that were zeroed on the card beforehand are the loaded ones afterwards, and no others are written
    late        a store has what a late card computed; a load comes after what the card was told before
    pins        the ticket of a load is not reported while its copies wait
    figures     GB/s of loads, and of stores until the blocks are copied out of the KV cache
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import tensord
from gpu.card import ROUNDS, Report

if TYPE_CHECKING:
    from tensord.client.gpu.torch_blocks import TorchBlocks

BLOCKS: Final = 64
PER_CHUNK: Final = 2
LAYERS: Final = 32
PAGE_BYTES: Final = 64 << 10
PATIENCE_S: Final = 60.0
HOLD_CYCLES: Final = 1_000_000_000
Array = np.ndarray[Any, Any]


class KVCard:
    """One card as the checks use it.

    Args:
        memory: the KV cache, LAYERS tensors of (BLOCKS, PAGE_BYTES) int8; `noise`: as many that the blocks are
            filled from.
        blocks, refusing: the device of the copies, and one whose driver registers nothing.
        launch: queues a call of torch on the step's stream.
        hold: queues there that it stays where it is for some tenths of a second.
        synchronize: waits until the card has done everything.
    """

    def __init__(
        self,
        memory: Sequence[Any],
        noise: Sequence[Any],
        blocks: TorchBlocks,
        refusing: TorchBlocks,
        *,
        launch: Callable[[Callable[[], Any]], Any],
        hold: Callable[[], Any],
        synchronize: Callable[[], Any],
    ) -> None:
        self.memory = memory
        self.noise = noise
        self.blocks = blocks
        self.refusing = refusing
        self.launch = launch
        self.hold = hold
        self.synchronize = synchronize

    def write(self) -> None:
        """Queues noise for all blocks. The noise is on the card already: a copy from the host would wait."""
        for tensor, noise in zip(self.memory, self.noise, strict=True):
            self.launch(partial(tensor.copy_, noise))

    def zero(self) -> None:
        """Queues zeros for all blocks."""
        for tensor in self.memory:
            self.launch(tensor.zero_)

    def bytes_of(self, blocks: Sequence[int]) -> Array:
        """Blocks as they are once the card is done, by torch alone."""
        self.synchronize()
        read: Array = np.stack([tensor[list(blocks)].cpu().numpy() for tensor in self.memory])
        return read


class RefusingDriver:
    """A driver that registers nothing."""

    def cuMemHostRegister_v2(self, *_: Any) -> int:
        return 801

    def cuGetErrorName(self, *_: Any) -> int:
        return 0


def cards(torch: Any, first: int) -> list[KVCard]:
    """This card, and another one if there is one.

    Raises:
        ImportError: there is no vLLM.
        AttributeError: vLLM was built without CUDA.
    """
    from vllm import _custom_ops as ops

    from tensord.client.gpu.torch_blocks import TorchBlocks

    # Loads the kernels, and fails where there are none.
    swap = torch.ops._C_cache_ops.swap_blocks_batch and ops.swap_blocks_batch
    found = []
    others = [index for index in range(torch.cuda.device_count()) if index != first]
    for index in [first, *others[:1]]:
        device = torch.device("cuda", index)
        shape = (BLOCKS, PAGE_BYTES)

        def hold(index: int = index) -> None:
            with torch.cuda.device(index):
                torch.cuda._sleep(HOLD_CYCLES)

        found.append(
            KVCard(
                [torch.zeros(shape, dtype=torch.int8, device=device) for _ in range(LAYERS)],
                [torch.randint(-128, 128, shape, dtype=torch.int8, device=device) for _ in range(LAYERS)],
                TorchBlocks(index, swap),
                TorchBlocks(index, swap, driver=RefusingDriver()),
                launch=lambda call: call(),
                hold=hold,
                synchronize=partial(torch.cuda.synchronize, index),
            )
        )
    return found


class Jobs:
    """A worker over a card's KV cache, and the scheduler's end of its jobs."""

    def __init__(
        self, socket: str, client: tensord.Client, card: KVCard, device: TorchBlocks, registered_bytes_max: int
    ) -> None:
        from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

        from tensord.client.vllm.kv.copying.copies import Copies
        from tensord.client.vllm.kv.worker import KVWorker

        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, PAGE_BYTES) for tensor in card.memory],
            [[CanonicalKVCacheRef(number, PAGE_BYTES) for number in range(LAYERS)]],
        )
        copies = Copies(
            device,
            caches,
            PER_CHUNK,
            registered_bytes_max=registered_bytes_max,
        )
        assert copies.ring is not None
        self.ring = copies.ring
        self.worker = KVWorker(socket, "gpu_kv worker", rank=0, copies=copies)
        self._client = client
        self._jobs = 0
        self._until(lambda: self.worker._background.connected, "the worker attaches")

    def store(self, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Submits a store of whole chunks."""
        from tensord.client.vllm.kv.jobs import StoreChunks

        self._jobs += 1
        chunks = StoreChunks([len(keys)], [list(keys)], [[b""] * len(keys)])
        self.worker.submit_store(self._jobs, self._spec(blocks), chunks)
        return self._jobs

    def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> tuple[int, list[tensord.Lease]]:
        """Submits a load; the leases are the pins of its chunks."""
        from tensord.client.vllm.kv.jobs import LoadChunks

        self._jobs += 1
        leases = [lease for key in keys if (lease := self._client.get(key)) is not None]
        handles = [lease.handle() or b"" for lease in leases]
        self.worker.submit_load(self._jobs, LoadChunks(self._jobs, [len(keys)], [handles]), self._spec(blocks))
        return self._jobs, leases

    def over(self, job: int) -> None:
        """Returns when a job is over."""
        self._until(lambda: any(result.job_id == job for result in self.worker.get_finished()), f"job {job} is over")

    def stored(self, keys: Sequence[bytes]) -> None:
        self._until(lambda: all(self._client.contains(key) for key in keys), "the chunks are stored")

    def _spec(self, blocks: Sequence[int]) -> Any:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec

        return GPULoadStoreSpec(list(blocks), [len(blocks)], [0])

    @staticmethod
    def _until(condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {PATIENCE_S:g} s")
            time.sleep(0.001)


def check_kv(report: Report, socket: str, client: tensord.Client, torch: Any, index: int) -> None:
    """All checks, on one card or two."""
    try:
        found = cards(torch, index)
    except (ImportError, AttributeError) as error:
        report.check("KV blocks: vLLM with CUDA is installed", None, f"{error}; nothing about KV blocks was checked")
        return
    for number, card in enumerate(found):
        check_card(report, socket, client, card, f"KV, card {number}")
    if len(found) < 2:
        report.check("KV blocks on two cards", None, "there is one card")


def check_card(report: Report, socket: str, client: tensord.Client, card: KVCard, name: str) -> None:
    """All checks on one card."""
    for way, device, bytes_max in (
        ("registered", card.blocks, 1 << 40),
        ("refused", card.refusing, 1 << 40),
        ("staged", card.blocks, 0),
    ):
        jobs = Jobs(socket, client, card, device, bytes_max)
        try:
            _check_way(report, client, card, jobs, f"{name}, {way}")
            if way == "registered":
                size_bytes = jobs.ring.registered_bytes
                refusal = jobs.ring.refusal or "pages of the ring are missing, or the daemon gave some back"
                report.check(
                    f"{name}: the ring is registered with the driver",
                    True if size_bytes else None,
                    f"{size_bytes >> 20} MiB" if size_bytes else f"no, so a buffer was used: {refusal}",
                )
            else:
                held = jobs.ring.registered_bytes == 0
                report.check(f"{name}, {way}: nothing is registered", held, "copied through a buffer")
        finally:
            jobs.worker.shutdown()


def _check_way(report: Report, client: tensord.Client, card: KVCard, jobs: Jobs, name: str) -> None:
    count = BLOCKS // 4
    source, target = list(range(1, 1 + count)), list(range(BLOCKS - count, BLOCKS))
    keys = [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(count // PER_CHUNK)]

    # late: the worker must wait for the stream of the step, on the card.
    card.zero()
    card.hold()
    card.write()
    jobs.over(jobs.store(keys, source))
    jobs.stored(keys)
    expected = card.bytes_of(source)
    parts = [lease.tree for key in keys if (lease := client.get(key)) is not None]
    stored = np.concatenate(parts).reshape(count, LAYERS, PAGE_BYTES).swapaxes(0, 1).view(np.int8)
    report.check(f"{name}: a store has what a late card computed", np.array_equal(stored, expected), f"{count} blocks")
    del parts, stored

    # pins: no ticket comes back while the copies wait for the step's stream.
    card.hold()
    card.zero()
    job, leases = jobs.load(keys, target)
    early = jobs.worker.report()
    waits = not card.blocks.mark().wait(0)
    jobs.over(job)
    told = jobs.worker.report()
    held = early is None and told is not None and told.done == {job: 1}
    report.check(
        f"{name}: pins are held while the copies wait",
        held if waits else None,
        "the ticket came back afterwards" if waits else "the card was done before the check",
    )
    del leases

    # zeroed: exactly the loaded blocks differ from zero.
    loaded = card.bytes_of(target)
    report.check(f"{name}: loaded blocks are byte-equal", np.array_equal(loaded, expected), f"{count} blocks")
    others = card.bytes_of([number for number in range(BLOCKS) if number not in target])
    report.check(f"{name}: no other block was written", not others.any(), f"{BLOCKS - count} blocks are zero")
    report.check(f"{name}: no load failed", not jobs.worker.take_failed(), "as vLLM is told")
    _figures(report, client, jobs, name)


def _figures(report: Report, client: tensord.Client, jobs: Jobs, name: str) -> None:
    """Each job has half of the KV cache. A load is timed once its part of the ring was read, and registered, before."""
    blocks = list(range(BLOCKS // 2))
    size_bytes = len(blocks) * LAYERS * PAGE_BYTES
    stores_s, loads_s = [], []
    for number in range(ROUNDS):
        keys = [hashlib.sha256(f"{name} {number} {at}".encode()).digest() for at in range(len(blocks) // PER_CHUNK)]
        started = time.perf_counter()
        jobs.over(jobs.store(keys, blocks))
        stores_s.append(time.perf_counter() - started)
        jobs.stored(keys)
        for _ in ("first", "timed"):
            started = time.perf_counter()
            job, leases = jobs.load(keys, blocks)
            jobs.over(job)
            took_s = time.perf_counter() - started
            jobs.worker.report()
            del leases
        loads_s.append(took_s)
        client.evict(*keys)
    report.figure(f"{name}: store", size_bytes / median(stores_s))
    report.figure(f"{name}: load", size_bytes / median(loads_s))
