"""The caching allocator of a fake card: free blocks of this process, kept by stream and size as torch keeps them.

Owns: the blocks. Does not own: the card's account (fake_card.py), the tensors (fake_vram.py). Invariants: as in
fake_vram.py.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from contextlib import suppress
from typing import Any, Final

import numpy as np

from ..errors import DeviceFull
from .fake_card import FakeCard
from .fake_stream import FakeStream

__all__ = ["BLOCK_BYTES", "GARBAGE", "Allocator", "Block", "CountedStorage"]

Array = np.ndarray[Any, Any]
GARBAGE: Final = 0xA5
SYNC_S: Final = 1.0
BLOCK_BYTES: Final = 512
"""Memory of a tensor is a multiple of this size, as with torch's allocator."""


class Block:
    """A block of the card's memory that this process has reserved, allocated under `stream`."""

    __slots__ = ("buffer", "stream")

    def __init__(self, buffer: Array, stream: FakeStream) -> None:
        self.buffer = buffer
        self.stream = stream


class Allocator:
    """The process's free blocks, by stream and size."""

    def __init__(self, card: FakeCard) -> None:
        self.card = card
        self._lock = threading.Lock()
        self._cached: defaultdict[tuple[FakeStream, int], list[Block]] = defaultdict(list)
        # Finalizers run at any point, also while this thread holds the lock, so they append freed blocks here.
        self._freed: deque[Block] = deque()
        self._lent: deque[FakeStream] = deque()
        """Streams that have yet to reach the end of a freed block's last use, one for each such block."""

    def allocate(self, block_bytes: int, stream: FakeStream) -> Block:
        with self._lock:
            self._collect()
            if cached := self._cached[stream, block_bytes]:
                return cached.pop()
            try:
                self.card.take(block_bytes)
            except DeviceFull:
                self._give_back()
                self.card.take(block_bytes)
        return Block(np.full(block_bytes, GARBAGE, np.uint8), stream)

    def free(self, block: Block, lent_to: tuple[FakeStream, ...]) -> None:
        """Frees a block once each stream in `lent_to` has executed its queued work. Called by finalizers."""
        if lent_to:
            self._lent.append(lent_to[0])
            lent_to[0].enqueue_from_finalizer(lambda: self.free(block, lent_to[1:]))
            return
        block.stream.enqueue_from_finalizer(lambda: block.buffer.fill(GARBAGE))
        self._freed.append(block)

    def give_back(self) -> int:
        """Returns all free blocks to the card. As torch's `empty_cache` does, waits for streams that freed blocks were
        lent to, SYNC_S at most for each."""
        while self._lent:
            with suppress(IndexError, RuntimeError):  # another thread took it; the stream has failed
                self._lent.popleft().mark().wait(SYNC_S)
        with self._lock:
            self._collect()
            return self._give_back()

    def cached_bytes(self) -> int:
        with self._lock:
            self._collect()
            return sum(block_bytes * len(blocks) for (_, block_bytes), blocks in self._cached.items())

    def _collect(self) -> None:
        while self._freed:
            block = self._freed.popleft()
            self._cached[block.stream, len(block.buffer)].append(block)

    def _give_back(self) -> int:
        given_bytes = sum(block_bytes * len(blocks) for (_, block_bytes), blocks in self._cached.items())
        self._cached.clear()
        self.card.give(given_bytes)
        return given_bytes


class CountedStorage:
    """Owns a block as long as a tensor uses it."""

    __slots__ = ("_allocator", "block", "lent_to")

    def __init__(self, allocator: Allocator, block: Block) -> None:
        self._allocator = allocator
        self.block = block
        self.lent_to: set[FakeStream] = set()

    def __del__(self) -> None:
        self._allocator.free(self.block, tuple(self.lent_to))
