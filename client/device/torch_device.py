"""A GPU through torch: CUDA, or HIP, for which torch uses the same names.

Owns: the calls of torch, one side stream, and two buffers of pinned memory for copies to the host. Does not own: the
tensors, torch's caching allocator.

Invariants: only making a TorchDevice imports torch and makes a GPU context. All memory that a copy reads or writes is
referenced until the copy is complete, so that no allocator reuses it earlier. No call here may run while the process
captures a CUDA graph, as with any call that allocates, frees or synchronises.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import ModuleType
from typing import Any, Final

import numpy as np

from ...errors import DeviceFull, UnsupportedLeaf, UsageError
from ...shm.dtypes import name_of_torch
from ...shm.tensors import tensor_over
from .interface import Mark, mapped

__all__ = ["TorchDevice", "TorchMark"]

Array = np.ndarray[Any, Any]
STAGE_BYTES: Final = 16 << 20
"""Bytes of each of the two pinned buffers for copies to the host. Pinning the destination itself would cost a system
call per page, and torch keeps pinned memory, rounded up to a power of two, until the process ends."""
_PAUSE_S_MIN: Final = 50e-6
_PAUSE_S_MAX: Final = 5e-3


class TorchMark:
    """A recorded CUDA event."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the stream has reached the event. False if it has not within `timeout_s` seconds."""
        if timeout_s is None:
            self._event.synchronize()
            return True
        deadline = time.monotonic() + timeout_s
        pause_s = _PAUSE_S_MIN
        while not self._event.query():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        return True

    def hold(self, stream: Any) -> None:
        """Lets work that is queued on a stream from now on begin after the event. Does not wait."""
        stream.wait_event(self._event)


