"""A card by torch: CUDA and HIP, which torch serves under the same names.

Owns: what is asked of torch, and one side stream with two pieces of pinned memory for copies to the host. Does not own
the tensors, nor torch's caching allocator.

Invariants: torch is imported, and a GPU context made, only by making a TorchDevice. Whatever a copy reads or writes is
held until the copy is complete, so that no allocator hands it out before. While an engine captures a CUDA graph nothing
here may run in its process, as with any call that allocates, frees or synchronises.
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
"""Copies to the host go through two pinned pieces of this size: pinning what is copied would cost a system call per
page, and torch keeps pinned memory, rounded up to a power of two, for the rest of the process's life."""
_PAUSE_S_MIN: Final = 50e-6
_PAUSE_S_MAX: Final = 5e-3


class TorchMark:
    """A recorded event."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the stream has reached it; False if it has not within `timeout_s`."""
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


class TorchDevice:
    """A Device: one CUDA or HIP card of this process.

    Args:
        device: its index as torch counts, "cuda:1", or a torch.device; None: the current one.
        name: its gauge's; None: its PCI address.
        accelerator: what stands for torch.cuda.

    Raises:
        UsageError: there is no torch, or no such card; or nobody can tell its PCI address and no name was given.

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
        """As in Device. The allocator rounds each piece of memory up, which is not counted.

        Raises:
            UnsupportedLeaf: a tensor here without plain memory of a dtype that a payload can have.
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
        """As in Device; the leaves are CPU tensors. Only tensors that are no plain block of memory, in whatever order
        of its dimensions, need a copy on the card."""
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
        """As in Device. Copies from memory that is registered with the driver go without a detour."""
        sources: list[Any] = []
        mapped(tree, lambda leaf, place: sources.append(self._on_host(leaf, place)))
        tensors: deque[Any] = deque()
        with ExitStack() as stack:
            # Made on the side stream, nothing has to wait for what the caller's own is still to do.
            self._enter(stack)
            try:
                for source in sources:
                    tensors.append(None if source is None else self._torch.empty_like(source, device=self._device))
            except self._accelerator.OutOfMemoryError as error:
                tensors.clear()
                self.give_back()
                raise DeviceFull(f"{self.name} has no room for what is to come back: {error}") from None
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
        """As in Device. Counted by torch's own account, so that other processes do not count."""
        before_bytes: int = self._accelerator.memory_reserved(self._index)
        self._accelerator.empty_cache()
        after_bytes: int = self._accelerator.memory_reserved(self._index)
        return max(0, before_bytes - after_bytes)

    # ---- inside

    def _enter(self, stack: ExitStack) -> None:
        stack.enter_context(self._torch.no_grad())
        stack.enter_context(self._accelerator.device(self._index))
        stack.enter_context(self._accelerator.stream(self._copies))

    def _marked(self, stream: Any) -> TorchMark:
        # Blocking: who waits sleeps, and does not spin.
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
        """The CPU tensor that a leaf is copied to; the bytes of both are added to `pairs`."""
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
        """Copies bytes from the card to the host, one piece on its way while the one before is moved on."""
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
                # No pinned memory to be had: slower, and just as right.
                self._stages = [empty(STAGE_BYTES, dtype=self._torch.uint8, device="cpu") for _ in "12"]
        return self._stages

    def _on_host(self, leaf: Any, place: str) -> Any:
        """A CPU tensor over the leaf's memory; None for what goes through unchanged."""
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
    """The card's PCI address as the daemon's gauges write it; its UUID where nobody can tell."""
    properties = accelerator.get_device_properties(index)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    # Older torches do not tell; and no card has the host bridge's address.
    if isinstance(domain, int) and isinstance(bus, int) and isinstance(slot, int) and (bus or slot):
        return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    try:
        return _told_by_driver(index, hip=bool(torch.version.hip))
    except (OSError, AttributeError, ValueError):
        uuid = getattr(properties, "uuid", None)
        if not uuid:
            raise UsageError(f"nobody can tell the PCI address of card {index}; pass name=") from None
        return f"gpu-{uuid}".lower()


def _told_by_driver(index: int, *, hip: bool) -> str:
    """By cuDeviceGetPCIBusId or hipDeviceGetPCIBusId, which need no context."""
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
