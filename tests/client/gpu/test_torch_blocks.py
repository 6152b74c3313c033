"""TorchBlocks keeps its promises: on a stand-in for torch.cuda, and on a card where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from mmap import MAP_PRIVATE, PROT_READ, mmap
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from tensord.client.gpu.torch_blocks import TorchBlocks, TorchBlockStream
from tensord.errors import UsageError

from ...daemon_process import PATIENCE_S
from ..device.standin import Accelerator

Array = np.ndarray[Any, Any]
MIB = 1 << 20
BLOCK_BYTES = 4096
BLOCKS = 8


class BlockRig(Protocol):
    """A device under test, with a memory of BLOCKS blocks, (BLOCKS, BLOCK_BYTES) uint8."""

    device: TorchBlocks
    memory: torch.Tensor

    def write(self, values: Array) -> None:
        """Queues on the calling thread's current stream that the blocks hold `values`."""

    def read(self) -> Array:
        """The blocks as they are now. Waits for nothing but its own copy."""

    def hold(self) -> AbstractContextManager[Any]:
        """Within the block the calling thread's current stream stays where it is."""

    def slow(self, stream: TorchBlockStream) -> None:
        """What is queued on the stream from now on takes a while."""


def noise(seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)


def whole(rig: BlockRig, host: Array, *, to_host: bool) -> Array:
    """The copies of all blocks, the last block first."""
    order = np.arange(BLOCKS, dtype=np.int64)[::-1]
    card, memory = (base + order * BLOCK_BYTES for base in (rig.memory.data_ptr(), host.ctypes.data))
    sizes = np.full(BLOCKS, BLOCK_BYTES, np.int64)
    return np.stack([card, memory, sizes] if to_host else [memory, card, sizes])


def locked(rig: BlockRig) -> Array:
    return rig.device.page_locked(BLOCKS * BLOCK_BYTES).reshape(BLOCKS, BLOCK_BYTES)


class BlockConformance:
    """The promises. A subclass has a fixture `rig`."""

    def test_blocks_go_to_the_card_and_come_back_without_a_changed_byte(self, rig: BlockRig) -> None:
        up, down = rig.device.stream(to_host=False), rig.device.stream(to_host=True)
        source, target = locked(rig), locked(rig)
        source[:] = noise(1)
        up.copy(whole(rig, source, to_host=False))
        arrived = up.mark()
        down.copy(whole(rig, target, to_host=True), arrived)
        assert down.mark().wait(PATIENCE_S)
        assert np.array_equal(target, noise(1))

    def test_a_copy_waits_for_the_mark_and_its_caller_does_not(self, rig: BlockRig) -> None:
        down, target = rig.device.stream(to_host=True), locked(rig)
        target[:] = 0
        with rig.hold():
            rig.write(noise(2))
            made = rig.device.mark()
            down.copy(whole(rig, target, to_host=True), made)
            done = down.mark()
            assert not done.wait(0)
            assert not target.any()
        assert done.wait(PATIENCE_S)
        assert np.array_equal(target, noise(2))

    def test_a_mark_is_reached_only_after_the_copies_before_it(self, rig: BlockRig) -> None:
        up, source = rig.device.stream(to_host=False), locked(rig)
        source[:] = noise(3)
        rig.slow(up)
        up.copy(whole(rig, source, to_host=False))
        up.copy(np.empty((3, 0), np.int64))
        assert up.mark().wait(PATIENCE_S)
        assert np.array_equal(rig.read(), noise(3))

    def test_memory_mapped_read_only_is_registered_or_refused_and_both_leave_the_device_working(
        self, rig: BlockRig, tmp_path: Path
    ) -> None:
        path = tmp_path / "ring"
        path.write_bytes(noise(4).tobytes())
        with path.open("rb") as file:
            memory = mmap(file.fileno(), BLOCKS * BLOCK_BYTES, flags=MAP_PRIVATE, prot=PROT_READ)
        source: Array = np.frombuffer(memory, np.uint8).reshape(BLOCKS, BLOCK_BYTES)
        refusal = rig.device.register(source.ctypes.data, source.nbytes)
        up = rig.device.stream(to_host=False)
        staged = locked(rig)
        staged[:] = source
        up.copy(whole(rig, staged if refusal else source, to_host=False))
        assert up.mark().wait(PATIENCE_S)
        assert np.array_equal(rig.read(), noise(4))
        if refusal:
            pytest.skip(f"the card registers no memory that is mapped read-only: {refusal}")
        rig.device.unregister(source.ctypes.data)


