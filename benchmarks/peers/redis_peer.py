"""Debian's redis-server on a private Unix socket, without persistence, through redis-py."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import PUT_OPS, READ_OPS, Array, BasePeer, BaseReader, BaseWriter, consume

START_S = 10.0


def _connect(folder: Path) -> Any:
    import redis

    return redis.Redis(unix_socket_path=str(folder / "redis.sock"))


class Peer(BasePeer):
    ops = (*READ_OPS, *PUT_OPS)

    @classmethod
    def missing(cls) -> str | None:
        try:
            import redis  # noqa: F401
        except ImportError:
            return "redis is not installed; pip install 'tensord[bench]'"
        if shutil.which("redis-server") is None:
            return "redis-server is not installed; apt-get install redis-server"
        return None

    def start(self) -> None:
        options = {
            "port": "0",
            "unixsocket": str(self.folder / "redis.sock"),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "dir": str(self.folder),
            "daemonize": "no",
        }
        flags = [word for name, value in options.items() for word in ("--" + name, value)]
        self._server = subprocess.Popen(["redis-server", *flags], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        import redis

        deadline = time.monotonic() + START_S
        while True:
            try:
                _connect(self.folder).ping()
            except redis.ConnectionError:
                if self._server.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise RuntimeError(
                        f"redis-server did not serve within {START_S} s; exit code {self._server.returncode}"
                    ) from None
                time.sleep(0.01)
            else:
                return

    def stop(self) -> None:
        self._server.terminate()
        self._server.wait()
        (self.folder / "redis.sock").unlink(missing_ok=True)


class Writer(BaseWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._client = _connect(folder)

    def put(self, key: bytes, value: Array) -> None:
        self._client.set(key, value.data.cast("B"))

    def close(self) -> None:
        self._client.close()


class Reader(BaseReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._client = _connect(folder)

    def get(self, key: bytes) -> None:
        np.frombuffer(self._client.get(key), np.uint64)

    def get_consume(self, key: bytes) -> int:
        return consume(np.frombuffer(self._client.get(key), np.uint64))

    def get_many(self, batch: Sequence[bytes]) -> None:
        self._client.mget(batch)

    def get_many_views(self, batch: Sequence[bytes]) -> None:
        [np.frombuffer(value, np.uint64) for value in self._client.mget(batch)]

    def close(self) -> None:
        self._client.close()
