"""Payloads that say what they are, keys for them, and a ring that is overwritten from end to end many times."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Any, Final

import numpy as np

import tensord

from ..daemon_process import some, until

Words = np.ndarray[Any, np.dtype[np.uint64]]
LAP_BYTES: Final = 256 << 10
PINNED: Final = 1
"""The entry of the fixture `small`."""
_GOLDEN: Final = 0x9E3779B97F4A7C15


def key(number: int) -> bytes:
    """The 32-byte key number `number`, all of one namespace."""
    return b"faults--" + struct.pack("<QQQ", number * _GOLDEN % 2**64, number * 0xC2B2AE3D27D4EB4F % 2**64, number)


def payload(number: int, size_bytes: int = 64 << 10) -> Words:
    """(size_bytes / 8,) uint64 that no other number's payload shares a word with."""
    return np.arange(size_bytes // 8, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(number)


def is_payload(found: Words, number: int) -> bool:
    """Whether every word of `found` is number `number`'s."""
    return bool(np.array_equal(found, payload(number, found.nbytes)))


def has(client: tensord.Client, number: int, verify: bool = False) -> bool:
    """Whether the client finds payload `number`, whole."""
    lease = client.get(key(number), verify=verify)
    return lease is not None and is_payload(lease.tree, number)


def with_place(client: tensord.Client, number: int, size_bytes: int = 64 << 10) -> None:
    """Stores payload `number`, and waits until the client has a place for one more of this size. Ahead of need it has
    at most 1/64 of the ring."""
    assert client.put(key(number), payload(number, size_bytes), wait=True, timeout_s=30.0).state == "stored"
    writer = some(client.link.puts.writer)
    for _ in range(10):
        # The daemon answers a request ahead of need with no place while others have theirs. The next put asks again.
        with suppress(AssertionError):
            until(lambda: writer.arena.left_bytes > size_bytes, "a place", 3.0)
            return
        client.put(key(number), payload(number, size_bytes), wait=True, timeout_s=30.0)
    raise AssertionError(f"no place of {size_bytes} bytes ahead of need")


def cut(client: tensord.Client) -> None:
    """The connection ends, and the client knows it."""
    channel = some(client.link.attachment.channel)
    channel._sock.shutdown(socket.SHUT_RDWR)
    until(lambda: client.link.attachment.channel is not channel, "the client to notice")


def lap(client: tensord.Client, ring_bytes: int, laps: int = 3, first: int = 1_000_000) -> None:
    """Stores so many other entries that their bytes fill the ring `laps` times over. What nobody pins is gone then if
    the daemon goes by last use alone (policy = "lru"); the learned policy keeps what is small for longer."""
    data = payload(first, LAP_BYTES)
    puts = []
    for number in range(first, first + laps * ring_bytes // LAP_BYTES + 1):
        puts.append(client.put(key(number), data, timeout_s=30.0))
        if len(puts) > 256:
            _stored(puts)
    _stored(puts)


def _stored(puts: list[tensord.Put]) -> None:
    for put in puts:
        assert put.wait(30.0).state == "stored", put
    puts.clear()
