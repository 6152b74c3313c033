"""Entries for the tests of remote stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensord.daemon.forms.events import RemoteEntry
from tensord.daemon.remote_stores.form import OBJECT_HEADER_BYTES
from tensord.daemon.remote_stores.store import RemoteStore
from tensord.shm.index.keys import make_key
from tensord.shm.payloads.copy import checksum_of


class Made(NamedTuple):
    key: bytes
    payload: bytes
    entry: RemoteEntry

    @property
    def stored_bytes(self) -> int:
        return OBJECT_HEADER_BYTES + len(self.payload)


def key_of(number: int) -> bytes:
    rng = np.random.default_rng(number)
    return make_key(b"a model.", rng.bytes(20), 3)


def made(number: int, payload_bytes: int = 5000, **meta: Any) -> Made:
    """An entry of its own for each number."""
    payload = np.random.default_rng(number).bytes(payload_bytes)
    return made_of(key_of(number), payload, **meta)


def made_of(key: bytes, payload: bytes, **meta: Any) -> Made:
    checksum = checksum_of(np.frombuffer(payload, np.uint8))
    entry = RemoteEntry(len(payload), min(len(payload), 40), checksum=checksum, **meta)
    return Made(key, payload, entry)


def put(store: RemoteStore, *entries: Made) -> None:
    for entry in entries:
        store.put_from(entry.key, entry.payload, entry.entry)


def get(store: RemoteStore, key: bytes, room_bytes: int = 1 << 20) -> tuple[bytes, RemoteEntry] | None:
    """The payload and its metadata, read into a buffer that had other bytes before, and has them behind the payload."""
    buffer = memoryview(bytearray(b"\xa5" * (OBJECT_HEADER_BYTES + room_bytes)))
    found = store.get_into(key, buffer)
    rest = buffer[OBJECT_HEADER_BYTES + found.payload_bytes :] if found is not None else b""
    assert rest == b"\xa5" * len(rest)
    return payload_of(found, buffer)


def payload_of(found: RemoteEntry | None, buffer: memoryview) -> tuple[bytes, RemoteEntry] | None:
    if found is None:
        return None
    return bytes(buffer[OBJECT_HEADER_BYTES : OBJECT_HEADER_BYTES + found.payload_bytes]), found


def heads(store: RemoteStore, keys: Sequence[bytes]) -> list[RemoteEntry | None]:
    """What the store says of the keys."""
    return store.look(keys)[1]


def calls(store: RemoteStore, entry: Made) -> list[Callable[[], object]]:
    """A call of each kind."""
    tag = entry.key[:8]
    return [
        lambda: store.get_into(entry.key, memoryview(bytearray(entry.stored_bytes))),
        lambda: heads(store, [entry.key]),
        lambda: put(store, entry),
        lambda: store.remove([entry.key]),
        lambda: store.generations([tag]),
        lambda: store.raise_generation(tag, 1),
    ]