class StandinRig(BlockRig):
    def __init__(self, index: int = 0) -> None:
        self.card = Accelerator(MIB, index=index)
        self.device: TorchBlocks = TorchBlocks(
            index, self.card.swap_blocks_batch, accelerator=self.card, driver=self.card.driver
        )
        self.memory = self.card.empty((BLOCKS, BLOCK_BYTES), torch.uint8)

    def write(self, values: Array) -> None:
        source = torch.from_numpy(values)
        self.card.launch(lambda: self.memory.copy_(source))

    def read(self) -> Array:
        return self.memory.numpy().copy()

    def hold(self) -> AbstractContextManager[Any]:
        return self.card.hold()

    def slow(self, stream: TorchBlockStream) -> None:
        stream.stream.belt.delay_s = 0.02


class CudaRig(BlockRig):
    def __init__(self) -> None:
        ops = pytest.importorskip("vllm._custom_ops")
        self.device = TorchBlocks(0, ops.swap_blocks_batch)
        self.memory = torch.zeros((BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda:0")

    def write(self, values: Array) -> None:
        self.memory.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)

    def read(self) -> Array:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            read: Array = self.memory.cpu().numpy()
            return read

    @contextmanager
    def hold(self) -> Iterator[None]:
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
        yield

    def slow(self, stream: TorchBlockStream) -> None:
        with torch.cuda.stream(stream.stream):
            torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]


@pytest.fixture
def rig() -> StandinRig:
    return StandinRig()


class TestOnAStandIn(BlockConformance):
    """The fixture is the module's."""


@pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip), reason="no CUDA card")
class TestOnACard(BlockConformance):
    @pytest.fixture
    def rig(self) -> CudaRig:
        return CudaRig()


def test_without_page_locked_memory_copies_are_made_all_the_same(rig: StandinRig) -> None:
    rig.card.lockable = False
    source = locked(rig)
    source[:] = 7
    up = rig.device.stream(to_host=False)
    up.copy(whole(rig, source, to_host=False))
    assert up.mark().wait()
    assert (rig.read() == 7).all()


def test_a_refusal_names_the_call_and_the_error(rig: StandinRig) -> None:
    rig.card.driver.refusal = 801
    assert rig.device.register(4096, 4096) == "cuMemHostRegister gave 801 (CUDA_ERROR_801)"
    with pytest.raises(RuntimeError, match="cuMemHostUnregister gave 713"):
        rig.device.unregister(4096)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_nothing_is_registered_and_it_says_so(rig: StandinRig) -> None:
    device = TorchBlocks(0, rig.card.swap_blocks_batch, accelerator=rig.card)
    assert "the driver cannot be called: libcuda.so.1" in device.register(4096, 4096)


def test_a_card_that_is_not_there_is_refused(rig: StandinRig) -> None:
    with pytest.raises(UsageError, match="device is 1, and torch sees 1 cards"):
        TorchBlocks(1, rig.card.swap_blocks_batch, accelerator=rig.card)


def test_each_call_selects_its_card_whichever_the_calling_thread_has_chosen() -> None:
    rig = StandinRig(1)
    rig.card.contexts.clear()
    stream = rig.device.stream(to_host=False)
    stream.copy(whole(rig, locked(rig), to_host=False), rig.device.mark())
    done = stream.mark()
    assert rig.device.register(4096, 4096) == ""
    rig.device.unregister(4096)
    assert rig.card.contexts == {1}
    assert done.wait()
