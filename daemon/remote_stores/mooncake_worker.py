"""The process that has Mooncake's client: `python -m tensord.daemon.remote_stores.mooncake_worker SOCKET`.

Owns: the client. Does not own: names, deadlines, and the memory that it is sent (`mooncake`).

Mooncake's client runs in a process of its own for three reasons, each seen with release 0.3.13. Connecting holds the
interpreter's lock until the master answers. A call has no time limit. An error in its libraries ends the process.

The daemon sends messages of MessagePack on SOCKET, a descriptor: [number, call, arguments, bytes of memory]. The first
one is [0, "setup", arguments, 0]. A message of a call with memory carries its descriptor. Each call is answered by
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
BUFFER_BYTES: Final = 64 << 10
"""Of the client's own memory, for small objects."""

Memory = np.ndarray[Any, np.dtype[np.uint8]]


class Worker:
    """The client. The memory of a call is registered with it while the call lasts."""

    def __init__(self, setup: tuple[Any, ...]) -> None:
        self._setup = setup
        self._opening = threading.Lock()
        self._store: Any = None
        self.calls: dict[str, Callable[..., Any]] = {
            "remove": self.remove,
            "exist": self.exist,
            "read": self.read,
            "claim": self.claim,
        }
        self.memory_calls: dict[str, Callable[..., Any]] = {"heads": self.heads, "get": self.get, "put": self.put}

    def carry_out(self, call: str, arguments: list[Any], memory: Memory | None) -> Any:
        """The result of a call."""
        if memory is None:
            return self.calls[call](*arguments)
        store, address = self.open(), memory.ctypes.data
        store.register_buffer(address, len(memory))
        try:
            return self.memory_calls[call](store, address, len(memory), *arguments)
        finally:
            store.unregister_buffer(address)

    def heads(self, store: Any, address: int, size_bytes: int, names: list[str]) -> list[int]:
        """Reads the beginnings of objects, one behind the other. Their sizes, or codes."""
        every = [[OBJECT_HEADER_BYTES]] * len(names)
        places = [[OBJECT_HEADER_BYTES * at] for at in range(len(names))]
        sizes = store.get_into_ranges([address], [names], [places], [[[0]] * len(names)], [every])[0]
        return [size for [size] in sizes]

    def get(self, store: Any, address: int, size_bytes: int, name: str) -> int:
        """Reads an object of at most `size_bytes`. Its size, or a code."""
        size: int = store.get_into(name, address, size_bytes)
        return size

    def put(self, store: Any, address: int, size_bytes: int, name: str) -> int:
        """Writes an object, in place of the one that is there."""
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

    def carry_out(number: int, call: str, arguments: list[Any], memory: Memory | None) -> None:
        assert worker is not None
        try:
            answer: list[Any] = [number, worker.carry_out(call, arguments, memory)]
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
        number, call, arguments, size_bytes = msgpack.unpackb(packed)
        if call == "setup":
            worker = Worker(tuple(arguments))
            continue
        memory = np.frombuffer(mmap.mmap(fds[0], size_bytes), np.uint8) if size_bytes else None
        if fds:
            os.close(fds[0])
        threads.submit(carry_out, number, call, arguments, memory)


if __name__ == "__main__":
    main()
