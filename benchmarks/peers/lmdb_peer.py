"""LMDB on /dev/shm: zero-copy reads inside a transaction; writes into the map, without any sync to a disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import PUT_OPS, READ_OPS, Array, BasePeer, BaseReader, BaseWriter, consume

MAP_BYTES = 3 << 30


class Peer(BasePeer):
    ops = (*READ_OPS, *PUT_OPS)

    @classmethod
    def missing(cls) -> str | None:
        try:
            import lmdb  # noqa: F401
        except ImportError:
            return "lmdb is not installed; pip install 'tensord[bench]'"
        return None

    def start(self) -> None:
        self._memory = Path(tempfile.mkdtemp(prefix="tensord-bench-lmdb-", dir="/dev/shm"))
        (self.folder / "environment").symlink_to(self._memory)

    def stop(self) -> None:
        shutil.rmtree(self._memory)


def _open(folder: Path, readonly: bool) -> Any:
    import lmdb

    return lmdb.open(
        str((folder / "environment").resolve()),
        map_size=MAP_BYTES,
        readonly=readonly,
        sync=False,
        metasync=False,
        writemap=not readonly,
        meminit=False,
        max_spare_txns=2,
    )


class Writer(BaseWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._environment = _open(folder, readonly=False)

    def put(self, key: bytes, value: Array) -> None:
        with self._environment.begin(write=True) as transaction:
            transaction.put(key, value)

    def close(self) -> None:
        self._environment.close()


class Reader(BaseReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._environment = _open(folder, readonly=True)

    def get(self, key: bytes) -> None:
        with self._environment.begin(buffers=True) as transaction:
            np.frombuffer(transaction.get(key), np.uint64)

    def get_consume(self, key: bytes) -> int:
        with self._environment.begin(buffers=True) as transaction:
            return consume(np.frombuffer(transaction.get(key), np.uint64))

    def get_many(self, batch: Sequence[bytes]) -> None:
        with self._environment.begin(buffers=True) as transaction, transaction.cursor() as cursor:
            cursor.getmulti(batch)

    def get_many_views(self, batch: Sequence[bytes]) -> None:
        with self._environment.begin(buffers=True) as transaction, transaction.cursor() as cursor:
            [np.frombuffer(value, np.uint64) for _, value in cursor.getmulti(batch)]

    def close(self) -> None:
        self._environment.close()
