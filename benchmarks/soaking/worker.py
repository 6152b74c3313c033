"""A process of the soak: makes all calls of a client in random order, and checks every byte of the results.

    python benchmarks/soaking/worker.py FOLDER WORKER WORKERS SEED LOSSY

Owns: the operations, and the definition of a wrong answer and of a lost entry. The worker records its entries in a
ledger for its successor. It ends when it is killed.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import tensord
from soaking.ledger import (
    ABSENT,
    ENDING,
    OPERATIONS,
    PUTTING,
    ROWS,
    STORED,
    Ledger,
    is_right,
    namespace,
    size_of,
    words_of,
)
from tensord.errors import DeviceFull, Invalidated, TensordError
from tensord.testing.fake_vram import FakeCard, FakeVram

CARD: Final = "soak-card"
_WAIT_S: Final = 20.0
_HELD_MAX: Final = 12
_COMMON: Final = 9999
"""The worker number in keys that all workers compute."""
_COMMON_KEYS: Final = 16
_SEQUENCES: Final = 6
_BLOCK_TOKENS: Final = 16
_WEIGHTS: Final = {"get": 12, "hold": 6, "get_others": 4, "put_small": 8, "invalidate": 0.2, "fork": 0.7}


class Worker:
    """`lossy`: the ring is too small for the puts, so that a miss is no loss."""

    def __init__(self, folder: Path, worker: int, workers: int, seed: int, *, lossy: bool) -> None:
        self.ledger = Ledger(folder / f"ledger.{worker}", worker)
        self.chance = random.Random(seed)
        self.lossy = lossy
        self._workers = workers
        self._others = {w: Ledger(folder / f"ledger.{w}", w) for w in range(workers)}
        self._faults = os.open(folder / "faults", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._client = tensord.Client(folder / "control.sock", name=f"soak-{worker}", timeout_s=_WAIT_S)
        self._sequences = tensord.PrefixCache(self._client, namespace(worker + 500), block_tokens=_BLOCK_TOKENS)
        self._vram = FakeVram(FakeCard(folder / "card", CARD))
        self._tensors = tensord.DeviceCache(self._client, self._vram)
        self._held: list[tuple[int, int, Any]] = []

    def run(self) -> None:
        """Works until the process ends."""
        self._after_a_kill()
        names = list(OPERATIONS)
        weights = [_WEIGHTS.get(name, 2) for name in names]
        operations: dict[str, Callable[[], None]] = {name: getattr(self, f"_{name}", self._put) for name in names}
        while True:
            [name] = self.chance.choices(names, weights)
            self._name = name
            try:
                operations[name]()
            except TensordError:
                # The daemon is away, or was killed during the call. The ledger marks the row as unknown.
                self._client.wait_connected(_WAIT_S)
            self.ledger.count(name)

    # ---- puts

    def _put(self) -> None:
        row, serial, words = self._new(self._name)
        put = self._client.put(self.ledger.key(serial), words).wait(_WAIT_S)
        self._has_put(row, put)

    def _reserve(self) -> None:
        row, serial, words = self._new("put_small")
        reserved = self._client.reserve(tensord.Spec(words.shape, "uint64"))
        np.copyto(reserved.tree, words)
        self._has_put(row, reserved.commit(self.ledger.key(serial)).wait(_WAIT_S))

    def _new(self, kind: str) -> tuple[Any, int, Any]:
        """A row for a new put. Evicts the entry that the row had before."""
        row = self.ledger.rows[self.chance.randrange(ROWS)]
        if row[1] != ABSENT:
            self._end(row)
        serial = self.ledger.next_serial()
        row[0] = serial
        row[1] = PUTTING
        return row, serial, words_of(self.ledger.worker, serial, size_of(kind, serial))

    def _has_put(self, row: Any, put: tensord.Put) -> None:
        if put.state in ("stored", "existed"):
            # A put that is sent again to a daemon that has the entry finds that it exists.
            row[1] = STORED
        elif put.state == "refused":
            row[1] = ABSENT
            if isinstance(put.error, Invalidated):
                # An evict was sent, and its answer was lost.
                self._invalidate()
            elif not self.lossy:
                self._fault("lost", f"a put was refused: {put.error}")

    def _end(self, row: Any) -> None:
        was, row[1] = int(row[1]), ENDING
        gone = self._client.evict(self.ledger.key(int(row[0])))
        if was == STORED and not gone and not self.lossy:
            self._fault("lost", f"serial {row[0]} was not there to evict")
        row[1] = ABSENT

    # ---- reads

    def _get(self) -> None:
        row = self.ledger.rows[self.chance.randrange(ROWS)]
        self._read(row, self._client.get(self.ledger.key(int(row[0])), verify=self.chance.random() < 0.2))

    def _get_many(self) -> None:
        rows = [self.ledger.rows[self.chance.randrange(ROWS)] for _ in range(8)]
        with self._client.get_many([self.ledger.key(int(row[0])) for row in rows]) as batch:
            for row, lease in zip(rows, batch, strict=True):
                self._read(row, lease)

    def _read(self, row: Any, lease: tensord.Lease | None) -> None:
        serial, state = int(row[0]), int(row[1])
        if lease is None:
            if state == STORED and not self.lossy:
                self._missed(serial)
            return
        self._check(self.ledger.worker, serial, lease.tree)

    def _missed(self, serial: int) -> None:
        """A miss is a loss only if the client is attached: without a daemon every get misses."""
        self._client.wait_connected(_WAIT_S)
        lease = self._client.get(self.ledger.key(serial))
        if lease is not None:
            self._check(self.ledger.worker, serial, lease.tree)
        elif self._client.connected:
            self._fault("lost", f"serial {serial} of worker {self.ledger.worker}")

    def _get_others(self) -> None:
        """Reads entries of other workers, which may end at any time: a miss is no loss."""
        other = self._others[self.chance.randrange(self._workers)]
        serial = int(other.rows[self.chance.randrange(ROWS)][0])
        lease = self._client.get(other.key(serial))
        if lease is not None:
            self._check(other.worker, serial, lease.tree)

    def _hold(self) -> None:
        """Holds views over kills of the daemon, ends of their entries, and forks."""
        row = self.ledger.rows[self.chance.randrange(ROWS)]
        serial = int(row[0])
        lease = self._client.get(self.ledger.key(serial))
        if lease is not None:
            self._held.append((self.ledger.worker, serial, lease.tree))
        while len(self._held) > _HELD_MAX:
            worker, serial, words = self._held.pop(self.chance.randrange(len(self._held)))
            self._check(worker, serial, words)

    # ---- other calls

    def _evict(self) -> None:
        row = self.ledger.rows[self.chance.randrange(ROWS)]
        if row[1] != ABSENT:
            self._end(row)

    def _invalidate(self) -> None:
        """Raises the generation and waits for the answer: no other process raises it."""
        past = self.ledger.namespace()
        serials = [int(serial) for serial in self.ledger.rows[:8, 0]]
        self.ledger.rows[:, 1] = ENDING
        raised = self._client.invalidate(past)
        if raised.generation != past.generation + 1:
            self._fault("wrong", f"generation {past.generation} was raised to {raised.generation}")
        self.ledger.generation = raised.generation
        self.ledger.rows[:, 1] = ABSENT
        for serial in serials:
            if self._client.get(past.key("soak", "bytes", serial.to_bytes(8, "little"))) is not None:
                self._fault("wrong", f"serial {serial} is found after its namespace was invalidated")

    def _claim(self) -> None:
        """Keys that all workers compute, one worker at a time."""
        number = self.chance.randrange(_COMMON_KEYS)
        key = namespace(_COMMON).key("soak", "bytes", number.to_bytes(8, "little"))
        words = self._client.get_or_compute(key, lambda: words_of(_COMMON, number, size_of("put_small", number)))
        self._check(_COMMON, number, words)
        if self.chance.random() < 0.3:
            self._client.evict(key)

    def _sequence(self) -> None:
        number = self.chance.randrange(_SEQUENCES)
        tokens = np.arange(_BLOCK_TOKENS * 3 + 5, dtype=np.uint32) + np.uint32(1000 * (number // 2) + number)
        layer = np.cumsum(tokens, dtype=np.uint64).reshape(1, -1, 1).repeat(16, axis=2)
        self._sequences.put(tokens, [tensord.NormalLayer(layer)]).wait(_WAIT_S)
        match = self._sequences.match(tokens)
        if match is not None:
            with match:
                if not np.array_equal(match.joined(0), layer[:, : match.offset]):
                    self._fault("wrong", f"sequence {number}")
                self.ledger.count("checked")
        if self.chance.random() < 0.1:
            self._client.clear(self._sequences.namespace)

    def _device(self) -> None:
        """Entries on the stand-in card. The governor offloads them when the card is full; evicted ones miss."""
        number = self.chance.randrange(8)
        worker = self.ledger.worker
        key = namespace(worker + 1000).key("soak", "bytes", number.to_bytes(8, "little"))
        with_device = self._tensors.get(key)
        if with_device is None:
            words = words_of(worker, number, 16 << 10).view(np.float32)
            try:
                self._tensors.put(key, {"a": self._vram.upload(words)})
            except DeviceFull:
                self._tensors.delete(key)
            return
        with with_device as lease:
            leaf = lease.tree["a"]
            found = leaf if isinstance(leaf, np.ndarray) else leaf.numpy()
            self._check(worker, number, np.ascontiguousarray(found).view(np.uint64))

    def _fork(self) -> None:
        """The forked process checks the views, makes some of its own, and ends."""
        forked = os.fork()
        if not forked:
            try:
                for worker, serial, words in self._held:
                    self._check(worker, serial, words)
                self._client.wait_connected(_WAIT_S)
                self._get_others()
                if self._held and self.chance.random() < 0.5:
                    self._held.pop()
                    gc.collect()
                for worker, serial, words in self._held:
                    self._check(worker, serial, words)
            finally:
                os._exit(0)
        _, status = os.waitpid(forked, 0)
        if status:
            self._fault("wrong", f"a forked process ended with {os.waitstatus_to_exitcode(status)}")
        for worker, serial, words in self._held:
            self._check(worker, serial, words)

    def _after_a_kill(self) -> None:
        """Gives a new serial to every row that the worker's last process left in an unknown state."""
        for row in self.ledger.rows:
            if row[1] in (PUTTING, ENDING):
                # The old key is not used again: a put of it may still arrive late.
                row[1] = ABSENT
                row[0] = self.ledger.next_serial()

    def _check(self, worker: int, serial: int, words: Any) -> None:
        self.ledger.count("checked")
        if not is_right(words, worker, serial):
            self._fault("wrong", f"serial {serial} of worker {worker}: {words!r}")

    def _fault(self, kind: str, what: str) -> None:
        self.ledger.count(kind)
        text = f"{kind}: {what} (worker {self.ledger.worker}, in {self._name})"
        os.write(self._faults, (text.replace("\n", " ")[:500] + "\n").encode())


def main(folder: str, worker: str, workers: str, seed: str, lossy: str) -> None:
    """Works until the process is killed."""
    Worker(Path(folder), int(worker), int(workers), int(seed), lossy=lossy == "lossy").run()


if __name__ == "__main__":
    main(*sys.argv[1:])
