"""What TorchBlocks promises: one suite, run against torch on a stand-in, and on a real card where there is one.

Owns: the promises. Does not own a device: a test module subclasses `BlockConformance` and says in a fixture `rig` how
memory is made on its own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from mmap import MAP_PRIVATE, PROT_READ, mmap
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from tensord.client.gpu.torch_blocks import TorchBlocks, TorchBlockStream

from ...daemon_process import PATIENCE_S

Array = np.ndarray[Any, Any]
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
