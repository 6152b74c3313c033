"""Keeps this library's GPU work apart from captures of CUDA graphs, and its tensors apart from the engine's.

While a process captures a graph, any thread's call that allocates, frees, copies or asks for the state of an event may
fail, or ruin the capture. So work passes a gate. A capture closes the gate, which waits for the piece of work that is
under way, and opens it again at its end. Captures begin through `torch.cuda.CUDAGraph`, which `follow_torch` makes tell
the gate; `pause` closes it for any other reason.

`torch.cuda.empty_cache()` would return memory that the engine keeps for its own next step. So this library's tensors
lie in private pools, whose memory torch returns to the driver when the pool is destroyed.

Owns: the gate, the calls of torch that close it, and the pools. Does not own: the work, the tensors (torch_device.py).

Invariants: no work runs while the gate is closed. The thread that closes the gate waits for one piece of work, at most
PIECE_BYTES of a copy, and for nothing else. No other tensors lie in a pool. A pool is destroyed without a tensor in it,
and only while no thread captures a graph or allocates from a pool, since torch ends the process otherwise.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, Final

POOL_BYTES: Final = 64 << 20
"""Bytes after which a pool takes no more tensors. A pool with one small tensor left keeps at most about so much."""
_log = logging.getLogger("tensord")


class Gate:
    """Open, until someone closes it. Thread-safe; work may be nested.

    `pools`: how many threads allocate from a private pool of torch now, this library's own not counted. An engine may
    leave and enter a graph's pool in the middle of a capture, so only 0 means that there are none.
    """

    def __init__(self) -> None:
        self.pools = 0
        self._closed = 0
        self._worker = 0
        self._changed = threading.Condition(threading.RLock())

    @property
    def closed(self) -> bool:
        """Whether work has to wait. May change at once, except within `work`."""
        return self._closed > 0

    @contextmanager
    def work(self) -> Iterator[None]:
        """A piece of work. Waits until the gate is open; it stays open within the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            with self._working():
                yield

    @contextmanager
    def work_now(self, timeout_s: float = 0.0) -> Iterator[bool]:
        """As `work`, without waiting for an open gate. Yields False if the gate is closed, or other work takes longer
        than `timeout_s`: nothing may be done then."""
        if self._closed or not self._changed.acquire(timeout=timeout_s):
            yield False
            return
        try:
            with self._working():
                yield not self._closed
        finally:
            self._changed.release()

    @contextmanager
    def _working(self) -> Iterator[None]:
        outer, self._worker = self._worker, threading.get_ident()
        try:
            yield
        finally:
            self._worker = outer

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Closes the gate for the block."""
        self.close()
        try:
            yield
        finally:
            self.open()

    def close(self) -> None:
        """Closes the gate once the work under way is done. Each call needs its `open`."""
        with self._changed:
            self._closed += 1

    def open(self) -> None:
        """Undoes one `close`."""
        with self._changed:
            self._closed = max(0, self._closed - 1)
            self._changed.notify_all()

    def count_pools(self, change: int) -> None:
        """Records that the calling thread begins (1) or ends (-1) to allocate from a private pool."""
        with self._changed:
            if self._worker != threading.get_ident():
                self.pools += change


GATE: Final = Gate()
"""The gate of all TorchDevices: a capture concerns all threads and GPUs of a process."""


def follow_torch(torch: ModuleType, gate: Gate = GATE) -> None:
    """Makes captures of CUDA graphs, and allocations from private pools, tell the gate. Once per process. A capture
    that is begun by other means than `torch.cuda.CUDAGraph`, for example by another library, does not tell."""
    graph: Any = getattr(torch.cuda, "CUDAGraph", None)
    if graph is None or getattr(graph.capture_begin, "tells", None) is gate:
        return
    graph.capture_begin = _telling(graph.capture_begin, gate.close, undone_by=gate.open)
    graph.capture_end = _telling(graph.capture_end, gate.open)
    graph.capture_begin.tells = gate
    # torch.cuda.use_mem_pool looks these names up in its module, torch's trees of CUDA graphs in torch._C.
    enter, leave = functools.partial(gate.count_pools, 1), functools.partial(gate.count_pools, -1)
    for module in (getattr(torch.cuda, "memory", None), getattr(torch, "_C", None)):
        begin = getattr(module, "_cuda_beginAllocateCurrentThreadToPool", None)
        end = getattr(module, "_cuda_endAllocateToPool", None)
        if callable(begin) and callable(end):
            setattr(module, begin.__name__, _telling(begin, enter, undone_by=leave))
            setattr(module, end.__name__, _telling(end, leave))


def _telling(
    call: Callable[..., Any], tell: Callable[[], None], *, undone_by: Callable[[], None] | None = None
) -> Callable[..., Any]:
    """`call`, after whose end the gate is told; with `undone_by` before it, which is undone if the call fails."""

    @functools.wraps(call)
    def told(*arguments: Any, **named: Any) -> Any:
        if undone_by is None:
            try:
                return call(*arguments, **named)
            finally:
                tell()
        tell()
        try:
            return call(*arguments, **named)
        except BaseException:
            undone_by()
            raise

    return told


class Pools:
    """The private pools of one GPU, used as work of the gate. `usable`: whether torch has them, and its present
    allocator takes part.

    Torch returns only whole segments without a tensor. So tensors are made in one pool until it has POOL_BYTES, then in
    a new one; each is destroyed once its last tensor is gone.
    """

    def __init__(self, torch: ModuleType, accelerator: Any, index: int, name: str, gate: Gate) -> None:
        # Without the last, a pool takes the allocations of all threads.
        self.usable = (
            hasattr(getattr(accelerator, "MemPool", None), "snapshot")
            and hasattr(accelerator, "use_mem_pool")
            and hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")
        )
        if not self.usable:
            _log.info("%s: torch %s has no private pools; its memory is not returned", name, torch.__version__)
        self._accelerator = accelerator
        self._index = index
        self._name = name
        self._gate = gate
        self._pools: list[Any] = []
        self._taken_bytes = 0
        """Of the last pool."""

    def allocating(self, size_bytes: int) -> AbstractContextManager[None]:
        """A block in which the calling thread's tensors, about `size_bytes`, are made in a pool."""
        pool: Any = self._pool_for(size_bytes) if self.usable else None
        return nullcontext() if pool is None else self._accelerator.use_mem_pool(pool, device=self._index)

    def release(self) -> int:
        """Destroys the pools without a tensor. Returns the bytes that the driver gets."""
        if not self._pools or self._gate.pools:
            return 0
        unused = [(pool, freed_bytes) for pool in self._pools if (freed_bytes := self._unused_bytes(pool)) is not None]
        if unused:
            # The destruction keeps the interpreter's lock, so what it would wait for is waited for here.
            self._accelerator.synchronize(self._index)
            self._taken_bytes = POOL_BYTES  # the last may be another one from now on
        for pool, _ in unused:
            self._pools.remove(pool)
        return sum(freed_bytes for _, freed_bytes in unused)

    # ---- private

    def _pool_for(self, size_bytes: int) -> Any:
        if not self._pools or self._taken_bytes + size_bytes > max(POOL_BYTES, size_bytes):
            try:
                self._pools.append(self._accelerator.MemPool())
            except Exception as error:
                self._give_up(error)
                return None
            self._taken_bytes = 0
        self._taken_bytes += size_bytes
        return self._pools[-1]

    def _unused_bytes(self, pool: Any) -> int | None:
        """The bytes of a pool without a tensor; None if it has one."""
        try:
            segments = pool.snapshot()
        except Exception as error:
            self._give_up(error)
            return None
        own = [segment for segment in segments if segment.get("device", self._index) == self._index]
        if any(segment["allocated_size"] for segment in own):
            return None
        return sum(int(segment["total_size"]) for segment in own)

    def _give_up(self, error: Exception) -> None:
        """An allocator without pools or statistics: a pluggable one, or another backend."""
        if self.usable:
            self.usable = False
            _log.warning("%s: torch's allocator has no private pools, and returns no memory: %s", self._name, error)
