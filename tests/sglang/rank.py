"""One rank of an SGLang engine, as its storage backend sees it: a host pool, and the storage that SGLang makes for it.

Owns: both. Does not own: the daemon.
"""

from __future__ import annotations

import hashlib
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

from tensord.client.sglang import TensordHiCacheStorage

from ..daemon_process import PATIENCE_S, until

PAGE: Final = 4
LAYERS: Final = 3
HEADS: Final = 2
WIDTH: Final = 64
TOKENS: Final = 64
CPU: Final = torch.device("cpu")
_texts = count(1)
made: Final[list[Rank]] = []
"""The ranks of this test."""
LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct", "page_head")


def mha_pool(
    layout: str = "page_first", *, heads: int = HEADS, page: int = PAGE, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """SGLang's host pool of keys and values, for a device pool in this process's memory."""
    k, v = ([torch.zeros(TOKENS, heads, WIDTH, dtype=dtype) for _ in range(LAYERS)] for _ in "kv")
    buffers = KVBuffers(
        k=tuple(k), v=tuple(v), k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers, page_size=page, head_num=heads, head_dim=WIDTH, v_head_dim=WIDTH, dtype=dtype, device=CPU
    )
    return _host_pool(MHATokenToKVPoolHost, info, page, layout)


def mla_pool(layout: str = "page_first") -> Any:
    """SGLang's host pool of compressed keys and values."""
    kv = [torch.zeros(TOKENS, 1, WIDTH + 8, dtype=torch.bfloat16) for _ in range(LAYERS)]
    layers: dict[str, Any] = {"layer_indices": tuple(range(LAYERS)), "device_layer_num": LAYERS, "page_size": PAGE}
    sizes: dict[str, Any] = {"kv_lora_rank": WIDTH, "qk_rope_head_dim": 8, "kv_cache_dim": WIDTH + 8}
    info = MLABufferInfo(
        buffers=tuple(kv), data_ptrs=_pointers(kv), **layers, **sizes, dtype=torch.bfloat16, device=CPU
    )
    return _host_pool(MLATokenToKVPoolHost, info, PAGE, layout, target_layer_num=LAYERS)


def _host_pool(kind: Any, info: Any, page: int, layout: str, **more: Any) -> Any:
    capacity = {"device_capacity_tokens": TOKENS, "host_token_capacity": TOKENS}
    return kind(info, 1.0, 0, page, layout, pin_memory=False, start_layer=0, end_layer=LAYERS, **capacity, **more)


class Rank:
    """A host pool and its storage.

    Args:
        socket: the daemon's socket.
        pool: the host pool; by default a new one of `mha_pool`.
        config: fields of SGLang's `HiCacheStorageConfig` that differ from those of a single rank.
        extra: more keys of the extra config. Without a `tensord.` key for the weights, `tensord.revision` names them.
        named: whether to wait until the weights are named.
    """

    def __init__(
        self,
        socket: Path | str,
        pool: Any = None,
        *,
        config: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        named: bool = True,
    ) -> None:
        self.pool = pool if pool is not None else mha_pool()
        extra = {"tensord.revision": "r1"} if extra is None else extra
        self.storage: TensordHiCacheStorage = StorageBackendFactory.create_backend(
            "dynamic", storage_config({"tensord.socket": str(socket), **extra}, **(config or {})), self.pool
        )
        made.append(self)
        self.storage.register_mem_pool_host(self.pool)
        self.storage.on_host_pools_registered()
        if named:
            until(lambda: self.storage.shares, "the weights to be named")
            assert self.storage._exchange.client.wait_connected(PATIENCE_S)

    def filled(self, pages: int = 3) -> tuple[list[str], torch.Tensor]:
        """Computes pages of a new text in the host pool: their hashes, and their host indices."""
        text = next(_texts)
        hashes = [page_hash(text, number) for number in range(pages)]
        indices = self.pool.alloc(pages * self.pool.page_size)
        assert indices is not None
        for number, name in enumerate(hashes):
            index = int(indices[number * self.pool.page_size])
            page = self.pool.get_data_page(index)
            generator = torch.Generator().manual_seed(int(name[:8], 16))
            values = torch.randint(
                0, 256, (page.numel() * page.element_size(),), dtype=torch.uint8, generator=generator
            )
            self.pool.set_from_flat_data_page(index, values.view(page.dtype))
        return hashes, indices

    def stored(self, pages: int = 3) -> tuple[list[str], torch.Tensor]:
        """As `filled`, with the pages stored."""
        hashes, indices = self.filled(pages)
        assert self.storage.batch_set_v1(hashes, indices) == [True] * pages
        return hashes, indices

    def empty(self, pages: int = 3) -> torch.Tensor:
        """Host indices of free pages."""
        indices: torch.Tensor | None = self.pool.alloc(pages * self.pool.page_size)
        assert indices is not None
        return indices

    def pages(self, indices: torch.Tensor) -> list[bytes]:
        """The bytes of each page, as SGLang's pool reads it."""
        found = [self.pool.get_data_page(int(index)) for index in indices[:: self.pool.page_size]]
        return [bytes(page.contiguous().view(torch.uint8).numpy()) for page in found]


def storage_config(extra: dict[str, Any], **fields: Any) -> HiCacheStorageConfig:
    """What SGLang's controller gives to the storage backend of a single rank."""
    named = {
        "backend_name": "tensord",
        "module_path": "tensord.client.sglang",
        "class_name": "TensordHiCacheStorage",
        "interface_v1": 1,
    }
    places = ("tp", "pp", "attn_cp")
    given: dict[str, Any] = {
        **{f"{place}_rank": 0 for place in places},
        **{f"{place}_size": 1 for place in places},
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "tiny",
        **fields,
    }
    return HiCacheStorageConfig(extra_config={**named, **extra}, **given)


def page_hashes(tokens: Any) -> list[str]:
    """SGLang's own names for the pages of a sequence."""
    try:
        hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
    except RuntimeError as error:
        pytest.skip(f"SGLang builds its hash with g++, ninja and OpenSSL's headers: {error}")
    assert isinstance(hashes, list)
    return hashes


def page_hash(text: object, number: int) -> str:
    """A name for a page, of the form of SGLang's."""
    return hashlib.sha256(f"{text} {number}".encode()).hexdigest()


def _pointers(buffers: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
