"""The caches that the benchmark compares, one small file each, behind one interface.

A peer's file has a class `Peer` (its servers, in the process that runs the benchmark), a class `Writer` and a class
`Reader` (each in its own process; see worker.py). The peer, writer and reader of one run share only a folder. The
writer's put returns a token: everything that a reader needs beyond the key.

The benchmark times one call of a method named in `Op`, and nothing around the call.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Op = Literal[
    "get",
    "get_consume",
    "get_many_key",
    "get_many_views_key",
    "put_return",
    "put_sustained",
    "put_many",
    "put_visible",
    "copy",
]
READ_OPS: Final[tuple[Op, ...]] = ("get", "get_consume", "get_many_key", "get_many_views_key")
PUT_OPS: Final[tuple[Op, ...]] = ("put_return", "put_sustained", "put_visible")
NAMES: Final = ("copy", "tensord", "lmdb", "redis", "sharedmemory", "vllm")

_MODULES: Final = {"copy": "copy", "sharedmemory": "sharedmemory_peer"}


class BasePeer:
    """The servers of a peer, if it has any. `folder` is private to this peer and this run."""

    ops: ClassVar[tuple[Op, ...]] = ("get", "get_consume", *PUT_OPS)
    # True if the store evicts by itself, so that every put may use a new key. Otherwise keys repeat.
    evicts_by_itself: ClassVar[bool] = False
    # The bytes that are written, untimed, before the first round: the whole ring, so that no timed put meets fresh
    # pages.
    warm_bytes: ClassVar[int] = 512 << 20

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def missing(cls) -> str | None:
        """The reason why this peer cannot run here, with the remedy; None if it can run."""
        return None

    @classmethod
    def python(cls) -> str:
        """The interpreter of its writer and reader."""
        return sys.executable

    def start(self) -> None:
        """Starts the servers that the writer and the reader need; returns when they serve."""

    def stop(self) -> None:
        """Stops the servers and removes what they leave. Called once, after the writer and the reader have ended."""


class BaseWriter:
    """Stores values. Every value is a one-dimensional uint64 array; the caller does not change it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, key: bytes, value: Array) -> Any:
        """Stores `value`; returns when the caller may continue. Returns a token for the reader (JSON), or None."""
        raise NotImplementedError  # each peer implements the methods that its `ops` name

    def put_visible(self, key: bytes, value: Array) -> Any:
        """Like `put`, but returns when every reader finds the value."""
        return self.put(key, value)

    def put_many(self, pairs: Sequence[tuple[bytes, Array]]) -> None:
        """Stores these values in one call. Returns when every reader finds them."""
        raise NotImplementedError  # each peer implements the methods that its `ops` name

    def flush(self) -> None:
        """Returns when every put is visible."""

    def close(self) -> None:
        """Releases everything."""


class BaseReader:
    """Reads values. Each timed method includes the release of its result."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def learn(self, keys: Sequence[bytes], tokens: Sequence[Any]) -> None:
        """Takes the keys and tokens of the values before they are read; untimed."""

    def get(self, key: bytes) -> None:
        """Gets one value as a numpy array, and releases it."""
        raise NotImplementedError  # each peer implements the methods that its `ops` name

    def get_consume(self, key: bytes) -> int:
        """Gets one value, reads every byte (`consume`), and releases it."""
        raise NotImplementedError  # each peer implements the methods that its `ops` name

    def batch(self, keys: Sequence[bytes]) -> Any:
        """The keys of a batch in this peer's preferred form; untimed."""
        return keys

    def get_many(self, batch: Any) -> None:
        """Gets a batch of values that supports indexing, and releases it."""
        raise NotImplementedError  # each peer implements the methods that its `ops` name

    def get_many_views(self, batch: Any) -> None:
        """Gets a batch, makes a numpy array of every value, and releases all."""
        raise NotImplementedError  # each peer implements the methods that its `ops` name

    def close(self) -> None:
        """Releases everything."""


def consume(value: Array) -> int:
    """Reads every byte: the sum of the value's 64-bit words, modulo 2**64."""
    return int(np.add.reduce(value.view(np.uint64)))


def module_of(name: str) -> Any:
    """The module of the peer `name`, with its `Peer`, `Writer` and `Reader`."""
    return importlib.import_module("peers." + _MODULES.get(name, f"{name}_peer"))
