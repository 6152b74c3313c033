"""The ledger of a soak worker, in a file that outlives the worker; and its payloads.

Owns: the rows of one worker, its counters, and f(key). A row is one key that was put once. "putting" and "ending" mean
that a call began and its answer is unknown: the entry may exist or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

import tensord

ROWS: Final = 48
ABSENT, PUTTING, STORED, ENDING = range(4)
OPERATIONS: Final = (
    "put_small",
    "put_large",
    "put_megabytes",
    "reserve",
    "get",
    "get_many",
    "get_others",
    "hold",
    "evict",
    "invalidate",
    "claim",
    "sequence",
    "device",
    "fork",
)
FAULTS: Final = ("wrong", "lost")
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_COUNTERS: Final = (*OPERATIONS, *FAULTS, "checked")
_SMALL, _LARGE, _MEGABYTES = 32 << 10, 768 << 10, 3 << 20

Words = np.ndarray[Any, np.dtype[np.uint64]]


class Ledger:
    """The ledger of one worker. Its numbers are in memory that all openers of the file share."""

    def __init__(self, path: Path, worker: int) -> None:
        words = 2 + len(_COUNTERS) + 2 * ROWS
        if not path.exists():
            path.write_bytes(bytes(8 * words))
        memory = np.memmap(path, np.int64, "r+", shape=(words,))
        self.worker = worker
        self._head = memory[:2]
        self._counters = memory[2 : 2 + len(_COUNTERS)]
        self.rows = memory[2 + len(_COUNTERS) :].reshape(ROWS, 2)
        """(serial, state) of each row."""

    def count(self, name: str, much: int = 1) -> None:
        self._counters[_COUNTERS.index(name)] += much

    def counted(self) -> dict[str, int]:
        return {name: int(number) for name, number in zip(_COUNTERS, self._counters, strict=True)}

    def next_serial(self) -> int:
        """The serial of a new key."""
        self._head[0] += 1
        return int(self._head[0])

    @property
    def generation(self) -> int:
        return int(self._head[1])

    @generation.setter
    def generation(self, generation: int) -> None:
        self._head[1] = generation

    def namespace(self) -> tensord.Namespace:
        """The worker's namespace, at its generation."""
        return namespace(self.worker, self.generation)

    def key(self, serial: int) -> bytes:
        return self.namespace().key("soak", "bytes", serial.to_bytes(8, "little"))


def namespace(worker: int, generation: int = 0) -> tensord.Namespace:
    return tensord.Namespace(
        model="soak", revision=str(worker), dtype="uint64", processor="none", generation=generation
    )


def size_of(kind: str, serial: int) -> int:
    """The bytes of a payload of that kind."""
    most = {"put_large": _LARGE, "put_megabytes": _MEGABYTES}.get(kind, _SMALL)
    return (most // 2 + serial * 7919 % (most // 2)) // 8 * 8


def words_of(worker: int, serial: int, size_bytes: int) -> Words:
    """f(key): every word differs from the word at that place in all other payloads."""
    return np.arange(size_bytes // 8, dtype=np.uint64) * _GOLDEN + np.uint64(worker << 48 | serial)


def is_right(found: Any, worker: int, serial: int) -> bool:
    """True if the payload is the key's, and complete."""
    return isinstance(found, np.ndarray) and np.array_equal(found, words_of(worker, serial, found.nbytes))
