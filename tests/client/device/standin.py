"""What stands for torch.cuda where there is no GPU: CPU tensors that are accounted for, and streams that are late.

Owns: an account with a caching allocator as torch's own; streams, events, copies that are done
when their stream comes to them, and a driver that registers memory. It does nothing for the code under test: what that
does not wait for, it sees as garbage; a copy from memory that the driver does not know fails; a call of it on another
card than its own is in `contexts`, and one that ruins a capture in `ruined`.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any, Final, Self

import torch
from torch.overrides import TorchFunctionMode

from tensord.client.gpu.gate import Gate
from tensord.testing.fake_stream import FakeMark, FakeStream, Hold

GARBAGE: Final = 0xA5
PLACE: Final = {"pci_domain_id": 0, "pci_bus_id": 0x65, "pci_device_id": 0}
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
        self.belt.enqueue(event.mark.wait)


class LateEvent:
    """An event that was recorded before it is asked for."""

    mark: FakeMark

    def __init__(self, card: Accelerator) -> None:
        self._card = card

    def record(self, stream: LateStream) -> None:
        self._card.called("event.record")
        self.mark = stream.belt.mark()

    def query(self) -> bool:
        self._card.called("event.query")
        return self.mark.wait(0)

    def synchronize(self) -> None:
        self._card.called("event.synchronize")
        self.mark.wait()


class Driver:
    """The calls of libcuda.so.1 that register memory. `refusal` is the status of the next registrations, 0 for none.

    `ranges`: what is registered, by address. `overlaps`: registrations of what is registered already.
    """

    def __init__(self, called: Callable[[str], object]) -> None:
        self._called = called
        self.refusal = self.overlaps = self.calls = 0
        self.ranges: dict[int, int] = {}

    def cuMemHostRegister_v2(self, place: ctypes.c_void_p, size: ctypes.c_size_t, flags: int) -> int:
        address, size_bytes = place.value or 0, size.value
        self.calls += 1
        self._called("cuMemHostRegister")
        if self.refusal or flags != 8 or address % 4096:
            return self.refusal or 1
        self.overlaps += any(at < address + size_bytes and address < at + size for at, size in self.ranges.items())
        self.ranges[address] = size_bytes
        return 0

    def cuMemHostUnregister(self, place: ctypes.c_void_p) -> int:
        self._called("cuMemHostUnregister")
        return 0 if self.ranges.pop(place.value or 0, 0) else 713

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_%d" % status
        return 0


class Accelerator:
    """One card of `total_bytes`, whose tensors torch takes for CPU tensors.

    `locked`: page-locked memory, bytes by address. `copied`: copies of blocks, each as source, target and bytes.
    """

    device_type = "cpu"
    OutOfMemoryError = OutOfMemoryError
    Stream = LateStream

    def __init__(self, total_bytes: int, *, index: int = 0, **properties: object) -> None:
        self.total_bytes = total_bytes
        self.index = index
        self.gate = Gate()
        self.properties = SimpleNamespace(**properties)
        self.default = LateStream()
        self.lent: list[tuple[int, LateStream]] = []
        self.contexts: set[int] = set()
        self.ruined: list[str] = []
        self.capturing = False
        self.driver = Driver(self.called)
        self.locked: dict[int, int] = {}
        self.lockable = True
        self.swap_fails = False
        self.copied: list[tuple[int, int, int]] = []
        self._threads = threading.local()
        self._reserved_bytes = 0
        self._cached: defaultdict[int, int] = defaultdict(int)
        self._freed: list[int] = []
        self._memory: dict[int, int] = {}

    # ---- what TorchDevice calls

    def device_count(self) -> int:
        return 1 + self.index

    def current_device(self) -> int:
        return getattr(self._threads, "device", None) or 0

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return self.properties

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.called("mem_get_info")
        return self.total_bytes - self._reserved_bytes, self.total_bytes

    def memory_reserved(self, index: int) -> int:
        return self._reserved_bytes

    def empty_cache(self) -> None:
        self.called("empty_cache")
        self._return_cached()

    def is_current_stream_capturing(self) -> bool:
        return self.capturing and self.current_stream() is self.default

    def Event(self, blocking: bool = False) -> LateEvent:
        return LateEvent(self)

    @contextmanager
    def _chosen(self, **choice: object) -> Iterator[None]:
        """Within it, the calling thread has chosen a stream or a device."""
        before = {name: getattr(self._threads, name, None) for name in choice}
        vars(self._threads).update(choice)
        try:
            with self._seen():
                yield
        finally:
            vars(self._threads).update(before)

    def current_stream(self, index: int = 0) -> LateStream:
        stream: LateStream = getattr(self._threads, "stream", None) or self.default
        return stream

    def stream(self, stream: LateStream) -> AbstractContextManager[None]:
        return self._chosen(stream=stream)

    def device(self, index: int) -> AbstractContextManager[None]:
        return self._chosen(device=index)

    def called(self, what: str) -> None:
        """A call that would make a context on the current device, and that a capture does not bear."""
        self.contexts.add(self.current_device())
        if self.capturing:
            self.ruined.append(what)

    # ---- what tests call

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor full of garbage, made under the current stream."""
        with self._seen():
            return torch.empty(shape, dtype=dtype, device=CARD)

    def launch(self, kernel: Callable[[], object]) -> None:
        self.current_stream().belt.enqueue(kernel)

    def hold(self) -> Hold:
        return self.current_stream().belt.hold()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """As a CUDA graph is captured: by the current stream of this thread, with the gate told."""
        with self.gate.pause():
            self.capturing = True
            yield
            self.capturing = False

    def swap_blocks_batch(
        self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool = False
    ) -> None:
        """As vLLM's. Each address must be the card's, or page-locked or registered when the copy is queued and made."""
        self.called("swap_blocks_batch")
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

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """What the thread calls within is seen once, however many of these blocks are around it."""
        outer, self._threads.seen = getattr(self._threads, "seen", False), True
        try:
            with nullcontext() if outer else _OnCard(self):
                yield
        finally:
            self._threads.seen = outer

    def _count_freed(self) -> None:
        while self._freed:
            self._cached[self._freed.pop()] += 1

    def _return_cached(self) -> None:
        self._count_freed()
        self._reserved_bytes -= sum(size * count for size, count in self._cached.items())
        self._cached.clear()

    def allocated(self, tensor: torch.Tensor) -> torch.Tensor:
        self.called("empty")
        self._count_freed()
        storage = tensor.untyped_storage()
        wanted_bytes = storage.nbytes()
        if self._cached[wanted_bytes]:
            self._cached[wanted_bytes] -= 1
        else:
            if self._reserved_bytes + wanted_bytes > self.total_bytes:
                self._return_cached()
            if self._reserved_bytes + wanted_bytes > self.total_bytes:
                raise OutOfMemoryError(f"{self._reserved_bytes} of {self.total_bytes} bytes taken")
            self._reserved_bytes += wanted_bytes
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(GARBAGE)
        weakref.finalize(storage, self._freed.append, wanted_bytes)
        self._memory[storage.data_ptr()] = wanted_bytes
        return tensor


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
        if func is torch.Tensor.copy_ and named.get("non_blocking"):
            self._card.called("copy_")
            into, source = args
            self._card.launch(lambda: into.copy_(source))
            return into
        if func is torch.Tensor.record_stream:
            self._card.lent.append((args[0].data_ptr(), args[1]))
            return None
        return func(*args, **named)
