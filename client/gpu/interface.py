"""The interface of a device: a GPU that holds tensors of this process, as DeviceCache uses it.

Owns: the protocols Device and Mark, and what devices share: the wait for a mark, the traversal of trees, and payloads
whose leaves are read from a device. Does not own: any device. One conformance suite tests torch_device.py and
tensord/testing/fake_vram.py.

Trees are those of `tensord.Client.put`: dict, list, tuple and scalars around tensors. Tensors of the device are leaves.

Invariants: values that are not tensors pass through unchanged. A payload has the bytes that `pack` has of a copy on the
host. No copy of a whole leaf is made on the host, unless the device itself has made one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ...errors import TensordError, UnsupportedLeaf, shown, without_frames
from ...shm.payloads.packing import Packed, pack_spec
from ...shm.payloads.specs import Spec
from ...shm.ring.layout import aligned

Array = np.ndarray[Any, Any]
Read = Callable[[Array, int, int], object]
"""`read(to, start, stop)` copies the bytes [start, stop) of a leaf, in C order, to `to`, (stop - start,) uint8 of the
host. Returns once they are there."""
PIECE_BYTES: Final = 16 << 20
"""NVIDIA's driver copies 16 MiB at 12 GB/s from an H200 to memory that is not pinned, and 1 MiB at 5 GB/s."""
_PAUSE_S_MIN: Final = 50e-6
_PAUSE_S_MAX: Final = 5e-3


@runtime_checkable
class Mark(Protocol):
    """A point in the work of one stream, after all work queued on the stream when the mark was made."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits, without the GIL, until the stream has reached the mark. False if it has not within `timeout_s`
        seconds."""
        ...


@runtime_checkable
class Device(Protocol):
    """One GPU. Thread-safe, but not usable after a fork.

    `name`: the daemon's name of the GPU's gauge: a PCI address such as "0000:65:00.0", or a fake card's name.
    `reports`: whether to send `reading()` to a daemon that has no GPU library of its own.
    """

    name: str
    reports: bool

    @property
    def paused(self) -> bool:
        """Whether work waits, within `pause()` or for a reason of the device's own, such as the capture of a CUDA
        graph. Cheap."""
        ...

    def pause(self) -> AbstractContextManager[None]:
        """For the block, the device does nothing: `mark`, `lend` and `bytes_of` return at once, `give_back` returns 0,
        no mark is reached, and all other calls wait for the end. Waits for the piece of work that is under way."""
        ...

    def reading(self) -> tuple[int, int]:
        """(used, total) bytes of the whole GPU, other processes included, as its driver reports them."""
        ...

    def bytes_of(self, tree: Any) -> int:
        """The bytes of the tree's tensors on this GPU. Several tensors at one address count once. Raises UsageError if
        a tensor lies on another device; the message names its place in the tree."""
        ...

    def mark(self) -> Mark:
        """A mark after all work queued so far on the calling thread's current stream. Cheap; does not wait."""
        ...

    def lend(self, tree: Any) -> None:
        """Declares that the calling thread's current stream will use the tree's tensors. Cheap; does not wait.

        Another stream's allocator would otherwise reuse their memory as soon as the last reference is dropped, even
        while the current stream still uses it.
        """
        ...

    def outgoing(self, tree: Any, mark: Mark) -> Any:
        """The tree with an `Outgoing` for every tensor, which reads the tensor's bytes as they were when
        `mark` was reached; of a tensor whose elements do not lie in C order with a copy in host memory. Waits for the
        mark without the GIL. The caller neither writes nor drops the tensors before the last read. Raises DeviceFull if
        a tensor that is not one plain block of memory needs a copy on the GPU, which has no room for it."""
        ...

    def to_device(self, tree: Any) -> Any:
        """The tree with a tensor on this device for every numpy array and CPU tensor, once the copies are complete. The
        tensors are lent to the calling thread's current stream. Raises DeviceFull if the GPU has no room; then no
        memory stays allocated there. Raises UnsupportedLeaf if the device has no such dtype."""
        ...

    def give_back(self) -> int:
        """Returns memory without a tensor in it to the driver: at least that of tensors that `to_device` made. Returns
        the number of bytes."""
        ...


def mapped(tree: Any, change: Callable[[Any, str], Any], place: str = "tree") -> Any:
    """A new tree with `change(leaf, place)` in place of every leaf. Dicts, lists and tuples are new objects."""
    kind = type(tree)
    if kind is dict:
        return {key: mapped(child, change, f"{place}[{shown(key)}]") for key, child in tree.items()}
    if kind is not list and kind is not tuple:
        return change(tree, place)
    children = [mapped(child, change, f"{place}[{at}]") for at, child in enumerate(tree)]
    return children if kind is list else tuple(children)


def reached_within(reached: Callable[[float], bool], timeout_s: float | None) -> bool:
    """Asks again and again, with short pauses, until `reached(patience_s)` is true; the question itself may take
    `patience_s`. False if it is not true within `timeout_s` seconds."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = _PAUSE_S_MIN
    while True:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if reached(_PAUSE_S_MAX if left_s is None else min(left_s, _PAUSE_S_MAX)):
            return True
        if left_s == 0:
            return False
        time.sleep(pause_s if left_s is None else min(pause_s, left_s))
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)


class Outgoing(NamedTuple):
    """A leaf that lies on a device. `spec`: its shape and dtype, as for `Client.reserve`."""

    spec: Spec
    read: Read


def payload_of(tree: Any, device_name: str, *, depth_max: int) -> OutgoingPayload:
    """The payload of a tree with `Outgoing` leaves. Raises: as `pack`."""
    reads: list[Read] = []

    def described(leaf: Any, place: str) -> Any:
        if isinstance(leaf, Spec):
            raise UnsupportedLeaf(f"{place} is a Spec, which only reserve takes; pass an array")
        if not isinstance(leaf, Outgoing):
            return leaf
        reads.append(leaf.read)
        return leaf.spec

    return OutgoingPayload(pack_spec(mapped(tree, described), depth_max), reads, device_name)


class OutgoingPayload:
    """A payload. `reads`: of the leaves that lie on the device, in order. `failure`: why a copy failed, or None."""

    def __init__(self, packed: Packed, reads: list[Read], device_name: str) -> None:
        self.header = packed.header
        self.payload_bytes = packed.payload_bytes
        self.failure: Exception | None = None
        self._packed = packed
        self._reads = reads
        self._device_name = device_name

    def write(self, memory: memoryview, start: int) -> None:
        """As `Packed.write`.

        Raises:
            TensordError: the device failed. An unknown part is written.
        """
        self._packed.write(memory, start)
        reads = iter(self._reads)
        at = start + len(self.header)
        for size_bytes, _, _, array, _ in self._packed.sources:
            at = aligned(at)
            if array is None:
                self._read(next(reads), np.ndarray((size_bytes,), np.uint8, memory, at))
            at += size_bytes

    def _read(self, read: Read, to: Array) -> None:
        try:
            for start in range(0, len(to), PIECE_BYTES):
                stop = min(start + PIECE_BYTES, len(to))
                read(to[start:stop], start, stop)
        except TensordError:
            raise
        except Exception as error:
            self.failure = without_frames(error)
            raise TensordError(f"a copy from {self._device_name} failed: {error}; the entry is not stored") from None
