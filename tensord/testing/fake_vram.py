"""VRAM without a GPU or torch, for tests and examples. Mistakes that corrupt data on a real GPU corrupt data
here.

    card = FakeCard(folder, "card0", 1 << 30)     shared by processes, capacity enforced (fake_card.py)
    device = FakeVram(card)                       this process's tensors on it
    tensor = device.upload(array)                 asynchronous, like every operation on a FakeTensor

Owns: the tensors. A dropped tensor's memory returns to a caching allocator (fake_allocator.py), and gauges change only
with `give_back()`. Does not own: the card's account (fake_card.py), the execution of streams (fake_stream.py).

Invariants: new memory and freed memory is filled with 0xA5, so that a read before its stream has written the data, or
after it was freed, is visibly wrong. A block is reused only for the stream that it was allocated under, and only after
every stream that it was lent to has finished its work so far.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

import numpy as np

from ..client.gpu.gate import Gate
from ..client.gpu.interface import Mark, Outgoing, mapped
from ..errors import DeviceFull, UnsupportedLeaf, UsageError
from ..shm.payloads.dtypes import dtype_named, name_of
from ..shm.payloads.specs import Spec
from ..shm.payloads.tensors import loaded_torch, tensor_leaf
from .fake_allocator import BLOCK_BYTES, Allocator, CountedStorage
from .fake_card import FakeCard
from .fake_stream import FakeMark, FakeStream, Hold

__all__ = ["FakeCard", "FakeMark", "FakeStream", "FakeTensor", "FakeVram", "Hold"]

Array = np.ndarray[Any, Any]
_GIVE_BACK_S: Final = 1.0
"""Seconds that a return of memory waits for another thread's piece of work."""


