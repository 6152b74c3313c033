"""One process of a benchmark: the writer or the reader of one peer, timing its own calls.

    python -m peers.worker PEER writer|reader FOLDER

Owns: the values, the timed loops, the check that a read returns the value that was put, and the loop over the orders
from stdin. Does not own: the choice of measurements (harness.py).

Each call is timed by itself with `perf_counter_ns`, less the time of an empty call in the same loop.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from peers import Array, BaseReader, BaseWriter, module_of
from tensord.shm.index.keys import make_key

ROTATE_BYTES: Final = 256 << 20
KEYS_MAX: Final = 2048
SUSTAINED_PUTS: Final = 64
SUSTAINED_BYTES_MAX: Final = 256 << 20

_clock = time.perf_counter_ns


def key_count(value_bytes: int) -> int:
    """The number of values of `value_bytes` that are read, or written before keys repeat."""
    return max(2, min(KEYS_MAX, ROTATE_BYTES // value_bytes))


def key_of(kind: str, value_bytes: int, number: int) -> bytes:
    """The 32-byte key of one value, in the namespace of its kind."""
    digest = hashlib.sha256(f"{kind}/{value_bytes}/{number}".encode()).digest()
    return make_key(hashlib.sha256(kind.encode()).digest()[:8], digest, 0)


def stamp(value_bytes: int, number: int) -> int:
    """The word that fills a value to be read."""
    return value_bytes + number


def timed(call: Callable[[Any], object], arguments: list[Any], calls: int, seconds: float) -> list[int]:
    """The nanoseconds of each `call` over `arguments` in rotation: `calls` calls, or as many as fit into `seconds`."""
    samples: list[int] = []
    count = len(arguments)
    end = _clock() + int(seconds * 1e9)
    for number in range(calls):
        argument = arguments[number % count]
        before = _clock()
        call(argument)
        after = _clock()
        samples.append(after - before)
        if after > end and number >= 2:
            break
    return samples


def _nothing(_: object) -> None:
    return None


class WriterRole:
    """Holds 256 MiB of values, so that the processor's cache holds no value from its last put."""

    def __init__(self, writer: BaseWriter, evicts_by_itself: bool) -> None:
        self._writer = writer
        self._evicts_by_itself = evicts_by_itself
        self._memory = np.arange(ROTATE_BYTES // 8, dtype=np.uint64)
        self._number = 0

    def values(self, value_bytes: int) -> list[Array]:
        words = value_bytes // 8
        return [*self._memory[: self._memory.size // words * words].reshape(-1, words)]

    def warm(self, value_bytes: int, total_bytes: int) -> None:
        """Puts `total_bytes` of values, untimed."""
        values = self.values(value_bytes)
        for number, key in enumerate(self._next_keys(value_bytes, -(-total_bytes // value_bytes))):
            self._writer.put_visible(key, values[number % len(values)])

    def put_keys(self, value_bytes: int) -> list[Any]:
        """Puts the values that the reader will read, if they are missing. Returns the readers' tokens."""
        tokens = []
        for number in range(key_count(value_bytes)):
            value = np.full(value_bytes // 8, stamp(value_bytes, number), np.uint64)
            tokens.append(self._writer.put_visible(key_of("get", value_bytes, number), value))
        return tokens

    def _next_keys(self, value_bytes: int, count: int) -> list[bytes]:
        rotation = sys.maxsize if self._evicts_by_itself else key_count(value_bytes)
        keys = [key_of("put", value_bytes, (self._number + n) % rotation) for n in range(count)]
        self._number += count
        return keys

    def measure(self, op: str, value_bytes: int, calls: int, seconds: float) -> list[float]:
        values = self.values(value_bytes)
        if op in ("put_sustained", "put_many"):
            return self._bursts(op, values, value_bytes, calls, seconds)
        keys = self._next_keys(value_bytes, calls)
        put = self._writer.put_visible if op == "put_visible" else self._writer.put
        samples: list[float] = []
        end = _clock() + int(seconds * 1e9)
        for number, key in enumerate(keys):
            value = values[number % len(values)]
            before = _clock()
            put(key, value)
            after = _clock()
            samples.append(after - before)
            if op == "put_return":
                self._writer.flush()  # untimed: the next put begins with an idle store
            if after > end and number >= 2:
                break
        return samples

    def _bursts(self, op: str, values: list[Array], value_bytes: int, calls: int, seconds: float) -> list[float]:
        """Puts back to back, or in one call, until all are visible: nanoseconds for each put, one sample for each
        burst."""
        burst = max(4, min(SUSTAINED_PUTS, SUSTAINED_BYTES_MAX // value_bytes))
        samples = []
        end = _clock() + int(seconds * 1e9)
        for _ in range(max(1, calls // burst)):
            pairs = [(key, values[n % len(values)]) for n, key in enumerate(self._next_keys(value_bytes, burst))]
            put = self._writer.put
            before = _clock()
            if op == "put_many":
                self._writer.put_many(pairs)
            else:
                for key, value in pairs:
                    put(key, value)
                self._writer.flush()
            after = _clock()
            samples.append((after - before) / burst)
            if after > end:
                break
        return samples

    def close(self) -> None:
        self._writer.close()


class ReaderRole:
    def __init__(self, reader: BaseReader) -> None:
        self._reader = reader

    def learn(self, value_bytes: int, tokens: list[Any]) -> None:
        """Takes the tokens of the values, and reads each value once to check it."""
        keys = [key_of("get", value_bytes, number) for number in range(key_count(value_bytes))]
        self._reader.learn(keys, tokens)
        words = value_bytes // 8
        for number, key in enumerate(keys):
            wanted = stamp(value_bytes, number) * words & (1 << 64) - 1
            if (found := self._reader.get_consume(key)) != wanted:
                raise AssertionError(f"value {number} of {value_bytes} bytes sums to {found}, not {wanted}")

    def measure(self, op: str, value_bytes: int, calls: int, seconds: float) -> list[float]:
        keys = [key_of("get", value_bytes, number) for number in range(key_count(value_bytes))]
        if op in ("get_many_key", "get_many_views_key"):
            many = self._reader.get_many if op == "get_many_key" else self._reader.get_many_views
            return [ns / len(keys) for ns in timed(many, [self._reader.batch(keys)], calls, seconds)]
        call: Callable[[bytes], object] = self._reader.get if op == "get" else self._reader.get_consume
        timed(call, keys, len(keys), seconds)  # reads every value once before the timing
        overhead = median(timed(_nothing, keys, 1000, seconds))
        return [max(0, ns - overhead) for ns in timed(call, keys, calls, seconds)]

    def close(self) -> None:
        self._reader.close()


def serve(make: Callable[[], Any]) -> None:
    """Carries out the orders of a harness.Worker by the methods of what `make` returns, until stdin ends."""
    # stdout is for answers only: the prints of libraries go to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = make()
    print(json.dumps({"ready": os.getpid()}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"result": getattr(worker, order.pop("do"))(**order)}
        except Exception as error:  # sent to the harness, which names the peer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    worker.close()


def role_of(name: str, role: str, folder: Path) -> WriterRole | ReaderRole:
    module = module_of(name)
    if role == "writer":
        return WriterRole(module.Writer(folder), module.Peer.evicts_by_itself)
    return ReaderRole(module.Reader(folder))


if __name__ == "__main__":
    serve(lambda: role_of(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
