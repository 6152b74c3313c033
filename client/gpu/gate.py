"""Keeps this library's GPU work apart from captures of CUDA graphs.

While a process captures a graph, any thread's call that allocates, frees, copies or asks for the state of an event may
fail, or ruin the capture. So work passes a gate. A capture closes the gate, which waits for the piece of work that is
under way, and opens it again at its end. Captures begin through `torch.cuda.CUDAGraph`, which `follow_torch` makes tell
the gate; `pause` closes it for any other reason.

Owns: the gate, and the calls of torch that close it. Does not own: the work (torch_device.py).

Invariants: no work runs while the gate is closed. The thread that closes the gate waits for one piece of work, at most
PIECE_BYTES of a copy, and for nothing else.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final


class Gate:
    """Open, until someone closes it. Thread-safe; work may be nested."""

    def __init__(self) -> None:
        self._closed = 0
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
            yield

    @contextmanager
    def work_now(self, timeout_s: float = 0.0) -> Iterator[bool]:
        """As `work`, without waiting for an open gate. Yields False if the gate is closed, or other work takes longer
        than `timeout_s`: nothing may be done then."""
        if self._closed or not self._changed.acquire(timeout=timeout_s):
            yield False
            return
        try:
            yield not self._closed
        finally:
            self._changed.release()

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


GATE: Final = Gate()
"""The gate of all TorchDevices: a capture concerns all threads and GPUs of a process."""


def follow_torch(torch: ModuleType, gate: Gate = GATE) -> None:
    """Makes captures of CUDA graphs tell the gate. Once per process. A capture that is begun by other means than
    `torch.cuda.CUDAGraph`, for example by another library, does not tell."""
    graph: Any = getattr(torch.cuda, "CUDAGraph", None)
    if graph is None or getattr(graph.capture_begin, "tells", None) is gate:
        return
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def capture_begin(*arguments: Any, **named: Any) -> Any:
        gate.close()
        try:
            return begin(*arguments, **named)
        except BaseException:
            gate.open()
            raise

    @functools.wraps(end)
    def capture_end(*arguments: Any, **named: Any) -> Any:
        try:
            return end(*arguments, **named)
        finally:
            gate.open()

    graph.capture_begin, graph.capture_end = capture_begin, capture_end
    graph.capture_begin.tells = gate
