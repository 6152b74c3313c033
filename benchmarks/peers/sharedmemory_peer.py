"""The standard library: one multiprocessing.shared_memory segment for each value, and a Manager's dict of names."""

from __future__ import annotations

from collections.abc import MutableMapping
from multiprocessing import resource_tracker
from multiprocessing.managers import DictProxy, SyncManager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np

from . import Array, BasePeer, BaseReader, BaseWriter, consume

AUTHKEY = b"a benchmark's own, in its private folder"


class _Manager(SyncManager):
    """Serves one dict: key -> (name of the segment, bytes of the value)."""


_names: dict[bytes, tuple[str, int]] = {}
_Manager.register("names", callable=lambda: _names, proxytype=DictProxy)


class Peer(BasePeer):
    def start(self) -> None:
        self._manager = _Manager(address=str(self.folder / "manager.sock"), authkey=AUTHKEY)
        self._manager.start()

    def stop(self) -> None:
        self._manager.shutdown()


def _connect(folder: Path) -> MutableMapping[bytes, tuple[str, int]]:
    manager = _Manager(address=str(folder / "manager.sock"), authkey=AUTHKEY)
    manager.connect()
    names: MutableMapping[bytes, tuple[str, int]] = manager.names()  # type: ignore[attr-defined]
    return names


def _words(segment: SharedMemory, value_bytes: int) -> Array:
    return np.ndarray(value_bytes // 8, np.uint64, segment.buf)


class Writer(BaseWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._names = _connect(folder)
        self._mine: dict[bytes, SharedMemory] = {}

    def put(self, key: bytes, value: Array) -> None:
        segment = SharedMemory(create=True, size=value.nbytes)
        np.copyto(_words(segment, value.nbytes), value)
        self._names[key] = (segment.name, value.nbytes)
        if old := self._mine.pop(key, None):
            old.close()
            old.unlink()
        self._mine[key] = segment

    def close(self) -> None:
        for segment in self._mine.values():
            segment.close()
            segment.unlink()


class Reader(BaseReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # Before Python 3.13 a segment is unlinked when any process that attached to it ends. Here only the writer
        # unlinks.
        resource_tracker.register = lambda name, rtype: None
        self._names = _connect(folder)

    def get(self, key: bytes) -> None:
        name, value_bytes = self._names[key]
        segment = SharedMemory(name)
        _words(segment, value_bytes)
        segment.close()

    def get_consume(self, key: bytes) -> int:
        name, value_bytes = self._names[key]
        segment = SharedMemory(name)
        total = consume(_words(segment, value_bytes))
        segment.close()
        return total
