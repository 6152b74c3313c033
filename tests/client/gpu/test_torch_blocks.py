"""TorchBlocks keeps its promises: on a stand-in for torch.cuda, and on a card where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from tensord.client.gpu.torch_blocks import TorchBlocks, TorchBlockStream
from tensord.errors import UsageError

from ..device.standin import Accelerator
from .block_conformance import BLOCK_BYTES, BLOCKS, Array, BlockConformance, BlockRig, locked, whole

MIB = 1 << 20


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
