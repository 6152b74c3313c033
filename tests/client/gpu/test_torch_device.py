"""TorchDevice keeps every Device's promises: on a stand-in for torch.cuda, and on a real card where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch

from tensord.client.device.torch_device import TorchDevice
from tensord.client.gpu import gpu_name
from tensord.errors import UnsupportedLeaf, UsageError
from tensord.shm.payloads.dtypes import _TORCH_NAMES
from tensord.shm.payloads.tensors import tensor_over

from ..device.standin import PLACE, Accelerator, LateStream
from .conformance import CAPACITY_BYTES, KIB, Conformance, Rig, bits, landed

DTYPES = tuple(name for name, of_torch in _TORCH_NAMES.items() if hasattr(torch, of_torch))


class StandinRig(Rig):
    dtypes = DTYPES

    def __init__(self) -> None:
        self.card = Accelerator(CAPACITY_BYTES, **PLACE)
        self.device: TorchDevice = TorchDevice(0, accelerator=self.card)

    def upload(self, array: Any) -> Any:
        source = tensor_over(torch, array.copy())
        tensor = self.card.empty(source.shape, source.dtype)
        self.card.launch(lambda: tensor.copy_(source))
        return tensor

    def empty(self, size_bytes: int) -> Any:
        return self.card.empty((size_bytes,), torch.uint8)

    def hold(self) -> AbstractContextManager[Any]:
        return self.card.hold()

    def now(self, tensor: Any) -> Any:
        return tensor.clone().numpy()

    def slow_copies(self) -> None:
        self.device._copies.belt.delay_s = 0.02

    def gauge(self) -> int:
        return self.card.memory_reserved(0)

    def another(self) -> Any:
        return torch.empty(4, device="meta")


class CudaRig(Rig):
    dtypes = DTYPES
    full_at_bytes = None

    def __init__(self) -> None:
        self.device = TorchDevice(0)

    def upload(self, array: Any) -> Any:
        return tensor_over(torch, array.copy()).to("cuda:0", non_blocking=True)

    def empty(self, size_bytes: int) -> Any:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cuda:0")

    @contextmanager
    def hold(self) -> Iterator[None]:
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
        yield

    def now(self, tensor: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            return tensor.cpu().numpy()

    def slow_copies(self) -> None:
        assert isinstance(self.device, TorchDevice)
        with torch.cuda.stream(self.device._copies):
            torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]

    def gauge(self) -> int:
        return self.device.reading()[0]

    def another(self) -> Any:
        return torch.empty(4, device="meta")


@pytest.fixture
def rig() -> StandinRig:
    return StandinRig()


class TestOnAStandIn(Conformance):
    """The fixture is the module's."""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or HIP card")
class TestOnACard(Conformance):
    @pytest.fixture
    def rig(self) -> CudaRig:
        return CudaRig()


def test_conjugates_and_gradients_are_resolved_on_the_way(rig: StandinRig) -> None:
    array = np.array([1 + 2j, 3 - 4j], "<c8")
    tensor = rig.upload(array)
    assert rig.device.mark().wait()
    host = landed(rig.device, {"c": tensor.conj(), "g": torch.nn.Parameter(tensor.real)})
    assert bits(host["c"]) == bits(array.conj())
    assert bits(host["g"]) == bits(array.real)


def test_a_promoted_tensor_belongs_to_the_side_stream_and_is_lent_to_the_caller_s(rig: StandinRig) -> None:
    mine = LateStream()
    with rig.card.stream(mine):
        made = rig.device.to_device([np.arange(8), np.arange(4)])
    assert rig.card.lent == [(tensor.data_ptr(), mine) for tensor in made]


GPU_UUID = UUID("11111111-2222-3333-4444-555555555555")
SLICE_UUID = UUID("99999999-8888-7777-6666-555555555555")


