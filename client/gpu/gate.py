"""Keeps this library's GPU work and captures of CUDA graphs apart.

While a process captures a graph, any thread's call that allocates, frees, copies or asks for the state of an event may
fail, or ruin the capture. So work passes a gate. A capture closes the gate, which waits for the piece of work that is
under way, and opens it again at its end. Captures begin through `torch.cuda.CUDAGraph`, which `follow_torch` makes tell
the gate; `pause` closes it for any other reason.

Owns: the gate, and the calls of torch that close it. Does not own: the work (torch_device.py).

Invariants: no work runs while the gate is closed. The thread that closes the gate waits for one piece of work, at most
STAGE_BYTES of a copy, and for nothing else.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final


class Gate:
    """Open, until someone closes it. Thread-safe; work may be nested.

    `pools`: how many threads allocate from a private pool of torch now, this library's own not counted. Torch ends the
    process if a pool is destroyed meanwhile. An engine may leave and enter a graph's pool in the middle of a capture,
    so the count may be below 0; only 0 means that there are none.
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
            outer, self._worker = self._worker, threading.get_ident()
            try:
                yield
            finally:
                self._worker = outer

    @contextmanager
    def work_now(self, timeout_s: float = 0.0) -> Iterator[bool]:
        """As `work`, without waiting for an open gate. Yields False if the gate is closed, or other work takes longer
        than `timeout_s`: nothing may be done then."""
        if self._closed or not self._changed.acquire(timeout=timeout_s):
            yield False
            return
        outer, self._worker = self._worker, threading.get_ident()
        try:
            yield not self._closed
        finally:
            self._worker = outer
            self._changed.release()

    @contextmanager
    def pause(self) -> Iterator[None]:
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
    """Makes captures of CUDA graphs, and allocations from private pools, tell the gate. Once per process.

    A capture that is begun by other means than `torch.cuda.CUDAGraph`, for example by another library, does not tell.
    """
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