class TorchDevice:
    """A Device: one CUDA or HIP GPU of this process.

    Args:
        device: torch's index of the GPU, "cuda:1", or a torch.device; None for the current one.
        name: the name of the GPU's gauge; None for its PCI address.
        accelerator: a replacement for torch.cuda.

    Raises:
        UsageError: torch or the GPU is missing, or its PCI address is unknown and no name was given.

    Example:
        >>> import torch
        >>> from tensord.client.device.torch_device import TorchDevice
        >>> with tensord.DeviceCache(cache, TorchDevice(0)) as held:
        ...     held.put(key, {"hidden": torch.zeros(4, device="cuda:0")}, wait=True).state
        'registered'
    """

    def __init__(self, device: Any = None, *, name: str | None = None, accelerator: Any = None) -> None:
        torch = self._torch = _torch()
        if accelerator is None:
            accelerator = torch.cuda
            if not accelerator.is_available():
                raise UsageError(f"torch {torch.__version__} sees no CUDA or HIP card; FakeVram needs none")
        self._accelerator = accelerator
        kind: str = getattr(accelerator, "device_type", "cuda")
        if device is not None and not isinstance(device, int):
            device = torch.device(device)
            if device.type != kind:
                raise UsageError(f"device is {device}; it is an index, or {kind}:INDEX")
            device = device.index
        index: int = accelerator.current_device() if device is None else device
        if not 0 <= index < accelerator.device_count():
            raise UsageError(f"device is {index}, and torch sees {accelerator.device_count()} cards")
        self._index: Final = index
        self._device = torch.device(kind, index)
        self.reports = True
        self.name = name if name is not None else _name(torch, accelerator, index)
        self._copies = accelerator.Stream(device=index)
        self._stages: list[Any] = []
        self._copying = threading.Lock()

    # ---- Device

    def reading(self) -> tuple[int, int]:
        """As in Device."""
        free_bytes, total_bytes = self._accelerator.mem_get_info(self._index)
        return total_bytes - free_bytes, total_bytes

    def size_of(self, tree: Any) -> int:
        """As in Device. Does not include the rounding of sizes by the allocator.

        Raises:
            UnsupportedLeaf: a tensor on this device has no plain memory, or a dtype that no payload can have.
        """
        storages: dict[int, int] = {}

        def add(leaf: Any, place: str) -> None:
            if self._lies_here(leaf, place):
                storage = leaf.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()

        mapped(tree, add)
        return sum(storages.values())

    def mark(self) -> TorchMark:
        """As in Device."""
        return self._marked(self._accelerator.current_stream(self._index))

    def lend(self, tree: Any) -> None:
        """As in Device."""
        with self._accelerator.device(self._index):
            stream = self._accelerator.current_stream(self._index)

            def add(leaf: Any, place: str) -> None:
                if self._lies_here(leaf, place):
                    leaf.record_stream(stream)

            mapped(tree, add)

    def to_host(self, tree: Any, mark: Mark) -> Any:
        """As in Device; the leaves are CPU tensors. Only a tensor that is not one plain block of memory, with
        dimensions in any order, needs a copy on the GPU."""
        mark.wait()
        with self._copying, ExitStack() as stack:
            self._enter(stack)
            try:
                pairs: list[tuple[Any, Any]] = []
                copy = mapped(tree, lambda leaf, place: self._paired(leaf, place, pairs))
                self._copy_down(pairs)
            except self._accelerator.OutOfMemoryError as error:
                raise DeviceFull(
                    f"{self.name} has no room to make a strided tensor contiguous; keep contiguous ones: {error}"
                ) from None
        return copy

    def to_device(self, tree: Any) -> Any:
        """As in Device. Copies from memory that is registered with the driver need no intermediate buffer."""
        sources: list[Any] = []
        mapped(tree, lambda leaf, place: sources.append(self._on_host(leaf, place)))
        tensors: deque[Any] = deque()
        with ExitStack() as stack:
            # Allocated on the side stream, so the copies need not wait for work queued on the caller's stream.
            self._enter(stack)
            try:
                for source in sources:
                    tensors.append(None if source is None else self._torch.empty_like(source, device=self._device))
            except self._accelerator.OutOfMemoryError as error:
                tensors.clear()
                self.give_back()
                raise DeviceFull(f"{self.name} has no room for the tensors to promote: {error}") from None
            for tensor, source in zip(tensors, sources, strict=True):
                if source is not None:
                    tensor.copy_(source, non_blocking=True)
            self._marked(self._copies).wait()

        def chosen(leaf: Any, _: str) -> Any:
            tensor = tensors.popleft()
            return leaf if tensor is None else tensor

        made = mapped(tree, chosen)
        self.lend(made)
        return made

    def give_back(self) -> int:
        """As in Device. Uses torch's own statistics, so that other processes do not count."""
        before_bytes: int = self._accelerator.memory_reserved(self._index)
        self._accelerator.empty_cache()
        after_bytes: int = self._accelerator.memory_reserved(self._index)
        return max(0, before_bytes - after_bytes)

    # ---- private

    def _enter(self, stack: ExitStack) -> None:
        stack.enter_context(self._torch.no_grad())
        stack.enter_context(self._accelerator.device(self._index))
        stack.enter_context(self._accelerator.stream(self._copies))

    def _marked(self, stream: Any) -> TorchMark:
        # blocking=True: a thread that waits for the event sleeps instead of spinning.
        event = self._accelerator.Event(blocking=True)
        event.record(stream)
        return TorchMark(event)

    def _lies_here(self, leaf: Any, place: str) -> bool:
        if not isinstance(leaf, self._torch.Tensor):
            return False
        if leaf.device.type != self._device.type:
            if leaf.device.type == "cpu":
                return False
            raise UsageError(f"{place} lies on {leaf.device}; this device is {self._device}, {self.name}")
        if leaf.device.index not in (None, self._index):
            raise UsageError(f"{place} lies on {leaf.device}; this device is {self._device}, {self.name}")
        if leaf.layout is not self._torch.strided or name_of_torch(self._torch, leaf.dtype) is None:
            raise UnsupportedLeaf(
                f"{place} is a tensor of {leaf.dtype} with layout {leaf.layout}, which no leaf can have; "
                "pass x.to_dense(), or another plain dtype"
            )
        return True

    def _paired(self, leaf: Any, place: str, pairs: list[tuple[Any, Any]]) -> Any:
        """The CPU tensor that a leaf is copied to. The bytes of both tensors are added to `pairs`."""
        if not self._lies_here(leaf, place):
            return leaf
        torch = self._torch
        plain = leaf.detach().resolve_conj().resolve_neg()
        order = sorted(range(plain.dim()), key=plain.stride, reverse=True)
        block = plain.permute(order)
        if not block.is_contiguous():
            order = list(range(plain.dim()))
            block = plain.contiguous()
        host = torch.empty(block.shape, dtype=block.dtype, device="cpu")
        if block.numel():
            pairs.append((block.reshape(-1).view(torch.uint8), host.reshape(-1).view(torch.uint8)))
        return host.permute([order.index(at) for at in range(len(order))])

    def _copy_down(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Copies bytes from the GPU to the host. One buffer is filled while the other one is copied on."""
        stages = self._made_stages()
        on_their_way: deque[tuple[TorchMark, Array, Array]] = deque()
        number = 0
        for source, host in pairs:
            for start in range(0, len(source), STAGE_BYTES):
                if len(on_their_way) == len(stages):
                    _land(*on_their_way.popleft())
                piece = source[start : start + STAGE_BYTES]
                stage = stages[number % len(stages)][: len(piece)]
                stage.copy_(piece, non_blocking=True)
                landing = host[start : start + STAGE_BYTES].numpy()
                on_their_way.append((self._marked(self._copies), stage.numpy(), landing))
                number += 1
        while on_their_way:
            _land(*on_their_way.popleft())

    def _made_stages(self) -> list[Any]:
        if not self._stages:
            empty: Callable[..., Any] = self._torch.empty
            try:
                self._stages = [
                    empty(STAGE_BYTES, dtype=self._torch.uint8, device="cpu", pin_memory=True) for _ in "12"
                ]
            except RuntimeError:
                # No pinned memory is available. Copies are slower.
                self._stages = [empty(STAGE_BYTES, dtype=self._torch.uint8, device="cpu") for _ in "12"]
        return self._stages

    def _on_host(self, leaf: Any, place: str) -> Any:
        """A CPU tensor over the leaf's memory; None for leaves that pass through unchanged."""
        if isinstance(leaf, np.ndarray | np.generic):
            array = np.asarray(leaf)
            try:
                return tensor_over(self._torch, array if array.flags.c_contiguous else np.ascontiguousarray(array))
            except UnsupportedLeaf as error:
                raise UnsupportedLeaf(f"{place}: {error}") from None
        return leaf if isinstance(leaf, self._torch.Tensor) and leaf.device.type == "cpu" else None


def _land(mark: TorchMark, stage: Array, landing: Array) -> None:
    mark.wait()
    np.copyto(landing, stage)


def _torch() -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise UsageError(
            f"a TorchDevice needs torch, which cannot be imported ({error}); FakeVram needs none"
        ) from None
    module: ModuleType = torch
    return module


def _name(torch: ModuleType, accelerator: Any, index: int) -> str:
    """The GPU's PCI address in the form of the daemon's gauges; its UUID if the address is unknown."""
    properties = accelerator.get_device_properties(index)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    # Older versions of torch lack these properties. Bus 0, slot 0 is the host bridge, so such values mean unknown.
    if isinstance(domain, int) and isinstance(bus, int) and isinstance(slot, int) and (bus or slot):
        return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    try:
        return _told_by_driver(index, hip=bool(torch.version.hip))
    except (OSError, AttributeError, ValueError):
        uuid = getattr(properties, "uuid", None)
        if not uuid:
            raise UsageError(f"the PCI address of card {index} is unknown; pass name=") from None
        return f"gpu-{uuid}".lower()


def _told_by_driver(index: int, *, hip: bool) -> str:
    """The PCI address from cuDeviceGetPCIBusId or hipDeviceGetPCIBusId, which need no context."""
    told = ctypes.create_string_buffer(32)
    number = ctypes.c_int(index)
    if hip:
        status = _library("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6").hipDeviceGetPCIBusId(
            told, len(told), number
        )
    else:
        driver = _library("libcuda.so.1", "libcuda.so")
        status = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(number), index)
        status = status or driver.cuDeviceGetPCIBusId(told, len(told), number)
    if status != 0:
        raise ValueError(f"status {status}")
    domain, bus, rest = told.value.decode("ascii").lower().split(":")
    return f"{int(domain, 16):04x}:{bus}:{rest}"


def _library(*names: str) -> ctypes.CDLL:
    for name in names[:-1]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return ctypes.CDLL(names[-1])