def driver(monkeypatch: pytest.MonkeyPatch, **calls: Any) -> None:
    """The driver's library has these calls; without any there is no library."""

    def library(*names: str) -> Any:
        if not calls:
            raise OSError("no such library")
        return SimpleNamespace(**calls)

    monkeypatch.setattr(gpu_name, "_library", library)


def cuda(own: UUID) -> dict[str, Any]:
    return {
        "cuInit": lambda flags: 0,
        "cuDeviceGet": lambda number, ordinal: 0,
        "cuDeviceGetUuid": lambda told, number: setattr(told, "raw", GPU_UUID.bytes),
        "cuDeviceGetUuid_v2": lambda told, number: setattr(told, "raw", own.bytes),
    }


@pytest.mark.parametrize(
    ("calls", "properties", "expected"),
    [
        (cuda(GPU_UUID), PLACE, "0000:65:00.0"),
        (cuda(SLICE_UUID), PLACE, f"MIG-{SLICE_UUID}"),
        ({}, PLACE, "0000:65:00.0"),
        ({}, {"uuid": "AB-1"}, "gpu-ab-1"),
    ],
    ids=["a whole GPU", "a slice", "no library", "neither library nor address"],
)
def test_a_gpu_is_named_by_its_address_and_a_slice_by_its_uuid(
    monkeypatch: pytest.MonkeyPatch, calls: dict[str, Any], properties: dict[str, Any], expected: str
) -> None:
    driver(monkeypatch, **calls)
    assert TorchDevice(accelerator=Accelerator(KIB, **properties)).name == expected


def test_without_any_of_them_a_name_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch)
    with pytest.raises(UsageError, match="pass name="):
        TorchDevice(accelerator=Accelerator(KIB))


def test_the_partitions_of_an_amd_card_are_named_by_their_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(told: Any, told_bytes: int, number: Any) -> int:
        told.value = f"0000:0C:00.{number.value}".encode()
        return 0

    driver(monkeypatch, hipDeviceGetPCIBusId=tell)
    told: Any = SimpleNamespace(version=SimpleNamespace(hip="7.0"))
    names = [gpu_name.gpu_name(told, Accelerator(KIB), index) for index in range(4)]
    assert names == ["0000:0c:00.0", "0000:0c:00.1", "0000:0c:00.2", "0000:0c:00.3"]


@pytest.mark.parametrize(("device", "what"), [("cuda:0", "cuda:0"), (1, "device is 1"), (-1, "device is -1")])
def test_a_device_that_is_not_there_is_refused(device: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        TorchDevice(device, accelerator=Accelerator(KIB, **PLACE))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so() -> None:
    with pytest.raises(UsageError, match="sees no CUDA or HIP card"):
        TorchDevice()


def test_leaves_that_no_payload_can_have_are_refused_by_place(rig: StandinRig) -> None:
    sparse = torch.zeros(3, 3).to_sparse()
    with pytest.raises(UnsupportedLeaf, match=r"tree\['s'\].*to_dense"):
        rig.device.bytes_of({"s": sparse})
    with pytest.raises(UnsupportedLeaf, match=r"^tree\[1\]: "):
        rig.device.to_device([1, np.array(["x"])])


@pytest.mark.parametrize("size_bytes", [0, 100])
def test_a_tensor_whose_memory_was_freed_is_neither_registered_nor_copied(rig: StandinRig, size_bytes: int) -> None:
    tensor = rig.upload(np.ones(4 * KIB, np.uint8))
    mark = rig.device.mark()
    leaving = rig.device.outgoing([tensor], mark)
    tensor.untyped_storage().resize_(size_bytes)
    says = rf"^tree\[0\] .* needs 4096 bytes of its storage, which has {size_bytes}"
    for call in (
        lambda: rig.device.bytes_of([tensor]),
        lambda: rig.device.outgoing([tensor], mark),
        lambda: leaving[0].read(np.empty(10, np.uint8), 0, 10),
    ):
        with pytest.raises(UnsupportedLeaf, match=says):
            call()