class FakeTensor:
    """A tensor on a fake card. The current stream executes each operation on it later."""

    __slots__ = ("_array", "_storage", "device")

    def __init__(self, device: FakeVram, storage: CountedStorage, array: Array) -> None:
        self.device = device
        self._storage = storage
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, as of a numpy array."""
        shape: tuple[int, ...] = self._array.shape
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, of numpy or ml_dtypes."""
        dtype: np.dtype[Any] = self._array.dtype
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the elements. On the card a tensor takes whole blocks of BLOCK_BYTES."""
        return self._array.nbytes

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> FakeTensor:
        """A view of the same memory."""
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, int | slice) for part in parts):
            raise UsageError(f"a FakeTensor is indexed by ints and slices, not by {index!r}")
        return FakeTensor(self.device, self._storage, self._array[(*parts, ...)])

    def __repr__(self) -> str:
        return f"FakeTensor({list(self.shape)}, {self.dtype}, {self.device.name})"

    def fill_(self, value: Any) -> FakeTensor:
        """Sets every element to `value`. Returns the tensor."""
        array = self._array
        self.device.launch(lambda: array.fill(value))
        return self

    def copy_(self, source: FakeTensor | Array) -> FakeTensor:
        """Copies the values of another tensor, or of an array as it is now. Returns the tensor."""
        array = self._array
        values = source._array if isinstance(source, FakeTensor) else np.array(source, copy=True)
        self.device.launch(lambda: np.copyto(array, values))
        return self

    def clone(self) -> FakeTensor:
        """A copy in new memory of the card.

        Raises:
            DeviceFull: the card has no room for the copy.
        """
        return self.device.empty(self.shape, self.dtype).copy_(self)

    def numpy(self) -> Array:
        """A copy on the host, after all work queued on the current stream."""
        self.device.mark().wait()
        return self._array.copy()

    def peek(self) -> Array:
        """A copy of the present memory without waiting, for tests of missing synchronisation."""
        return self._array.copy()


class _GatedMark:
    """A mark that is not reached while the device is paused."""

    __slots__ = ("_gate", "_mark")

    def __init__(self, gate: Gate, mark: FakeMark) -> None:
        self._gate = gate
        self._mark = mark

    def wait(self, timeout_s: float | None = None) -> bool:
        if timeout_s is not None and self._gate.closed:
            return False
        return self._mark.wait(timeout_s)


class FakeVram:
    """A Device on a FakeCard, with this process's tensors. Thread-safe, but not usable after a fork.

    Args:
        card: this process's handle on the card.
        reports: as in Device. By default False, since a fake card writes its own gauge.

    Attributes:
        stream: the default current stream.
        copies: the stream for copies from the card and to it.

    Example:
        >>> import tempfile
        >>> from tensord.testing.fake_vram import FakeCard, FakeVram
        >>> device = FakeVram(FakeCard(tempfile.mkdtemp(), "card0", 1 << 20))
        >>> device.upload(np.arange(3)).numpy()
        array([0, 1, 2])
    """

    def __init__(self, card: FakeCard, *, reports: bool = False) -> None:
        self.name = card.name
        self.reports = reports
        self.card = card
        self.stream: Final = FakeStream()
        self.copies: Final = FakeStream()
        self._allocator = Allocator(card)
        self._gate = Gate()
        self._threads = threading.local()

    # ---- tensors and streams

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> FakeTensor:
        """A tensor whose elements are garbage.

        Raises:
            DeviceFull: the card has no room, even after this process's free blocks were returned.
            UnsupportedLeaf: a dtype that no payload can have.
        """
        return self._empty((shape,) if isinstance(shape, int) else shape, dtype, self.current_stream)

    def upload(self, array: Any) -> FakeTensor:
        """A tensor with the present content of `array`, once the current stream has executed the copy.

        Raises: as `empty`.
        """
        source = np.asarray(array)
        return self.empty(source.shape, source.dtype).copy_(source)

    @property
    def current_stream(self) -> FakeStream:
        """The calling thread's current stream."""
        stream: FakeStream = getattr(self._threads, "stream", self.stream)
        return stream

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[FakeStream]:
        """Makes `stream` the calling thread's current stream within the block."""
        before = self.current_stream
        self._threads.stream = stream
        try:
            yield stream
        finally:
            self._threads.stream = before

    def launch(self, kernel: Callable[[], object]) -> None:
        """Queues `kernel()` on the current stream."""
        self.current_stream.enqueue(kernel)

    @property
    def cached_bytes(self) -> int:
        """Bytes that `give_back` would return now."""
        return self._allocator.cached_bytes()

    # ---- Device

    @property
    def paused(self) -> bool:
        """As in Device."""
        return self._gate.closed

    def pause(self) -> AbstractContextManager[None]:
        """As in Device."""
        return self._gate.pause()

    def reading(self) -> tuple[int, int]:
        """As in Device."""
        with self._gate.work():
            return self.card.reading()

    def bytes_of(self, tree: Any) -> int:
        """As in Device."""
        sizes: dict[int, int] = {}

        def add(leaf: Any, place: str) -> None:
            if isinstance(leaf, FakeTensor):
                array = self._own(leaf, place)._array
                sizes[array.ctypes.data] = max(array.nbytes, sizes.get(array.ctypes.data, 0))

        mapped(tree, add)
        return sum(sizes.values())

    def mark(self) -> Mark:
        """As in Device."""
        return _GatedMark(self._gate, self.current_stream.mark())

    def lend(self, tree: Any) -> None:
        """As in Device."""
        stream = self.current_stream

        def add(leaf: Any, place: str) -> None:
            if isinstance(leaf, FakeTensor):
                storage = self._own(leaf, place)._storage
                if storage.block.stream is not stream:
                    storage.lent_to.add(stream)

        mapped(tree, add)

    def outgoing(self, tree: Any, mark: Mark) -> Any:
        """As in Device."""
        mark.wait()

        def leaving(leaf: Any, place: str) -> Any:
            if not isinstance(leaf, FakeTensor):
                return leaf
            source = self._own(leaf, place)._array
            return Outgoing(Spec(source.shape, name_of(source.dtype)), partial(self._read, source))

        return mapped(tree, leaving)

    def to_device(self, tree: Any) -> Any:
        """As in Device."""
        sources: list[Array] = []
        mapped(tree, lambda leaf, place: _collected(leaf, place, sources))
        tensors: deque[FakeTensor] = deque()
        with self._gate.work(), self.on(self.copies):
            try:
                for source in sources:
                    tensors.append(self._empty(source.shape, source.dtype, self.copies))
            except DeviceFull:
                tensors.clear()
                self.give_back()
                raise
            for tensor, source in zip(tensors, sources, strict=True):
                tensor.copy_(source)
            self.copies.mark().wait()
        made = mapped(tree, lambda leaf, _: tensors.popleft() if _is_array(leaf) else leaf)
        self.lend(made)
        return made

    def give_back(self) -> int:
        """As in Device. Returns all unused memory of this process, also that of tensors that it made itself. Returns 0
        while the device is paused."""
        with self._gate.work_now(_GIVE_BACK_S) as may:
            return self._allocator.give_back() if may else 0

    # ---- private

    def _read(self, source: Array, to: Array, start: int, stop: int) -> None:
        raw = np.ascontiguousarray(source).reshape(-1).view(np.uint8)[start:stop]
        with self._gate.work():
            self.copies.enqueue(lambda: np.copyto(to, raw))
            self.copies.mark().wait()

    def _empty(self, shape: tuple[int, ...], dtype: Any, stream: FakeStream) -> FakeTensor:
        plain = np.dtype(dtype)
        if name_of(plain) is None:
            raise UnsupportedLeaf(f"a tensor of dtype {plain}, which no leaf can have; take a plain one")
        wanted_bytes = math.prod(shape) * plain.itemsize
        block_bytes = -(-wanted_bytes // BLOCK_BYTES) * BLOCK_BYTES
        storage = CountedStorage(self._allocator, self._allocator.allocate(block_bytes, stream))
        return FakeTensor(self, storage, np.ndarray(shape, plain, storage.block.buffer))

    def _own(self, tensor: FakeTensor, place: str) -> FakeTensor:
        if tensor._storage._allocator is not self._allocator:
            raise UsageError(f"{place} lies on another device, {tensor.device.name}; this one is {self.name}")
        return tensor


def _is_array(leaf: Any) -> bool:
    torch = loaded_torch()
    return isinstance(leaf, np.ndarray | np.generic) or (torch is not None and isinstance(leaf, torch.Tensor))


def _collected(leaf: Any, place: str, into: list[Array]) -> None:
    if isinstance(leaf, np.ndarray | np.generic):
        into.append(np.asarray(leaf))
    elif _is_array(leaf):
        name, array, _ = tensor_leaf(loaded_torch(), leaf, lambda: place)  # type: ignore[arg-type]
        into.append(array.view(dtype_named(name)))
