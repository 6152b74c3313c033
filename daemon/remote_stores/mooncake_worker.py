"""The process that has Mooncake's client: `python -m tensord.daemon.remote_stores.mooncake_worker SOCKET SETUP`.

Owns: the client. Does not own: names, and how long a call may take (`mooncake`).

Mooncake's client runs in a process of its own for three reasons, each seen with release 0.3.13. Connecting holds the
interpreter's lock until the master answers. A call has no time limit. An error in its libraries ends the process.

SETUP has the arguments of the client's setup, in JSON. Over SOCKET, a descriptor, the daemon sends connections, one for
each of its calls that are under way at once. On a connection it sends (call, arguments), and an object behind it if the
call is "put". The answer is (result, error); an object follows if the call is "get" and the result its size. The
process ends when SOCKET does.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from .form import OBJECT_HEADER_BYTES

BUFFER_BYTES: Final = 64 << 10
"""Of the client's own memory, for small objects."""


class Worker:
    """The client, connected to the master by the first call."""

    def __init__(self, setup: tuple[Any, ...]) -> None:
        self._setup = setup
        self._opening = threading.Lock()
        self._store: Any = None
        self.calls: dict[str, Callable[..., Any]] = {
            "heads": self.heads,
            "get": self.get,
            "put": self.put,
            "remove": lambda names: [self.open().remove(name, True) for name in names],
            "exist": lambda names: self.open().batch_is_exist(names),
            "read": lambda name: self.open().get(name),
            "claim": self.claim,
        }

    def serve(self, connection: Connection) -> None:
        """Carries out the calls of one connection until it ends."""
        with connection, suppress(EOFError, OSError):  # the daemon waits for the call no longer
            while True:
                call, arguments = connection.recv()
                if call == "put":
                    arguments = (*arguments, connection.recv_bytes())
                try:
                    result = self.calls[call](*arguments)
                except Exception as error:
                    connection.send((None, str(error) or repr(error)))
                    continue
                if isinstance(result, memoryview):
                    connection.send((len(result), ""))
                    connection.send_bytes(result)
                else:
                    connection.send((result, ""))

    def heads(self, names: list[str]) -> list[bytes | int]:
        """The beginnings of objects, or codes."""
        count = len(names)
        every, places = [[OBJECT_HEADER_BYTES]] * count, [[OBJECT_HEADER_BYTES * at] for at in range(count)]

        def read(store: Any, address: int, _: int) -> list[int]:
            sizes = store.get_into_ranges([address], [names], [places], [[[0]] * count], [every])[0]
            return [size for [size] in sizes]

        memory = np.empty((count, OBJECT_HEADER_BYTES), np.uint8)
        sizes = self._with(memory, read)
        return [bytes(head[:size]) if size >= 0 else size for head, size in zip(memory, sizes, strict=True)]

    def get(self, name: str, most_bytes: int) -> memoryview | int:
        """An object of at most `most_bytes`, or a code."""
        memory = np.empty(most_bytes, np.uint8)
        size: int = self._with(memory, lambda store, *place: store.get_into(name, *place))
        return memory.data[:size] if size >= 0 else size

    def put(self, name: str, stored: bytes) -> Any:
        """Writes an object, in place of the one that is there."""
        memory = np.frombuffer(stored, np.uint8)
        return self._with(memory, lambda store, *place: store.upsert_from(name, *place))

    def claim(self, name: str, value: bytes) -> Any:
        """Writes a small object that stays, if there is none of the name."""
        from mooncake.store import ReplicateConfig

        config = ReplicateConfig()
        config.with_hard_pin = True
        return self.open().put(name, value, config)

    def open(self) -> Any:
        """The client, connected to the master. Raises RuntimeError if it cannot be."""
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

    def _with(self, memory: np.ndarray[Any, np.dtype[np.uint8]], call: Callable[[Any, int, int], Any]) -> Any:
        """The result of a call that reads or writes `memory`, which is registered with the client while it lasts."""
        store, address = self.open(), memory.ctypes.data
        store.register_buffer(address, memory.nbytes)
        try:
            return call(store, address, memory.nbytes)
        finally:
            store.unregister_buffer(address)


def main() -> None:
    # Mooncake's log goes to standard error, a line for each call that fails. Read when it is imported.
    os.environ.setdefault("GLOG_minloglevel", "3")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    channel = socket.socket(fileno=int(sys.argv[1]))
    worker = Worker(tuple(json.loads(sys.argv[2])))
    while True:
        said, fds, _, _ = socket.recv_fds(channel, 1, 1)
        if not said:
            # Calls may hang, and threads of the client may run.
            os._exit(0)
        threading.Thread(target=worker.serve, args=(Connection(fds[0]),), daemon=True).start()


if __name__ == "__main__":
    main()
