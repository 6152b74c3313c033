"""The caches that are measured against each other, one small file each, behind one interface.

A peer's file has a class `Peer` (its servers, in the process that runs the benchmark), a class
`Writer` and a class `Reader` (each in a process of its own; see worker.py). Peers, writers and
readers of one run share a folder, and nothing else: whatever a reader must know beyond a key is the
token that the writer's put gave back.

What is timed is a call of one of the methods named in `Op`, and nothing around it.
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
    "put_visible",
    "copy",
]
READ_OPS: Final[tuple[Op, ...]] = ("get", "get_consume", "get_many_key", "get_many_views_key")
PUT_OPS: Final[tuple[Op, ...]] = ("put_return", "put_sustained", "put_visible")
NAMES: Final = ("copy", "tensord", "lmdb", "redis", "sharedmemory", "vllm")

_MODULES: Final = {"copy": "copy", "sharedmemory": "sharedmemory_peer"}


class BasePeer:
    """What stands beside writer and reader: servers, if any. `folder` is private to this peer and
    this run.
    """

    ops: ClassVar[tuple[Op, ...]] = ("get", "get_consume", *PUT_OPS)
    # True where a store makes room by itself, so that it may be given a new key for ever; else keys
    # come round again.
    evicts_by_itself: ClassVar[bool] = False
    # What is written, untimed, before the first round: all of a ring, so that no put is timed on
    # fresh pages.
    warm_bytes: ClassVar[int] = 512 << 20

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def missing(cls) -> str | None:
        """Why this peer cannot run here, with the remedy; None if it can."""
        return None

    @classmethod
    def python(cls) -> str:
        """The interpreter that its writer and reader run in."""
        return sys.executable

    def start(self) -> None:
        """Start what the writer and the reader need; returns when it serves."""

    def stop(self) -> None:
        """End what `start` started, and remove what it leaves behind. Called once, after writer and
        reader ended.
        """


class BaseWriter:
    """Stores values. Every value is a one-dimensional uint64 array, which the caller does not
    change.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, key: bytes, value: Array) -> Any:
        """Store `value`; returns when the caller may go on. What a reader needs beyond the key, as
        JSON, or None.
        """
        raise NotImplementedError  # each peer has its own of what its `ops` name; the rest is not called

    def put_visible(self, key: bytes, value: Array) -> Any:
        """The same; returns when every reader would find it."""
        return self.put(key, value)

    def flush(self) -> None:
        """Returns when all that was put is visible."""

    def close(self) -> None:
        """Let go of everything."""


class BaseReader:
    """Reads values. The timed methods include giving up what they got."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def learn(self, keys: Sequence[bytes], tokens: Sequence[Any]) -> None:
        """Told, untimed, of what was put, before it is read."""

    def get(self, key: bytes) -> None:
        """Get one value as a numpy array, and release it."""
        raise NotImplementedError  # each peer has its own of what its `ops` name; the rest is not called

    def get_consume(self, key: bytes) -> int:
        """Get one value, read every byte of it (`consume`), and release it."""
        raise NotImplementedError  # each peer has its own of what its `ops` name; the rest is not called

    def batch(self, keys: Sequence[bytes]) -> Any:
        """The keys of a batch in the form that this peer likes best; made untimed."""
        return keys

    def get_many(self, batch: Any) -> None:
        """Get a batch of values that can be indexed, and release it."""
        raise NotImplementedError  # each peer has its own of what its `ops` name; the rest is not called

    def get_many_views(self, batch: Any) -> None:
        """Get a batch and make a numpy array of every value in it; release all."""
        raise NotImplementedError  # each peer has its own of what its `ops` name; the rest is not called

    def close(self) -> None:
        """Let go of everything."""


def consume(value: Array) -> int:
    """Reads every byte: the sum of the value's 64-bit words, modulo 2**64."""
    return int(np.add.reduce(value.view(np.uint64)))


def module_of(name: str) -> Any:
    """The module of the peer called `name`, with its `Peer`, `Writer` and `Reader`."""
    return importlib.import_module("peers." + _MODULES.get(name, f"{name}_peer"))
