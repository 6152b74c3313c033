"""The process that has Mooncake's client: `python -m tensord.daemon.remote_stores.mooncake_worker SOCKET`.

Owns: the client. Does not own: names, deadlines, and the memory that it is sent (`mooncake`).

Mooncake's client runs in a process of its own for three reasons, each seen with release 0.3.13. Connecting holds the
interpreter's lock until the master answers. A call has no time limit. An error in its libraries ends the process.

The daemon sends messages of MessagePack on SOCKET, a descriptor: [number, call, arguments]. The first one is
[0, "setup", arguments]. A message of a new piece of memory carries its descriptor. Each other call is answered by
[number, result], in any order, or by [number, null, text of the error]. The process ends when the socket does.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgpack
import numpy as np

from .form import OBJECT_HEADER_BYTES

CALLS: Final = 16
MESSAGE_BYTES_MAX: Final = 1 << 18
PIECE_BYTES_MIN: Final = 64 << 10


class Worker:
    """The client, and the pieces of memory by their numbers."""

    def __init__(self, setup: tuple[Any, ...]) -> None:
        self._setup = setup
        self._opening = threading.Lock()
        self._store: Any = None
        self._pieces: dict[int, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        self._registered: set[int] = set()
        self.calls: dict[str, Callable[..., Any]] = {
            "heads": self.heads,
            "get": self.get,
            "put": self.put,
            "remove": self.remove,
            "exist": self.exist,
            "read": self.read,
            "claim": self.claim,
        }

    def take(self, number: int, fd: int, size_bytes: int) -> None:
        """Takes a piece of memory in."""
        self._pieces[number] = np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)
        os.close(fd)

    def drop(self, number: int) -> None:
        """Gives a piece back."""
        memory = self._pieces.pop(number)
        if number in self._registered:
            self._registered.discard(number)
            self._store.unregister_buffer(memory.ctypes.data)

    def heads(self, names: list[str], piece: int) -> list[int]:
        """Reads the beginnings of objects, one behind the other. Their sizes, or codes."""
        every = [[OBJECT_HEADER_BYTES]] * len(names)
        places = [[OBJECT_HEADER_BYTES * at] for at in range(len(names))]
        store, address = self._of(piece)
        sizes = store.get_into_ranges([address], [names], [places], [[[0]] * len(names)], [every])[0]
        return [size for [size] in sizes]

    def get(self, name: str, piece: int, size_bytes: int) -> int:
        """Reads an object of at most `size_bytes`. Its size, or a code."""
        store, address = self._of(piece)
        size: int = store.get_into(name, address, size_bytes)
        return size

    def put(self, name: str, piece: int, size_bytes: int) -> int:
        """Writes an object, in place of the one that is there."""
        store, address = self._of(piece)
        code: int = store.upsert_from(name, address, size_bytes)
        return code

    def remove(self, names: list[str]) -> list[int]:
        """Removes objects."""
        store = self.open()
        return [store.remove(name, True) for name in names]

    def exist(self, names: list[str]) -> list[int]:
        """1 for each object that exists."""
        found: list[int] = self.open().batch_is_exist(names)
        return found

    def read(self, name: str) -> bytes:
        """A small object; empty if there is none."""
        found: bytes = self.open().get(name)
        return found

    def claim(self, name: str, value: bytes) -> int:
        """Writes a small object that stays, if there is none of the name."""
        from mooncake.store import ReplicateConfig

        store = self.open()
        config = ReplicateConfig()
        config.with_hard_pin = True
        code: int = store.put(name, value, config)
        return code

    def _of(self, piece: int) -> tuple[Any, int]:
        """The client, and the address of a piece that it may read and write."""
        store, memory = self.open(), self._pieces[piece]
        # A piece is lent to one call at a time.
        if piece not in self._registered:
            self._registered.add(piece)
            store.register_buffer(memory.ctypes.data, len(memory))
        return store, memory.ctypes.data

    def open(self) -> Any:
        """The client, which is connected to the master.

        Raises:
            RuntimeError: it cannot be.
        """
        from mooncake.store import MooncakeDistributedStore

        with self._opening:
            if self._store is None:
                store = MooncakeDistributedStore()
                code = store.setup(*self._setup)
                if code != 0:
                    raise RuntimeError(
                        f"it cannot be used from {self._setup[0]}: Mooncake's code {code}. Check that the master runs, "
                        "and that this host is reached at that address"
                    )
                self._store = store
            return self._store


def main() -> None:
    # Mooncake's log goes to standard error, a line for each call that fails. Read when it is imported.
    os.environ.setdefault("GLOG_minloglevel", "3")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    channel = socket.socket(fileno=int(sys.argv[1]))
    worker: Worker | None = None
    sending = threading.Lock()

    def carry_out(number: int, call: str, arguments: list[Any]) -> None:
        assert worker is not None
        try:
            answer: list[Any] = [number, worker.calls[call](*arguments)]
        except Exception as error:
            answer = [number, None, str(error) or repr(error)]
        with sending:
            channel.send(msgpack.packb(answer))

    threads = ThreadPoolExecutor(CALLS)
    while True:
        packed, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES_MAX, 1)
        if not packed:
            # Calls may hang, and threads of the client may run.
            os._exit(0)
        number, call, arguments = msgpack.unpackb(packed)
        if call == "setup":
            worker = Worker(tuple(arguments))
        elif call == "take":
            assert worker is not None
            worker.take(arguments[0], fds[0], arguments[1])
        elif call == "drop":
            assert worker is not None
            worker.drop(*arguments)
        else:
            threads.submit(carry_out, number, call, arguments)


if __name__ == "__main__":
    main()
