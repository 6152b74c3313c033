"""Copies of blocks between host memory and a GPU through torch, by address. Owns: the streams of the copies, and the
calls of torch and of the driver. Does not own: any memory, and what is copied when.

Invariants: each call selects its GPU, so the calling thread's own choice does not matter. No call here may run while
the process captures a CUDA graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from ...errors import UsageError
from .interface import Mark, reached_within

Array = np.ndarray[Any, Any]
Swap = Callable[..., object]
"""`vllm._custom_ops.swap_blocks_batch`, or a function like it: (sources, targets, sizes, is_src_access_order_any=),
three int64 CPU tensors. It queues the copies on the current stream."""
_READ_ONLY: Final = 8
"""CU_MEMHOSTREGISTER_READ_ONLY: without it the driver refuses memory that is mapped read-only. Cards whose attribute
READ_ONLY_HOST_REGISTER_SUPPORTED is 0 refuse it with NOT_SUPPORTED (801)."""


class BlockMark:
    """A Mark: a recorded CUDA event. Its `wait` raises RuntimeError if work before the mark has failed."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self, timeout_s: float | None = None) -> bool:
        """As in Mark."""
        if timeout_s is None:
            self.event.synchronize()
            return True
        return reached_within(lambda _: bool(self.event.query()), timeout_s)


class TorchBlocks:
    """One CUDA GPU of this process, whose memory is read and written by address, as the KV connector uses it.

    Thread-safe, but not usable after a fork. `index`: torch's index of the GPU; raises UsageError if torch sees no such
    GPU. `swap` queues the copies. `accelerator` and `driver`: replacements for torch.cuda and libcuda.so.1.
    """

    def __init__(self, index: int, swap: Swap, *, accelerator: Any = None, driver: Any = None) -> None:
        self.accelerator = torch.cuda if accelerator is None else accelerator
        if not 0 <= index < self.accelerator.device_count():
            raise UsageError(f"device is {index}, and torch sees {self.accelerator.device_count()} cards")
        self.index = index
        self.swap = swap
        self._driver = driver

    def mark(self, stream: Any = None) -> BlockMark:
        """A mark after all work queued so far on a stream; by default on the calling thread's current one. Does not
        wait."""
        with self.accelerator.device(self.index):
            # blocking=True: a thread that waits for the event sleeps instead of spinning.
            event = self.accelerator.Event(blocking=True)
            event.record(self.accelerator.current_stream(self.index) if stream is None else stream)
        return BlockMark(event)

    def stream(self, *, to_host: bool) -> TorchBlockStream:
        """A new stream for copies in one direction."""
        return TorchBlockStream(self, to_host=to_host)

    def page_locked(self, size_bytes: int) -> Array:
        """New host memory for copies, (size_bytes,) uint8, page-locked if the driver has such memory. Torch rounds it
        up to a power of two, and keeps it until the process ends."""
        with self.accelerator.device(self.index):
            try:
                memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError:
                # Without page-locked memory copies are slower.
                memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        return memory.numpy()

    def register(self, address: int, size_bytes: int) -> str:
        """Page-locks memory that is mapped read-only, less than 64 GiB, so that copies from it need no buffer. Takes
        about 0.1 s/GB. Returns "", or why it is not registered; then nothing has changed."""
        try:
            return self._registered("cuMemHostRegister_v2", address, ctypes.c_size_t(size_bytes), _READ_ONLY)
        except (OSError, AttributeError, RuntimeError) as error:
            return f"the driver cannot be called: {error}"

    def unregister(self, address: int) -> None:
        """Ends a registration by the address where it begins. The caller has waited for all copies from there. Raises
        RuntimeError if the driver refuses."""
        if refusal := self._registered("cuMemHostUnregister", address):
            raise RuntimeError(refusal)

    def _registered(self, call: str, address: int, *more: Any) -> str:
        """Calls NVIDIA's driver. Returns "" or its refusal. Raises OSError if there is no driver.

        A failed call of the CUDA runtime would leave an error that the next call of torch raises as its own.
        """
        if self._driver is None:
            self._driver = ctypes.CDLL("libcuda.so.1")
        with self.accelerator.device(self.index):
            # The driver's call needs a context in this thread. A call of the runtime, as this one, sets it.
            self.mark()
            status = getattr(self._driver, call)(ctypes.c_void_p(address), *more)
            name = ctypes.c_char_p()
            if status:
                self._driver.cuGetErrorName(status, ctypes.byref(name))
        return f"{call.removesuffix('_v2')} gave {status} ({(name.value or b'unknown').decode()})" if status else ""


class TorchBlockStream:
    """A CUDA stream for copies between host memory and a GPU. One thread uses it at a time."""

    def __init__(self, device: TorchBlocks, *, to_host: bool) -> None:
        self._device = device
        # Sources in host memory are complete before a copy is queued, so the driver may read them at any time. Those in
        # GPU memory are written by other streams, so they are read in the order of this stream.
        self._any_order = not to_host
        with device.accelerator.device(device.index):
            self.stream = device.accelerator.Stream(device=device.index)

    def copy(self, copies: Array, after: Mark | None = None) -> None:
        """Queues copies after those queued before, and after `after` is reached. Does not wait.

        Sources and targets stay as they are until a later mark of this stream is reached. No copy crosses the edge of
        a registration. Raises RuntimeError if the driver refuses; then some of the copies may be queued.

        Args:
            copies: (3, n) int64: the addresses of the sources and of the targets, and the bytes of each copy.
            after: a mark of the same device.
        """
        if after is not None:
            assert isinstance(after, BlockMark), "marks of another device"
            self.stream.wait_event(after.event)
        if not copies.shape[1]:
            return
        sources, targets, sizes = (torch.from_numpy(np.ascontiguousarray(row)) for row in copies)
        with self._device.accelerator.device(self._device.index), self._device.accelerator.stream(self.stream):
            self._device.swap(sources, targets, sizes, is_src_access_order_any=self._any_order)

    def mark(self) -> BlockMark:
        """A mark after all copies queued so far. Does not wait."""
        return self._device.mark(self.stream)
