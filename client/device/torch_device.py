"""A GPU through torch: CUDA, or HIP, for which torch uses the same names.

Owns: the calls of torch, and one side stream. Does not own: the tensors, torch's caching allocator, and the pause while
a CUDA graph is captured (gate.py).

Invariants: only making a TorchDevice imports torch and makes a GPU context, on its own GPU only: the calls of all
threads are made with that GPU as the current one. All memory that a copy reads or writes is referenced until the copy
is complete, so that no allocator reuses it earlier. What allocates, frees, copies or asks for an event passes the gate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final, cast

import numpy as np

from ...errors import DeviceFull, UnsupportedLeaf, UsageError
from ...shm.payloads.dtypes import name_of_torch
from ...shm.payloads.specs import Spec
from ...shm.payloads.tensors import check_tensor, tensor_over
from ..gpu.gate import GATE, Gate, follow_torch
from ..gpu.gpu_name import gpu_name
from ..gpu.interface import Mark, Outgoing, mapped, reached_within

Array = np.ndarray[Any, Any]
_GIVE_BACK_S: Final = 0.1
"""Seconds that a return of memory waits for another thread's piece of work. Upkeep then tries once more."""


class TorchDevice:
    """A Device: one CUDA or HIP GPU of this process.

    While a CUDA graph is captured through `torch.cuda.CUDAGraph`, by any thread, all work of TorchDevices waits.
    `pause()` makes it wait in other cases. A tensor that a graph reads when it is replayed must stay leased for as long
    as the graph is.

    Args:
        device: torch's index of the GPU, "cuda:1", or a torch.device; None for the current one.
        name: the name of the GPU's gauge; None for its PCI address, or the UUID of a MIG slice.
        gives_back: whether `give_back` returns all unused memory of torch's allocator to the driver, by
            `torch.cuda.empty_cache()`. False, for an engine that has measured how much it needs: this process can use
            the memory of what was offloaded again, other processes cannot.
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

    def __init__(
        self,
        device: Any = None,
        *,
        name: str | None = None,
        gives_back: bool = True,
        accelerator: Any = None,
    ) -> None:
        try:
            import torch
        except ImportError as error:
            raise UsageError(
                f"a TorchDevice needs torch, which cannot be imported ({error}); FakeVram needs none"
            ) from None
        self._torch: Any = torch
        if accelerator is None:
            accelerator = torch.cuda
            if not accelerator.is_available():
                raise UsageError(f"torch {torch.__version__} sees no CUDA or HIP card; FakeVram needs none")
            follow_torch(torch)
        self._accelerator = accelerator
        kind: str = getattr(accelerator, "device_type", "cuda")
        index: Any = device
        if device is not None and not isinstance(device, int):
            index = torch.device(device).index
            if torch.device(device).type != kind:
                raise UsageError(f"device is {device}; it is an index, or {kind}:INDEX")
        if index is None:
            index = accelerator.current_device()
        if not 0 <= index < accelerator.device_count():
            raise UsageError(f"device is {index}, and torch sees {accelerator.device_count()} cards")
        self._index: Final[int] = index
        self._device = torch.device(kind, index)
        self.reports = True
        self.name = name if name is not None else gpu_name(torch, accelerator, index)
        self.gate: Final[Gate] = getattr(accelerator, "gate", GATE)
        with self.current():
            self._copies = accelerator.Stream(device=index)
        self._gives_back = gives_back

    # ---- Device

    @property
    def paused(self) -> bool:
        """As in Device."""
        return self.gate.closed or self.is_capturing()

    def pause(self) -> AbstractContextManager[None]:
        """As in Device. Pauses all TorchDevices of the process."""
        return self.gate.pause()

    def reading(self) -> tuple[int, int]:
        """As in Device."""
        with self.gate.work(), self.current():
            free_bytes, total_bytes = self._accelerator.mem_get_info(self._index)
        return total_bytes - free_bytes, total_bytes

    def bytes_of(self, tree: Any) -> int:
        """As in Device. Raises UnsupportedLeaf if a tensor has no plain memory, or none any more, or a dtype that no
        payload can have."""
        sizes: dict[int, int] = {}

        def add(leaf: Any, place: str) -> None:
            here = self._lies_here(leaf, place)
            check_tensor(leaf, place)
            if here:
                at, size_bytes = leaf.data_ptr(), min(leaf.nbytes, leaf.untyped_storage().nbytes())
                sizes[at] = max(size_bytes, sizes.get(at, 0))

        mapped(tree, add)
        return sum(sizes.values())

    def mark(self) -> TorchMark:
        """As in Device."""
        with self.current():
            return TorchMark(self, self._accelerator.current_stream(self._index))

    def lend(self, tree: Any) -> None:
        """As in Device."""
        with self.current():
            stream = self._accelerator.current_stream(self._index)

            def add(leaf: Any, place: str) -> None:
                if self._lies_here(leaf, place):
                    leaf.record_stream(stream)

            mapped(tree, add)

    def outgoing(self, tree: Any, mark: Mark) -> Any:
        """As in Device."""
        mark.wait()

        def leaving(leaf: Any, place: str) -> Any:
            if not self._lies_here(leaf, place):
                return leaf
            check_tensor(leaf, place)
            plain = leaf.detach()
            if not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
                return self._copied(plain)
            return Outgoing(Spec(tuple(plain.shape), plain.dtype), partial(self._read, plain, place))

        return mapped(tree, leaving)

    def to_device(self, tree: Any) -> Any:
        """As in Device. Copies from memory that is registered with the driver need no intermediate buffer."""
        sources: deque[Any] = deque()
        mapped(tree, lambda leaf, place: sources.append(self._on_host(leaf, place)))
        wanted = [source for source in sources if source is not None]
        tensors: deque[Any] = deque()
        try:
            # Allocated on the side stream, so the copies need not wait for work queued on the caller's stream.
            with self._work():
                for source in wanted:
                    tensors.append(self._torch.empty_like(source, device=self._device))
        except self._accelerator.OutOfMemoryError as error:
            tensors.clear()
            self.give_back()
            raise DeviceFull(f"{self.name} has no room for the tensors to promote: {error}") from None
        for tensor, source in zip(tensors, wanted, strict=True):
            with self._work():
                self._copy(tensor, source)
        made = mapped(tree, lambda leaf, _: leaf if sources.popleft() is None else tensors.popleft())
        self.lend(made)
        return made

    def give_back(self) -> int:
        """As in Device: see `gives_back`. Returns 0 while the device is paused, and where the allocator in use has no
        statistics, as a pluggable one."""
        with self.gate.work_now(_GIVE_BACK_S) as may, self.current():
            if not may or not self._gives_back:
                return 0
            with suppress(RuntimeError):
                # Torch's own statistics, so that other processes do not count.
                before_bytes = self._accelerator.memory_reserved(self._index)
                self._accelerator.empty_cache()
                return max(0, int(before_bytes - self._accelerator.memory_reserved(self._index)))
            return 0

    # ---- for the parts of this package

    def current(self) -> AbstractContextManager[object]:
        """A block with this GPU as the calling thread's current one. A call without it would make a context on GPU 0,
        which takes some 500 MiB there."""
        return cast(AbstractContextManager[object], self._accelerator.device(self._index))

    def event(self, stream: Any) -> Any:
        """An event, recorded on a stream."""
        with self.current():
            # blocking=True: a thread that waits for the event sleeps instead of spinning.
            event = self._accelerator.Event(blocking=True)
            event.record(stream)
            return event

    def is_capturing(self, stream: Any = None) -> bool:
        """Whether work on a stream, by default the current one, goes into a CUDA graph now."""
        with self.current(), nullcontext() if stream is None else self._accelerator.stream(stream):
            try:
                return bool(self._accelerator.is_current_stream_capturing())
            except RuntimeError:
                # The driver does not tell this of the default stream while another stream is captured.
                return True

    # ---- private

    def _read(self, tensor: Any, place: str, to: Array, start: int, stop: int) -> None:
        """Copies bytes of a contiguous tensor straight to `to`. If that is not pinned, the driver takes buffers of its
        own."""
        check_tensor(tensor, place)
        landing = tensor_over(self._torch, to)
        with self._work():
            self._copy(landing, tensor.reshape(-1).view(self._torch.uint8)[start:stop])

    def _copy(self, to: Any, source: Any) -> None:
        to.copy_(source, non_blocking=True)
        self.event(self._copies).synchronize()

    @contextmanager
    def _work(self) -> Iterator[None]:
        with self.gate.work(), self._torch.no_grad(), self.current(), self._accelerator.stream(self._copies):
            yield

    def _copied(self, tensor: Any) -> Any:
        """A copy in host memory of a tensor in any order of its dimensions."""
        try:
            with self._work():
                return self._torch.empty_like(tensor, device="cpu").copy_(tensor)
        except self._accelerator.OutOfMemoryError as error:
            raise DeviceFull(
                f"{self.name} has no room to make a strided tensor contiguous; keep contiguous ones: {error}"
            ) from None

    def _lies_here(self, leaf: Any, place: str) -> bool:
        if not isinstance(leaf, self._torch.Tensor):
            return False
        if leaf.device.type != self._device.type and leaf.device.type == "cpu":
            return False
        if leaf.device.type != self._device.type or leaf.device.index not in (None, self._index):
            raise UsageError(f"{place} lies on {leaf.device}; this device is {self._device}, {self.name}")
        if leaf.layout is not self._torch.strided or name_of_torch(self._torch, leaf.dtype) is None:
            raise UnsupportedLeaf(
                f"{place} is a tensor of {leaf.dtype} with layout {leaf.layout}, which no leaf can have; "
                "pass x.to_dense(), or another plain dtype"
            )
        return True

    def _on_host(self, leaf: Any, place: str) -> Any:
        """A CPU tensor over the leaf's memory; None for leaves that pass through unchanged."""
        if isinstance(leaf, np.ndarray | np.generic):
            array = np.asarray(leaf)
            try:
                return tensor_over(self._torch, array if array.flags.c_contiguous else np.ascontiguousarray(array))
            except UnsupportedLeaf as error:
                raise UnsupportedLeaf(f"{place}: {error}") from None
        return leaf if isinstance(leaf, self._torch.Tensor) and leaf.device.type == "cpu" else None


class TorchMark:
    """A CUDA event. While a graph is captured none is recorded or asked for: it is recorded at the first wait after the
    capture."""

    __slots__ = ("_device", "_event", "_stream")

    def __init__(self, device: TorchDevice, stream: Any) -> None:
        self._device = device
        self._stream = stream
        self._event: Any = None
        if not device.paused:
            self._event = device.event(stream)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the stream has reached the event. False if it has not within `timeout_s` seconds."""
        return reached_within(self._reached, timeout_s)

    def _reached(self, patience_s: float) -> bool:
        device = self._device
        with device.gate.work_now(patience_s) as may, device.current():
            if not may:
                return False
            if self._event is None:
                if device.is_capturing(self._stream):
                    return False
                self._event = device.event(self._stream)
            return bool(self._event.query())
