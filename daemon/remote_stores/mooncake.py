"""Mooncake Store as a remote store: the memory of many hosts, which a master gives out.

    tensord-1-KEY           an object; KEY in hexadecimal
    tensord-1-gen-TAG-N     the N-th generation that was given out for a namespace; it is not evicted

Owns: names, and what a code of Mooncake means. Does not own: Mooncake's client, which has a process of its own
(`mooncake_calls`).

What is read and written goes through memory that both processes share. That costs a copy; in return a call that hangs
never touches the caller's memory, and is left at its deadline.

While an object is replaced, it is a miss. Of several hosts that write a new key, the first one stays: generations are
given out by that. Mooncake has no claims that end by themselves.
"""

from __future__ import annotations

import os
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Final

from ...errors import BadConfiguration, TierFull, TierUnavailable
from ...ipc.quantities import SIZE_WANTS, read_size
from .form import OBJECT_HEADER_BYTES, Buffer, Meta, RemoteEntry, object_header
from .mooncake_calls import MooncakeCalls, SharedMemory
from .store import NAME, RemoteStore
from .urls import one_of, options, shown, split

LOOKED_FOR: Final = 16
"""Generations that are looked for at once. So many in a row may be lost with the host that kept them."""
HEADS_MAX: Final = 256
"""Keys whose headers are read by one call."""
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


class MooncakeStore(RemoteStore):
    """The store of a Mooncake master. `segment_bytes`: memory of this host that is given to all hosts' objects."""

    gives_way = False

    def __init__(self, master: str, segment_bytes: int, host: str, protocol: str, device: str) -> None:
        super().__init__(f"mooncake://{master}")
        self._calls = MooncakeCalls(self.address, self._left_s, master, segment_bytes, host, protocol, device)
        self._known: defaultdict[bytes, int] = defaultdict(int)

    @classmethod
    def of_url(cls, url: str) -> MooncakeStore:
        """The store of a URL such as mooncake://MASTER:50051?segment=4GiB&host=10.0.0.7.

        Raises:
            BadConfiguration: the URL names no master, or has a wrong option, or Mooncake is not installed.
        """
        parts = split(url)
        if not parts.hostname or parts.path.strip("/") or "@" in parts.netloc:
            raise BadConfiguration(f"{shown(url)}: write mooncake://MASTER:{_PORT}, without a path and a user")
        given = options(url, _OPTIONS)
        if find_spec("mooncake") is None:
            raise BadConfiguration(
                "mooncake:// needs Mooncake's client: pip install mooncake-transfer-engine, or on a host without CUDA "
                "mooncake-transfer-engine-non-cuda, and the packages libibverbs1 libnl-3-200 libnl-route-3-200"
            )
        return cls(
            f"{_host(parts.hostname)}:{parts.port or _PORT}",
            given.get("segment", 0),
            given.get("host", ""),
            given.get("protocol", "tcp"),
            given.get("device", ""),
        )

    def connect(self, deadline: float) -> None:
        self._calls.call("exist", deadline, [_name(b"")])

    def heads(self, keys: Sequence[bytes], deadline: float) -> list[RemoteEntry | None]:
        found: list[RemoteEntry | None] = []
        for first in range(0, len(keys), HEADS_MAX):
            some = keys[first : first + HEADS_MAX]
            with SharedMemory(OBJECT_HEADER_BYTES * len(some)) as memory:
                sizes = self._calls.call("heads", deadline, [_name(key) for key in some], memory=memory)
                for at, (key, size) in enumerate(zip(some, sizes, strict=True)):
                    header = memory.bytes[OBJECT_HEADER_BYTES * at : OBJECT_HEADER_BYTES * (at + 1)]
                    found.append(None if self._missed(size) else self._head(key, header[:size]))
        return found

    def get_into(self, key: bytes, buffer: memoryview, deadline: float) -> RemoteEntry | None:
        with SharedMemory(len(buffer)) as memory:
            size = self._calls.call("get", deadline, _name(key), memory=memory)
            if self._missed(size):
                return None
            buffer[:size] = memory.bytes[:size]
        return self._checked(key, buffer[:size])

    def put_from(self, key: bytes, payload: Buffer, meta: Meta, deadline: float) -> None:
        header, size = object_header(key, len(payload), meta), OBJECT_HEADER_BYTES + len(payload)
        self._left_s(deadline)
        with SharedMemory(size) as memory:
            memory.bytes[:OBJECT_HEADER_BYTES] = header
            memory.bytes[OBJECT_HEADER_BYTES:] = payload
            code = self._calls.call("put", deadline, _name(key), memory=memory)
        # A key has one payload: what another host writes meanwhile is the same.
        if code not in _DONE_BY_OTHERS:
            self._done(code)

    def remove(self, keys: Sequence[bytes], deadline: float) -> None:
        for code in self._calls.call("remove", deadline, [_name(key) for key in keys]):
            if code != _MISSING:
                self._done(code)

    def generations(self, tags: Sequence[bytes], deadline: float) -> list[int]:
        return [self._last(tag, deadline)[1] for tag in tags]

    def raise_generation(self, tag: bytes, least: int, deadline: float) -> int:
        own = os.urandom(16)
        while True:
            number, generation = self._last(tag, deadline)
            new = max(generation + 1, least)
            given, name = _GIVEN.pack(new, own), _generation(tag, number + 1)
            self._done(self._calls.call("claim", deadline, name, given))
            # Another host's may have been first, and may not be whole yet.
            if self._calls.call("read", deadline, name) == given:
                return new

    def close(self) -> None:
        self._calls.close()

    def _last(self, tag: bytes, deadline: float) -> tuple[int, int]:
        """The number and the value of the generation that was given out last."""
        number = self._known[tag]
        while True:
            names = [_generation(tag, number + each) for each in range(1, LOOKED_FOR + 1)]
            there = self._calls.call("exist", deadline, names)
            if any(each < 0 for each in there):
                raise TierUnavailable(f"{self.address} does not say which generations there are")
            if not any(there):
                break
            number += max(at for at, each in enumerate(there, 1) if each)
        self._known[tag] = number
        if not number:
            return 0, 0
        given = self._calls.call("read", deadline, _generation(tag, number))
        if len(given) != _GIVEN.size:
            # Lost with the host that kept it, or not whole yet.
            self._known[tag] = 0
            raise TierUnavailable(f"{self.address} does not give the generation that it has given out last")
        return number, _GIVEN.unpack(given)[0]

    def _missed(self, size: int) -> bool:
        """Whether a read is a miss. Raises TierUnavailable if it has failed."""
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


def _host(name: str) -> str:
    """A host in an address with a port: an IPv6 address is in brackets."""
    return f"[{name}]" if ":" in name else name
