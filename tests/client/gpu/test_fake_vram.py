"""FakeVram keeps every Device's promises, and punishes who does not wait, or drops too early."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensord.shm.payloads.dtypes import _DTYPES
from tensord.testing.fake_allocator import BLOCK_BYTES
from tensord.testing.fake_vram import FakeCard, FakeStream, FakeVram

from ...daemon_process import PATIENCE_S
from .conformance import CAPACITY_BYTES, GARBAGE, Conformance, Rig, landed


class FakeRig(Rig):
    dtypes = (*_DTYPES, "|S3", "<U2", "<M8[ns]")

    def __init__(self, folder: Path) -> None:
        self.card = FakeCard(folder, "card0", CAPACITY_BYTES)
        self.device: FakeVram = FakeVram(self.card)

    def upload(self, array: Any) -> Any:
        return self.device.upload(array)

    def empty(self, size_bytes: int) -> Any:
        return self.device.empty(size_bytes, np.uint8)

    def hold(self) -> AbstractContextManager[Any]:
        return self.device.stream.hold()

    def now(self, tensor: Any) -> Any:
        return tensor.peek()

    def slow_copies(self) -> None:
        self.device.copies.delay_s = 0.02

    def gauge(self) -> int:
        (line,) = self.card.gauge_file.read_text().splitlines()
        name, used, total = line.split()
        assert (name, total) == ("card0", str(CAPACITY_BYTES))
        return int(used)

    def another(self) -> Any:
        return FakeVram(FakeCard(self.card.folder / "other", "card1", CAPACITY_BYTES)).empty(4, np.uint8)


@pytest.fixture
def rig(tmp_path: Path) -> FakeRig:
    return FakeRig(tmp_path)


class TestFakeVram(Conformance):
    """The fixture is the module's."""


def garbage(array: np.ndarray[Any, Any]) -> bool:
    return set(array.tobytes()) == {GARBAGE}


def test_what_is_read_before_the_streams_write_or_after_a_drop_is_garbage(rig: FakeRig) -> None:
    array = np.zeros(BLOCK_BYTES, np.uint8)
    with rig.hold():
        tensor = rig.device.upload(array)
        assert garbage(tensor.peek())
        assert garbage(landed(rig.device, tensor, FakeStream().mark()))
    assert (tensor.numpy() == array).all()
    lies_at = tensor._array
    del tensor
    gc.collect()
    assert rig.device.mark().wait(PATIENCE_S)
    assert garbage(lies_at)
    assert garbage(rig.device.empty(BLOCK_BYTES, np.uint8).numpy())


@pytest.mark.parametrize("lends", [False, True])
def test_memory_under_another_streams_work_is_not_handed_out_when_it_was_lent(rig: FakeRig, lends: bool) -> None:
    """The bug that `lend` is there for, without it and with it: a reader on another stream than the maker's."""
    device, other = rig.device, FakeStream()
    tensor = device.upload(np.full(BLOCK_BYTES, 1, np.uint8))
    assert device.mark().wait(PATIENCE_S)
    seen: list[bytes] = []
    with other.hold(), device.on(other):
        if lends:
            device.lend({"x": tensor})
        lies_at = tensor._array
        device.launch(lambda: seen.append(lies_at.tobytes()))
        last = device.mark()
        del tensor
        gc.collect()
        with device.on(device.stream):
            # It may only be another tensor's once the other stream is past its kernel.
            reused = device.upload(np.full(BLOCK_BYTES, 2, np.uint8))
            assert device.mark().wait(PATIENCE_S)
    assert last.wait(PATIENCE_S)
    assert seen == [(b"\1" if lends else b"\2") * BLOCK_BYTES]
    del reused


WITHOUT_TORCH = """
import sys, tempfile; sys.modules["torch"] = None
import numpy as np, tensord.client.gpu.interface, tensord.client.device.torch_device
from tensord.testing.fake_vram import FakeCard, FakeVram
device = FakeVram(FakeCard(tempfile.mkdtemp(), "card", 1 << 20))
tree = device.to_device({"x": np.arange(5), "y": "z"})
assert tree["x"].numpy().tolist() == [0, 1, 2, 3, 4]
"""


def test_the_fake_runs_without_torch_and_the_interface_loads_none() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True)
