"""What TorchDevice does with a process's own memory on a card, and what it leaves alone."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tensord.client.device.torch_device import TorchDevice
from tensord.client.gpu.gate import Gate, follow_torch

from ...daemon_process import PATIENCE_S
from ..device.standin import PLACE, Accelerator
from .conformance import CAPACITY_BYTES, KIB, bits, landed


@pytest.fixture
def card() -> Accelerator:
    return Accelerator(CAPACITY_BYTES, **PLACE)


def promoted(device: TorchDevice, size_bytes: int) -> Any:
    return device.to_device(np.arange(size_bytes // 4, dtype="<i4"))


@pytest.mark.parametrize("gives_back", [True, False])
def test_unused_memory_of_the_allocator_goes_to_the_driver_unless_the_engine_keeps_it(
    card: Accelerator, gives_back: bool
) -> None:
    device = TorchDevice(0, gives_back=gives_back, accelerator=card)
    activations = card.empty((256 * KIB,), torch.uint8)
    del activations
    made = promoted(device, 64 * KIB)
    gc.collect()
    assert device.give_back() == (256 * KIB if gives_back else 0)
    del made
    gc.collect()
    assert device.give_back() == (64 * KIB if gives_back else 0)
    assert card.memory_reserved(0) == (0 if gives_back else 320 * KIB)


class Pluggable(Accelerator):
    """As with torch's CUDAPluggableAllocator: neither statistics nor an `empty_cache`."""

    @staticmethod
    def _refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDAPluggableAllocator does not yet support this")

    memory_reserved = empty_cache = _refuses


def test_a_pluggable_allocator_is_served() -> None:
    device = TorchDevice(0, accelerator=Pluggable(CAPACITY_BYTES, **PLACE))
    made = promoted(device, 4 * KIB)
    assert bits(landed(device, made)) == bits(np.arange(KIB, dtype="<i4"))
    assert device.give_back() == 0


def test_no_call_makes_a_context_on_another_card() -> None:
    """The calling thread's current card is 0; the device is card 1."""
    card = Accelerator(CAPACITY_BYTES, index=1, **PLACE)
    device = TorchDevice(1, accelerator=card)
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


def test_captures_of_torch_tell_the_gate_however_often_it_is_followed() -> None:
    fake: Any = SimpleNamespace(cuda=SimpleNamespace(CUDAGraph=Graph))
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


def test_the_names_that_torch_is_followed_by_are_torchs_own() -> None:
    assert {"capture_begin", "capture_end"} <= vars(torch.cuda.CUDAGraph).keys()
