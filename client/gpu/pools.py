"""Private pools of torch's allocator, for the tensors that this library makes on a GPU.

`torch.cuda.empty_cache()` would return memory that the engine keeps for its own next step. A pool's memory is only for
tensors of this library, and torch returns it to the driver when the pool is destroyed. It returns only whole segments
without a tensor, so tensors are made in one pool until it has POOL_BYTES, then in a new one; each is destroyed once its
last tensor is gone.

Owns: the pools, and when each is destroyed. Does not own: the tensors; memory that the process allocated itself.

Invariants: no other tensors lie in a pool. A pool is destroyed without a tensor in it, and only while no thread
captures a graph or allocates from a pool, since torch ends the process otherwise. All calls run as work of the gate.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, Final

from .gate import Gate

POOL_BYTES: Final = 64 << 20
"""Bytes after which a pool takes no more tensors. A pool with one small tensor left keeps at most about so much."""
_log = logging.getLogger("tensord")


class Pools:
    """The pools of one GPU. `usable`: whether torch has them, and its present allocator takes part."""

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

    def __len__(self) -> int:
        return len(self._pools)

    @contextmanager
    def allocating(self, size_bytes: int) -> Iterator[None]:
        """The calling thread's tensors of this block, about `size_bytes`, are made in a pool."""
        pool = self._pool_for(size_bytes) if self.usable else None
        with nullcontext() if pool is None else self._accelerator.use_mem_pool(pool, device=self._index):
            yield

    def release(self) -> int:
        """Destroys the pools without a tensor. Returns the bytes that the driver gets."""
        if not self._pools or self._gate.pools:
            return 0
        unused = [(pool, freed_bytes) for pool in self._pools if (freed_bytes := self._unused_bytes(pool)) is not None]
        if not unused:
            return 0
        # The destruction keeps the interpreter's lock, so what it would wait for is waited for here.
        self._accelerator.synchronize(self._index)
        for pool, _ in unused:
            self._pools.remove(pool)
        self._taken_bytes = POOL_BYTES  # the last may be another one now
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
            _log.warning(
                "%s: torch's allocator has no private pools; its memory is not returned: %s", self._name, error
            )
        self.usable = False
