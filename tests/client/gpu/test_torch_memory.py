"""What TorchDevice does with a process's own memory on a card, and what it leaves alone."""

from __future__ import annotations

import gc
import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tensord.client.device.torch_device import TorchDevice
from tensord.client.gpu import gate as gates
from tensord.client.gpu.gate import Gate, follow_torch

from ...daemon_process import PATIENCE_S
from ..device.standin import PLACE, Accelerator
from .conformance import CAPACITY_BYTES, KIB, bits, landed


@pytest.fixture
def card() -> Accelerator:
    return Accelerator(CAPACITY_BYTES, **PLACE)


def promoted(device: TorchDevice, size_bytes: int) -> Any:
    return device.to_device(np.arange(size_bytes // 4, dtype="<i4"))


def test_only_memory_of_copies_made_here_goes_back_to_the_driver(
    card: Accelerator,
) -> None:
    """An engine has measured what it needs for its largest batch, and its allocator keeps that."""
    device = TorchDevice(0, accelerator=card)
    activations = card.empty((256 * KIB,), torch.uint8)
    del activations
    made = promoted(device, 64 * KIB)
    gc.collect()
    assert device.give_back() == 0
    del made
    gc.collect()
    # Torch would end the process if a pool were destroyed while another thread allocates from one.
    card.gate.count_pools(1)
    assert device.give_back() == 0
    card.gate.count_pools(-1)
    assert device.give_back() == 64 * KIB
    assert card.memory_reserved(0) == 256 * KIB
    assert not card.pools and not card.ruined


def test_small_tensors_share_a_pool_and_it_goes_with_the_last_of_them(
    card: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "POOL_BYTES", 16 * KIB)
    device = TorchDevice(0, accelerator=card)
    made = [promoted(device, 4 * KIB) for _ in range(10)] + [promoted(device, 100 * KIB)]
    assert len(card.pools) == 4
    for gone, freed_bytes in (([10, 3, 2, 1], 100 * KIB), ([0], 16 * KIB), (range(5, -1, -1), 24 * KIB)):
        for number in gone:
            del made[number]
        gc.collect()
        assert device.give_back() == freed_bytes
    assert not card.pools and card.memory_reserved(0) == 0


# ---- allocators without pools or statistics


class Pluggable(Accelerator):
    """As with torch's CUDAPluggableAllocator: neither statistics, nor pools, nor an `empty_cache`."""

    @staticmethod
    def _refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDAPluggableAllocator does not yet support this")

    memory_reserved = empty_cache = _refuses

    def allocated(self, tensor: torch.Tensor) -> torch.Tensor:
        self.called("empty")
        return tensor

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 0, self.total_bytes

    @property
    def MemPool(self) -> Any:
        return type("MemPool", (), {"__new__": self._refuses, "snapshot": None})


@pytest.mark.parametrize("gives_back", ["pool", "all"])
def test_a_pluggable_allocator_is_served_and_named_once_in_the_log(
    gives_back: Any, caplog: pytest.LogCaptureFixture
) -> None:
    device = TorchDevice(0, gives_back=gives_back, accelerator=Pluggable(CAPACITY_BYTES, **PLACE))
    with caplog.at_level(logging.WARNING, "tensord"):
        for _ in range(3):
            made = promoted(device, 4 * KIB)
            assert bits(landed(device, made)) == bits(np.arange(KIB, dtype="<i4"))
            assert device.give_back() == 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("0000:65:00.0: torch's allocator") and "does not yet support" in line


@pytest.mark.parametrize("gives_back", ["pool", "all"])
def test_no_call_makes_a_context_on_another_card(gives_back: Any) -> None:
    """The calling thread's current card is 0; the device is card 1."""
    card = Accelerator(CAPACITY_BYTES, index=1, **PLACE)
    device = TorchDevice(1, gives_back=gives_back, accelerator=card)
    card.contexts.clear()

    def all_calls() -> None:
        made = device.to_device({"a": np.arange(KIB), "b": np.zeros((8, 8), "<f4")})
        made["b"] = made["b"][:, :3]
        mark = device.mark()
        assert mark.wait(PATIENCE_S)
        device.lend(made)
        leaving = device.outgoing(made, mark)
        leaving["a"].read(np.zeros(8 * KIB, np.uint8), 0, 8 * KIB)
        device.bytes_of(made)
        device.reading()
        del made, leaving
        gc.collect()
        device.give_back()
        assert not device.paused

    all_calls()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(all_calls).result(PATIENCE_S)
    assert card.contexts == {1}


# ---- captures


def test_what_an_engines_thread_calls_during_a_capture_does_not_ruin_it(card: Accelerator) -> None:
    device = TorchDevice(0, accelerator=card)
    tensor = promoted(device, KIB)
    before = device.mark()
    with card.capture():
        assert device.paused
        marks = [before, device.mark()]
        device.lend(tensor)
        device.bytes_of(tensor)
        assert not any(mark.wait(0) for mark in marks)
        assert device.give_back() == 0
    assert not card.ruined
    assert all(mark.wait(PATIENCE_S) for mark in marks)


class Graph:
    """As torch.cuda.CUDAGraph."""

    fails = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if self.fails:
            raise RuntimeError("a capture is under way already")

    def capture_end(self) -> None:
        if self.fails:
            raise RuntimeError("the capture failed")


def _cuda_beginAllocateCurrentThreadToPool(device: int, pool: Any) -> None:
    pass


def _cuda_endAllocateToPool(device: int, pool: Any) -> None:
    pass


def test_captures_and_pools_of_torch_tell_the_gate_however_often_it_is_followed() -> None:
    calls = {call.__name__: call for call in (_cuda_beginAllocateCurrentThreadToPool, _cuda_endAllocateToPool)}
    cuda = SimpleNamespace(CUDAGraph=Graph, memory=SimpleNamespace(**calls))
    fake: Any = SimpleNamespace(cuda=cuda, _C=SimpleNamespace(**calls))
    gate = Gate()
    for _ in range(3):
        follow_torch(fake, gate)
    graph = fake.cuda.CUDAGraph()
    graph.capture_begin(pool=None, capture_error_mode="thread_local")
    closed = [gate.closed]
    graph.capture_end()
    closed.append(gate.closed)
    graph.fails = True
    for call in (graph.capture_begin, graph.capture_end):
        with pytest.raises(RuntimeError):
            call()
        closed.append(gate.closed)
    assert closed == [True, False, False, False]
    for module in (fake.cuda.memory, fake._C):
        begin, end = module._cuda_beginAllocateCurrentThreadToPool, module._cuda_endAllocateToPool
        counts = []
        # Engines end and begin in the middle of a capture.
        for call in (begin, end, end, begin):
            call(0, (1, 0))
            counts.append(gate.pools)
        with gate.work():
            begin(0, (1, 0))
            counts.append(gate.pools)
            end(0, (1, 0))
        assert counts == [1, 0, -1, 0, 0]


def test_the_names_that_torch_is_followed_by_are_torchs_own() -> None:
    assert {"capture_begin", "capture_end"} <= vars(torch.cuda.CUDAGraph).keys()
    for module in (torch.cuda.memory, torch._C):
        assert hasattr(module, "_cuda_beginAllocateCurrentThreadToPool")
        assert hasattr(module, "_cuda_endAllocateToPool")
    names = torch.cuda.use_mem_pool.__wrapped__.__code__.co_names  # type: ignore[attr-defined]
    assert {"_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool"} <= set(names)
    assert {"snapshot", "id"} <= vars(torch.cuda.MemPool).keys()
