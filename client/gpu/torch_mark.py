"""Points in the work of a stream of torch, and the wait for them.

Owns: the event of a TorchMark, and when it is recorded. Does not own: the stream, the gate.
Invariants: no event is recorded in a graph that is captured, and none is asked for while a graph is captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from .gate import Gate

__all__ = ["MarkedDevice", "TorchMark", "reached_within"]

_PAUSE_S_MIN: Final = 50e-6
_PAUSE_S_MAX: Final = 5e-3


class MarkedDevice(Protocol):
    """What a mark needs of its device; `TorchDevice` explains it."""

    @property
    def gate(self) -> Gate: ...

    @property
    def paused(self) -> bool: ...

    def current(self) -> AbstractContextManager[object]: ...

    def event(self, stream: Any) -> Any: ...

    def is_capturing(self, stream: Any) -> bool: ...


class TorchMark:
    """A CUDA event. While a graph is captured none is recorded: it is recorded at the first wait after the capture."""

    __slots__ = ("_device", "_event", "_stream")

    def __init__(self, device: MarkedDevice, stream: Any) -> None:
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
