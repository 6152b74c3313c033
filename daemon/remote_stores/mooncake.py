"""Mooncake Store as a remote store: the memory of many hosts, which a master gives out.

    tensord-1-KEY           an object; KEY in hexadecimal
    tensord-1-gen-TAG-N     the N-th generation that was given out for a namespace; it is not evicted

Owns: names, what a code of Mooncake means, and the process with Mooncake's client (`mooncake_worker` says why it has
one). If the process ends, all calls fail, and the next one starts another process.

What is read and written goes through sockets. That costs copies; in return a call that hangs never touches the caller's
memory, and is left when its time is over.

While an object is replaced, it is a miss. Of several hosts that write a new key, the first one stays: generations are
given out by that. Mooncake has no claims that end by themselves.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any, Final

from ...errors import BadConfiguration, TensordError, TierFull, TierUnavailable
from ...ipc.quantities import SIZE_WANTS, read_size
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..forms.events import RemoteEntry
from .form import Buffer, object_header
from .mooncake_worker import BUFFER_BYTES
from .store import NAME, RemoteStore, one_of, options, shown, split

LOOKED_FOR: Final = 16
"""Generations that are looked for at once. So many in a row may be lost with the host that kept them."""
_PORT: Final = 50051
_MISSING: Final = -704
_MISSES: Final = (_MISSING, -703, -600, -800)
"""No such object; one that is not whole; one that is too long; one whose host is gone."""
_DONE_BY_OTHERS: Final = (-705, -601)
"""Another host has written the object meanwhile, or is writing it."""
_FULL: Final = -200
_GIVEN: Final = struct.Struct("<Q16s")
_OPTIONS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "segment": (read_size, SIZE_WANTS),
    "host": (str, "this host's address, as the other hosts reach it"),
    "protocol": (one_of("tcp", "rdma"), "tcp or rdma"),
    "device": (str, "the names of RDMA devices"),
}


class _Process:
    """The process with the client. `idle`: its connections that no call uses."""

    def __init__(self, setup: Sequence[Any]) -> None:
        self.idle: list[Connection] = []
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module, number = "tensord.daemon.remote_stores.mooncake_worker", theirs.fileno()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(number), json.dumps(setup)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def connection(self) -> Connection:
        """One that no call uses. Raises OSError if the process has ended."""
        try:
            return self.idle.pop()
        except IndexError:
            own, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._channel, [b"c"], [theirs.fileno()])
            return Connection(own.detach())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._channel.close()
        while self.idle:
            self.idle.pop().close()


class MooncakeStore(RemoteStore):
    """The store of a Mooncake master. `segment`: bytes of this host's memory that are given to all hosts' objects."""

    def __init__(
        self, master: str, timeout_s: float, segment: int = 0, host: str = "", protocol: str = "tcp", device: str = ""
    ) -> None:
        super().__init__(f"mooncake://{master}", timeout_s)
        self._master = master
        self._host = host
        self._setup = ("P2PHANDSHAKE", segment, BUFFER_BYTES, protocol, device, master)
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._closed = False
        self._known: defaultdict[bytes, int] = defaultdict(int)

    @classmethod
    def of_url(cls, url: str, timeout_s: float) -> MooncakeStore:
        """The store of a URL such as mooncake://MASTER:50051?segment=4GiB&host=10.0.0.7."""
        parts = split(url)
        if not parts.hostname or parts.path.strip("/") or "@" in parts.netloc:
            raise BadConfiguration(f"{shown(url)}: write mooncake://MASTER:{_PORT}, without a path and a user")
        given = options(url, _OPTIONS)
        if find_spec("mooncake") is None:
            raise BadConfiguration(
                "mooncake:// needs Mooncake's client: pip install mooncake-transfer-engine, or on a host without CUDA "
                "mooncake-transfer-engine-non-cuda, and the packages libibverbs1 libnl-3-200 libnl-route-3-200"
            )
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return cls(f"{host}:{parts.port or _PORT}", timeout_s, **given)

    def look(self, keys: Sequence[bytes]) -> tuple[int, list[RemoteEntry | None]]:
        found: list[RemoteEntry | None] = []
        for key, head in zip(keys, self._call("heads", [_name(key) for key in keys]), strict=True):
            missed = isinstance(head, int) and self._missed(head)
            found.append(None if missed else self._checked(key, memoryview(head), header=True))
        return self._last(keys[0][:NAMESPACE_TAG_BYTES])[1], found

    def get_into(self, key: bytes, buffer: memoryview) -> RemoteEntry | None:
        size = self._call("get", _name(key), len(buffer), into=buffer)
        return None if self._missed(size) else self._checked(key, buffer[:size])

    def put_from(self, key: bytes, payload: Buffer, entry: RemoteEntry) -> None:
        stored = b"".join((object_header(key, entry, time.time()), payload))
        code = self._call("put", _name(key), sent=stored)
        # A key has one payload: what another host writes meanwhile is the same.
        if code not in _DONE_BY_OTHERS:
            self._done(code)

    def remove(self, keys: Sequence[bytes]) -> None:
        for code in self._call("remove", [_name(key) for key in keys]):
            if code != _MISSING:
                self._done(code)

    def generations(self, tags: Sequence[bytes]) -> list[int]:
        return [self._last(tag)[1] for tag in tags]

    def raise_generation(self, tag: bytes, least: int) -> int:
        own = os.urandom(16)
        while True:
            number, generation = self._last(tag)
            new = max(generation + 1, least)
            given, name = _GIVEN.pack(new, own), _generation(tag, number + 1)
            self._done(self._call("claim", name, given))
            # Another host's may have been first, and may not be whole yet.
            if self._call("read", name) == given:
                return new

    def close(self) -> None:
        with self._lock:
            process, self._process, self._closed = self._process, None, True
        if process is not None:
            process.close()

    def _call(self, name: str, *arguments: Any, sent: bytes | None = None, into: memoryview | None = None) -> Any:
        """The result of a call of the client, which is `sent` bytes, and reads some `into` memory."""
        process = self._running()
        try:
            connection = process.connection()
            connection.send((name, arguments))
            if sent is not None:
                connection.send_bytes(sent)
            answered = connection.poll(self.timeout_s)
            if answered:
                result, error = connection.recv()
                if into is not None and not error and result >= 0:
                    connection.recv_bytes_into(into)
        except (EOFError, OSError):
            raise self._gone(process) from None
        if not answered:
            # The process ends the connection after the call.
            connection.close()
            raise self.timed_out()
        process.idle.append(connection)
        if error:
            raise TierUnavailable(f"{self.address}: {error}")
        return result

    def _running(self) -> _Process:
        with self._lock:
            if self._closed:
                raise self._was_closed()
            if self._process is None:
                self._process = _Process((self._host or _own_address(self._master), *self._setup))
            return self._process

    def _gone(self, process: _Process) -> TensordError:
        with self._lock:
            if self._closed:
                return self._was_closed()
            if self._process is process:
                self._process = None
                process.close()
        return TierUnavailable(f"{self.address}: the process with Mooncake's client has ended")

    def _last(self, tag: bytes) -> tuple[int, int]:
        """The number and the value of the generation that was given out last."""
        number = self._known[tag]
        while True:
            names = [_generation(tag, number + each) for each in range(1, LOOKED_FOR + 1)]
            there = self._call("exist", names)
            if any(each < 0 for each in there):
                raise TierUnavailable(f"{self.address} does not say which generations there are")
            if not any(there):
                break
            number += max(at for at, each in enumerate(there, 1) if each)
        self._known[tag] = number
        if not number:
            return 0, 0
        given = self._call("read", _generation(tag, number))
        if len(given) != _GIVEN.size:
            # Lost with the host that kept it, or not whole yet.
            self._known[tag] = 0
            raise TierUnavailable(f"{self.address} does not give the generation that it has given out last")
        return number, _GIVEN.unpack(given)[0]

    def _missed(self, size: int) -> bool:
        """Whether a read is a miss."""
        if size not in _MISSES:
            self._done(size)
        return size < 0

    def _done(self, code: int) -> None:
        if code == _FULL:
            raise TierFull(
                f"{self.address} has no room: give it memory of this host or others by the option segment, such as "
                "segment=4GiB"
            )
        if code < 0:
            raise TierUnavailable(f"{self.address} has failed with Mooncake's code {code}")


def _name(key: bytes) -> str:
    return f"{NAME}-{key.hex()}"


def _generation(tag: bytes, number: int) -> str:
    return f"{NAME}-gen-{tag.hex()}-{number}"


def _own_address(master: str) -> str:
    """This host's address on the way to the master."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise TierUnavailable(f"mooncake://{master} cannot be reached from here: {error}") from None
