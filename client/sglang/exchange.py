"""Pages in and out of the ring: lookups, copies and puts, each within a limited time.

Owns: the client, the rule when the daemon is not asked again, and the addresses of a page's parts in SGLang's host
pool. Does not own: names of pages, and SGLang's memory: the pool must live for as long as it is used here.

Invariants
- A page's part lies completely within a buffer of its pool, since SGLang's addresses are checked against the buffers. A
  pool that cannot be checked is refused when it is registered.
- A stored page is pinned while it is copied, and its checksum is compared before.
- Lookups and loads never wait for the daemon, except to evict a damaged page, and for its remote store.
- After a lookup that waited in vain, the remote store is not asked again until the daemon has answered.
- A store waits at most STALL_S for each step of the daemon. After one that took longer, no store is tried until the
  daemon has answered.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, Final

import numpy as np
import torch

from ...errors import Corrupt, TensordError, TimedOut, UsageError
from ..computing.remote_run import RemoteRuns
from ..core.client import Client
from ..writing.outcomes import Put

STALL_S: Final = 1.0
STORE_S_MAX: Final = 10.0
"""The most seconds for one batch of stores, also if the daemon is slow but answers."""
ATTACH_S: Final = 0.4
"""Seconds that making the client may delay the engine's start. After that it attaches in the background."""
_LAYOUT: Final = (
    *("layout", "dtype", "page_size", "layer_num", "target_layer_num", "start_layer", "end_layer", "head_num"),
    *("head_dim", "v_head_dim", "head_group_num", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim"),
    *("size_per_token", "storage_format_tag", "dcp_size", "dsa_kv_cache_store_fp8", "indexer_layout"),
    *("num_mamba_layers", "temporal_dtype", "conv_dtype", "temporal_state_shape", "conv_state_shapes"),
)
"""Attributes of SGLang's host pools that determine what the bytes of a page mean. A pool has some of them."""
Part = np.ndarray[Any, Any]
"""(n,) uint8, writable: one contiguous piece of a page."""
_log = logging.getLogger("tensord")


class PageExchange:
    """The connection of one rank to the daemon. The arguments are those of `Client`."""

    def __init__(self, socket: str | None, name: str) -> None:
        self.client = Client(socket, name=name, timeout_s=STALL_S, attach_s=ATTACH_S)
        self._unanswered: tuple[Put, float] | None = None
        """A put, and when it began."""
        self._runs = RemoteRuns()

    def available(self, keys: list[bytes]) -> int:
        """The number of pages, from the first on, that are in the ring, after the daemon has looked for missing ones in
        its remote store."""
        count = sum(1 for _ in takewhile(self.client.contains, keys))
        if count < len(keys) and self._answers():
            run = self._runs.new(self.client.link, keys[count:])
            run.begin(self.client.link)
            run.wait(math.inf)
            count += run.count
        return count

    def load(self, keys: Sequence[bytes], pages: Sequence[Sequence[Part]]) -> list[bool]:
        """Copies stored pages into `pages`, up to the first that is missing, damaged or of other sizes. Returns for
        each page whether it was copied; a page that was not is unchanged."""
        done = sum(1 for _ in takewhile(lambda page: self._load(*page), zip(keys, pages, strict=True)))
        return [True] * done + [False] * (len(keys) - done)

    def _load(self, key: bytes, parts: Sequence[Part]) -> bool:
        try:
            lease = self.client.get(key, verify=True)
            if lease is None:
                return False
            with lease:
                if copy_into(parts, lease.tree):
                    return True
            _log.warning("tensord: page %s has other sizes than this engine's pages; it is removed", key.hex())
        except Corrupt as error:
            _log.warning("tensord: a page is damaged, and is removed: %s", error)
        # The page must not be found again, and the next store of it must not be taken for stored.
        with suppress(TensordError):
            self.client.evict(key)
        return False

    def store(
        self, keys: Sequence[bytes], pages: Sequence[Sequence[Part]], *, parents: Sequence[bytes | None]
    ) -> list[bool]:
        """Stores pages. Returns when the daemon has answered for all of them, or does not answer in time.

        Args:
            parents: for each page the key of the page before it in its sequence, None if unknown. A page is evicted
                before its parent, and ends with it.

        Returns:
            For each page whether it is stored. The memory of `pages` may change from then on.
        """
        deadline = time.monotonic() + STORE_S_MAX
        puts: dict[bytes, Put] = {}
        for key, parts, parent in zip(keys, pages, parents, strict=True) if self._answers() else ():
            if self.client.contains(key):
                continue
            # A page whose parent has left the ring begins a chain of its own. SGLang would not store the parent again.
            known = parent is not None and (parent in puts or self.client.contains(parent))
            began = time.monotonic()
            puts[key] = put = self.client.put(key, list(parts), parent=parent if known else None, timeout_s=STALL_S)
            if isinstance(put.error, TimedOut):
                self._unanswered = put, began
            if put.state == "lost" or time.monotonic() > deadline:
                break
        for put in puts.values():
            # After one without an answer in time, the others are not waited for.
            if put.state == "sent" and self._unanswered is None:
                began = time.monotonic()
                with suppress(TensordError):
                    put.wait(max(0.0, min(STALL_S, deadline - began)))
                if put.state == "sent":
                    self._unanswered = put, began
        return [puts[key].state in ("stored", "existed") if key in puts else self.client.contains(key) for key in keys]

    def _answers(self) -> bool:
        """Whether the daemon is there and has answered for every put of earlier batches."""
        if self._unanswered is not None and not self.client.link.puts.owed(*self._unanswered):
            self._unanswered = None
        return self._unanswered is None and self.client.connected


class HostPages:
    """The pages of a host pool of SGLang, for example `MHATokenToKVPoolHost`. Raises UsageError if the pool gives no
    addresses of pages in this layout, moves pages, or has no buffers in host memory."""

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
        """The parts of `count` pages, for (count × page size,) int64 on the CPU. Raises UsageError if the number of
        indices differs, or an address is outside of the pool."""
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
