"""Copies of blocks between host memory and a GPU through torch, by address.

Owns: the streams of the copies, and the calls of torch and of the driver. Does not own: any memory, and what is copied
when.

Invariants: each call selects its GPU, so the calling thread's own choice does not matter. No call here may run while
the process captures a CUDA graph.
"""

from __future__ import annotations

import ctypes
import threading
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


class HostRegistration:
    """Registers host memory with NVIDIA's driver: page-locked, so that the GPU copies from it without a buffer. The
    calling thread has a current context of the card.

    Calls the driver instead of the CUDA runtime: a failed call of the runtime leaves an error that the next call of
    torch raises as its own.

    Args:
        driver: a replacement for libcuda.so.1.

    Raises:
        OSError: there is no driver.
    """

    def __init__(self, driver: Any = None) -> None:
        if driver is None:
            driver = ctypes.CDLL("libcuda.so.1")
            driver.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
            driver.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
        self._driver = driver

    def register(self, address: int, size_bytes: int) -> str:
        """Registers memory that is mapped read-only. The driver takes less than 64 GiB in one call.

        Returns:
            "" if it is registered; otherwise the driver's refusal.
        """
        status = self._driver.cuMemHostRegister_v2(address, size_bytes, _READ_ONLY)
        return f"cuMemHostRegister gave {status} ({self._name(status)})" if status else ""

    def unregister(self, address: int) -> str:
        """Ends a registration by the address where it begins. Returns "" or the driver's refusal."""
        status = self._driver.cuMemHostUnregister(address)
        return f"cuMemHostUnregister gave {status} ({self._name(status)})" if status else ""

    def _name(self, status: int) -> str:
        name = ctypes.c_char_p()
        self._driver.cuGetErrorName(status, ctypes.byref(name))
        return (name.value or b"unknown").decode()


class BlockMark:
    """A recorded CUDA event."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the stream has reached the event. False if it has not within `timeout_s` seconds."""
        if timeout_s is None:
            self._event.synchronize()
            return True
        return reached_within(lambda _: bool(self._event.query()), timeout_s)

    def hold(self, stream: Any) -> None:
        """Lets work that is queued on a stream from now on begin after the event. Does not wait."""
        stream.wait_event(self._event)


class TorchBlocks:
    """One CUDA GPU of this process, whose memory is read and written by address, as the KV connector uses it.

    Thread-safe, but not usable after a fork. A mark's `wait` raises RuntimeError if work before the mark has failed.

    Args:
        index: torch's index of the GPU.
        swap: queues the copies.
        accelerator: a replacement for torch.cuda.
        driver: a replacement for libcuda.so.1.

    Raises:
        UsageError: torch sees no such GPU.
    """

    def __init__(self, index: int, swap: Swap, *, accelerator: Any = None, driver: Any = None) -> None:
        accelerator = torch.cuda if accelerator is None else accelerator
        if not 0 <= index < accelerator.device_count():
            raise UsageError(f"device is {index}, and torch sees {accelerator.device_count()} cards")
        self.index = index
        self._accelerator = accelerator
        self._swap = swap
        self._lock = threading.Lock()
        self._driver = driver
        self._registration: HostRegistration | None = None

    def mark(self) -> BlockMark:
        """A mark after all work queued so far on the calling thread's current stream. Does not wait."""
        return self.marked(self._accelerator.current_stream(self.index))

    def stream(self, *, to_host: bool) -> TorchBlockStream:
        """A new stream for copies in one direction."""
        return TorchBlockStream(self, self._accelerator, self._swap, to_host=to_host)

    def page_locked(self, size_bytes: int) -> Array:
        """New host memory for copies, (size_bytes,) uint8, page-locked if the driver has such memory. Torch rounds it
        up to a power of two, and keeps it until the process ends."""
        with self._accelerator.device(self.index):
            try:
                memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError:
                # Without page-locked memory copies are slower.
                memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        return memory.numpy()

    def register(self, address: int, size_bytes: int) -> str:
        """Page-locks memory that is mapped read-only, so that copies from it need no buffer. Takes about 0.1 s/GB.

        Returns:
            "" if it is registered; otherwise why it is not. Then nothing has changed.
        """
        with self._lock, self._accelerator.device(self.index):
            try:
                if self._registration is None:
                    self._registration = HostRegistration(self._driver)
                # The driver's call needs a context in this thread. A call of the runtime, as this one, sets it.
                self.mark()
                return self._registration.register(address, size_bytes)
            except (OSError, AttributeError, RuntimeError) as error:
                return f"the driver cannot be called: {error}"

    def unregister(self, address: int) -> None:
        """Ends a registration by the address where it begins. The caller has waited for all copies from there.

        Raises:
            RuntimeError: the driver refused.
        """
        with self._lock, self._accelerator.device(self.index):
            assert self._registration is not None, "nothing is registered"
            self.mark()
            refusal = self._registration.unregister(address)
        if refusal:
            raise RuntimeError(refusal)

    def marked(self, stream: Any) -> BlockMark:
        """A mark after the work queued on one of the GPU's streams."""
        with self._accelerator.device(self.index):
            # blocking=True: a thread that waits for the event sleeps instead of spinning.
            event = self._accelerator.Event(blocking=True)
            event.record(stream)
        return BlockMark(event)


class TorchBlockStream:
    """A CUDA stream for copies between host memory and a GPU. One thread uses it at a time."""

    def __init__(self, device: TorchBlocks, accelerator: Any, swap: Swap, *, to_host: bool) -> None:
        self._device = device
        self._accelerator = accelerator
        self._swap = swap
        # Sources in host memory are complete before a copy is queued, so the driver may read them at any time. Those in
        # GPU memory are written by other streams, so they are read in the order of this stream.
        self._any_order = not to_host
        with accelerator.device(device.index):
            self.stream = accelerator.Stream(device=device.index)

    def copy(self, copies: Array, after: Mark | None = None) -> None:
        """Queues copies after those queued before, and after `after` is reached. Does not wait.

        Sources and targets stay as they are until a later mark of this stream is reached. No copy crosses the edge of
        a registration.

        Args:
            copies: (3, n) int64: the addresses of the sources and of the targets, and the bytes of each copy.
            after: a mark of the same device.

        Raises:
            RuntimeError: the driver refused. Some of the copies may be queued.
        """
        if after is not None:
            assert isinstance(after, BlockMark), "marks of another device"
            after.hold(self.stream)
        if not copies.shape[1]:
            return
        sources, targets, sizes = (torch.from_numpy(np.ascontiguousarray(row)) for row in copies)
        with self._accelerator.device(self._device.index), self._accelerator.stream(self.stream):
            self._swap(sources, targets, sizes, is_src_access_order_any=self._any_order)

    def mark(self) -> BlockMark:
        """A mark after all copies queued so far. Does not wait."""
        return self._device.marked(self.stream)
