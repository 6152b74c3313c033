"""What stands for torch.cuda where there is no GPU: CPU tensors that are accounted for, and streams that are late.

Owns: an account with a caching allocator as torch's own, streams, events, copies that are done when their stream
comes to them, and a driver that registers memory. It does nothing for the code under test: what it does not wait for,
it sees as garbage; a copy from memory that the driver does not know fails.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any, Final, Self

import torch
from torch.overrides import TorchFunctionMode

from tensord.testing.fake_stream import FakeMark, FakeStream, Hold

GARBAGE: Final = 0xA5
CARD: Final = torch.device("cpu", 0)
_numbers: Final = count(1)


class OutOfMemoryError(RuntimeError):
    """As torch.cuda's."""


class LateStream(torch.Stream):
    """A torch.Stream for torch's own checks of what it is handed."""

    def __new__(cls, device: int = 0) -> Self:
        return super().__new__(cls, stream_id=next(_numbers), device_index=0, device_type=0)

    def __init__(self, device: int = 0) -> None:
        self.belt = FakeStream()

    def wait_event(self, event: Any) -> None:
        if event._mark is not None:
            self.belt.enqueue(event._mark.wait)


class LateEvent:
    def __init__(self, blocking: bool = False) -> None:
        self._mark: FakeMark | None = None

    def record(self, stream: LateStream) -> None:
        self._mark = stream.belt.mark()

    def query(self) -> bool:
        return self._mark is None or self._mark.wait(0)

    def synchronize(self) -> None:
        if self._mark is not None:
            self._mark.wait()


class Driver:
    """The calls of libcuda.so.1 that register memory. `refusal` is the status of the next registrations, 0 for none.

    `ranges`: what is registered, by address. `overlaps`: registrations of what is registered already.
    """

    def __init__(self) -> None:
        self.refusal = 0
        self.ranges: dict[int, int] = {}
        self.overlaps = 0
        self.calls = 0

    def cuMemHostRegister_v2(self, address: int, size_bytes: int, flags: int) -> int:
        self.calls += 1
        if self.refusal:
            return self.refusal
        if flags != 8 or address % 4096:
            return 1
        self.overlaps += any(at < address + size_bytes and address < at + size for at, size in self.ranges.items())
        self.ranges[address] = size_bytes
        return 0

    def cuMemHostUnregister(self, address: int) -> int:
        return 0 if self.ranges.pop(address, 0) else 713

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_%d" % status
        return 0


class Accelerator:
    """One card of `total_bytes`, whose tensors torch takes for CPU tensors."""

    device_type = "cpu"
    OutOfMemoryError = OutOfMemoryError
    Stream = LateStream
    Event = LateEvent

    def __init__(self, total_bytes: int, **properties: object) -> None:
        self.total_bytes = total_bytes
        self.properties = SimpleNamespace(**properties)
        self.default = LateStream()
        self.lent: list[tuple[int, LateStream]] = []
        self.driver = Driver()
        self.locked: dict[int, int] = {}
        """Page-locked memory: bytes by address."""
        self.lockable = True
        self.swap_fails = False
        self.copied: list[tuple[int, int, int]] = []
        """Copies that were made, each as source, target and bytes."""
        self._threads = threading.local()
        self._cached: defaultdict[int, int] = defaultdict(int)
        self._freed: list[int] = []
        self._reserved_bytes = 0
        self._memory: dict[int, int] = {}

    # ---- what TorchDevice calls

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return self.properties

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.total_bytes - self._reserved_bytes, self.total_bytes

    def memory_reserved(self, index: int) -> int:
        return self._reserved_bytes

    def empty_cache(self) -> None:
        self._collect()
        self._reserved_bytes -= sum(size * count for size, count in self._cached.items())
        self._cached.clear()

    def current_stream(self, index: int = 0) -> LateStream:
        stream: LateStream = getattr(self._threads, "stream", self.default)
        return stream

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        before = self.current_stream()
        self._threads.stream = stream
        try:
            with _OnCard(self):
                yield
        finally:
            self._threads.stream = before

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        with _OnCard(self):
            yield

    # ---- what tests call

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor full of garbage, made under the current stream."""
        with _OnCard(self):
            return torch.empty(shape, dtype=dtype, device=CARD)

    def launch(self, kernel: Callable[[], object]) -> None:
        self.current_stream().belt.enqueue(kernel)

    def hold(self) -> Hold:
        return self.current_stream().belt.hold()

    def swap_blocks_batch(
        self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool = False
    ) -> None:
        """As vLLM's. Each address must be the card's, or page-locked or registered when the copy is queued and made."""
        if self.swap_fails:
            raise RuntimeError("cuMemcpyBatchAsync failed at index 0 with error 700")
        copies = [(int(a), int(b), int(c)) for a, b, c in zip(sources, targets, sizes, strict=True)]
        for copy in copies:
            self._check(*copy)

        def run() -> None:
            for source, target, size in copies:
                self._check(source, target, size)
                ctypes.memmove(target, source, size)
            self.copied.extend(copies)

        self.launch(run)

    def _check(self, source: int, target: int, size: int) -> None:
        known = [*self._memory.items(), *self.driver.ranges.items(), *(self.locked.items() if self.lockable else ())]
        for address in (source, target) if self.lockable else ():
            if not any(at <= address and address + size <= at + whole for at, whole in known):
                raise RuntimeError(f"{size} bytes at {address:#x} are in no memory that the card knows, or in two")

    # ---- inside

    def allocated(self, tensor: torch.Tensor) -> torch.Tensor:
        self._collect()
        storage = tensor.untyped_storage()
        wanted_bytes = storage.nbytes()
        if self._cached[wanted_bytes]:
            self._cached[wanted_bytes] -= 1
        else:
            if self._reserved_bytes + wanted_bytes > self.total_bytes:
                self.empty_cache()
            if self._reserved_bytes + wanted_bytes > self.total_bytes:
                raise OutOfMemoryError(f"{wanted_bytes} of {self.total_bytes - self._reserved_bytes} bytes free")
            self._reserved_bytes += wanted_bytes
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(GARBAGE)
        weakref.finalize(storage, self._freed.append, wanted_bytes)
        self._memory[storage.data_ptr()] = wanted_bytes
        return tensor

    def _collect(self) -> None:
        while self._freed:
            self._cached[self._freed.pop()] += 1


class _OnCard(TorchFunctionMode):
    """Within it, what is made on the card is accounted for, and what need not block is late."""

    def __init__(self, card: Accelerator) -> None:
        super().__init__()
        self._card = card

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in (torch.empty, torch.empty_like) and named.get("device") == CARD:
            return self._card.allocated(func(*args, **named))
        if func is torch.empty and named.pop("pin_memory", False):
            if not self._card.lockable:
                raise RuntimeError("no page-locked memory")
            locked = func(*args, **named)
            self._card.locked[locked.data_ptr()] = locked.numel()
            return locked
        if func is torch.Tensor.contiguous and not args[0].is_contiguous():
            return self._card.allocated(torch.empty(args[0].shape, dtype=args[0].dtype)).copy_(args[0])
        if func is torch.Tensor.copy_ and named.get("non_blocking"):
            into, source = args
            self._card.launch(lambda: into.copy_(source))
            return into
        if func is torch.Tensor.record_stream:
            self._card.lent.append((args[0].data_ptr(), args[1]))
            return None
        return func(*args, **named)
