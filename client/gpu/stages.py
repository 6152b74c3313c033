"""Copies from a GPU to memory of the process that is not pinned, through two pinned buffers.

Owns: the buffers, and the copies through them. Does not own: the tensors, the stream, the order of copies of several
threads (torch_device.py). Invariants: a buffer is filled again only after its last content is copied on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Final

import numpy as np

from .interface import Mark

__all__ = ["STAGE_BYTES", "Stages"]

Array = np.ndarray[Any, Any]
STAGE_BYTES: Final = 16 << 20
"""Bytes of each of the two buffers. Pinning the destination itself would cost a system call per page, and torch keeps
pinned memory, rounded up to a power of two, until the process ends."""


class Stages:
    """Two pinned buffers, made at the first copy.

    Args:
        marked: makes a mark on the stream of the copies.
        work: the block in which a piece of GPU work is done, on that stream.
    """

    def __init__(
        self, torch: ModuleType, marked: Callable[[], Mark], work: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._torch = torch
        self._marked = marked
        self._work = work
        self._buffers: list[Any] = []

    def copy_down(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Copies the bytes of each first tensor, on the GPU, to the second, on the host. One buffer is filled while the
        other one is copied on."""
        under_way: deque[tuple[Mark, Array, Array]] = deque()
        number = 0
        for source, host in pairs:
            for start in range(0, len(source), STAGE_BYTES):
                with self._work():
                    buffers = self._made()
                if len(under_way) == len(buffers):
                    _land(*under_way.popleft())
                piece = source[start : start + STAGE_BYTES]
                stage = buffers[number % len(buffers)][: len(piece)]
                with self._work():
                    stage.copy_(piece, non_blocking=True)
                    mark = self._marked()
                under_way.append((mark, stage.numpy(), host[start : start + STAGE_BYTES].numpy()))
                number += 1
        while under_way:
            _land(*under_way.popleft())

    def _made(self) -> list[Any]:
        if not self._buffers:
            empty: Callable[..., Any] = self._torch.empty
            try:
                self._buffers = [
                    empty(STAGE_BYTES, dtype=self._torch.uint8, device="cpu", pin_memory=True) for _ in "12"
                ]
            except RuntimeError:
                # No pinned memory is available. Copies are slower.
                self._buffers = [empty(STAGE_BYTES, dtype=self._torch.uint8, device="cpu") for _ in "12"]
        return self._buffers


def _land(mark: Mark, stage: Array, landing: Array) -> None:
    mark.wait()
    np.copyto(landing, stage)
