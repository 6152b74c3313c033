"""The pages of a host pool of SGLang, as arrays over the pool's own memory.

Owns: the addresses of a page's parts, and the description of the pool's layout. Does not own: the memory; the pool must
live for as long as the arrays are used.

Invariants: an array lies completely within a buffer of the pool, since SGLang's addresses are checked against the
buffers. A pool that this module cannot check is refused when it is registered.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from ...errors import UsageError

Part = np.ndarray[Any, Any]
"""(n,) uint8, writable: one contiguous piece of a page."""

_LAYOUT: Final = (
    *("layout", "dtype", "page_size", "layer_num", "target_layer_num", "start_layer", "end_layer", "head_num"),
    *("head_dim", "v_head_dim", "head_group_num", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim"),
    *("size_per_token", "storage_format_tag", "dcp_size", "dsa_kv_cache_store_fp8", "indexer_layout"),
    *("num_mamba_layers", "temporal_dtype", "conv_dtype", "temporal_state_shape", "conv_state_shapes"),
)
"""Attributes of SGLang's host pools that determine what the bytes of a page mean. A pool has some of them."""


class HostPages:
    """The pages of one host pool.

    Args:
        pool: a host pool of SGLang, for example `MHATokenToKVPoolHost`, in the memory of this process.

    Raises:
        UsageError: the pool gives no addresses of pages in this layout, moves pages, or has no buffers in host memory.
    """

    def __init__(self, pool: Any) -> None:
        if getattr(pool, "shared_allocation_domain", None) is not None:
            raise UsageError(f"{type(pool).__name__} moves its pages in memory")
        self._pool = pool
        self._page_size: int = pool.page_size
        """Tokens (for states: slots) of a page: the number of host indices for each key."""
        self._buffers = list(_ranges(pool))
        if not self._buffers:
            raise UsageError(f"{type(pool).__name__} has no buffer in host memory")
        try:
            _, sizes = pool.get_page_buffer_meta(torch.arange(self._page_size, dtype=torch.int64))
        except (NotImplementedError, ValueError, AssertionError, AttributeError) as error:
            # Each is raised by some pool of SGLang that has no such addresses, or none in its present layout.
            raise UsageError(f"{type(pool).__name__} gives no addresses of its pages: {error}") from None
        self._sizes = [int(size) for size in sizes]
        known = {name: str(getattr(pool, name)) for name in _LAYOUT if hasattr(pool, name)}
        self.layout = {"class": type(pool).__name__, "parts": self._sizes, **known}
        """What the bytes of a page mean: the pool's class, geometry and dtype, and the sizes of a page's parts."""

    def __call__(self, host_indices: torch.Tensor | None, count: int) -> list[list[Part]]:
        """The parts of `count` pages.

        Args:
            host_indices: (count × page size,) int64 on the CPU, as SGLang passes them.

        Raises:
            UsageError: the number of indices differs, or an address is outside of the pool.
        """
        found = 0 if host_indices is None else len(host_indices)
        if found != count * self._page_size:
            raise UsageError(f"{found} host indices for {count} pages of {self._page_size} each")
        addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        each = len(self._sizes)
        if len(addresses) != count * each or list(sizes) != self._sizes * count:
            raise UsageError(f"{len(addresses)} parts for {count} pages of {each} parts: the pool has changed")
        parts = [self._part(*place) for place in zip(addresses, sizes, strict=True)]
        return [parts[start : start + each] for start in range(0, len(parts), each)]

    def _part(self, address: int, size: int) -> Part:
        if not any(start <= address and address + size <= end for start, end in self._buffers):
            raise UsageError(f"{size} bytes at {address:#x} are outside of the pool's buffers")
        return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)


def copy_into(parts: Sequence[Part], stored: object) -> bool:
    """Copies a stored page into a page's parts. False, with nothing copied, if the two differ in their sizes."""
    if not isinstance(stored, list) or len(stored) != len(parts):
        return False
    pairs = list(zip(parts, stored, strict=True))
    if any(
        type(found) is not np.ndarray or (found.dtype, found.shape) != (np.uint8, part.shape) for part, found in pairs
    ):
        return False
    for part, found in pairs:
        np.copyto(part, found)
    return True


def _ranges(pool: Any) -> Iterator[tuple[int, int]]:
    """(start, end) of each buffer of the pool in host memory."""
    found = [getattr(pool, name, None) for name in ("kv_buffer", "k_buffer", "v_buffer")]
    if hasattr(pool, "get_hybrid_pool_buffer"):
        found += pool.get_hybrid_pool_buffer()
    for buffers in found:
        for buffer in buffers if isinstance(buffers, list | tuple) else [buffers]:
            if isinstance(buffer, torch.Tensor) and buffer.device.type == "cpu":
                storage = buffer.untyped_storage()
                yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
