"""Runs peers side by side. In each round every peer does every operation, in a new random order.

Owns: the processes of each peer, the rounds, and the statistics of the samples. Does not own: the timing of a call
(worker.py), the peers (peers/), or the bars (hotpath.py).

The peers take turns because a machine's speed drifts by more than the differences between them: a slow minute affects
every peer. A row's median and 99th percentile are over all samples of all rounds.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self, get_args

import numpy as np

from peers import PUT_OPS, READ_OPS, BasePeer, Op, module_of

SIZES: Final = {"64K": 64 << 10, "1M": 1 << 20, "16M": 16 << 20}
BATCH_BYTES: Final = SIZES["64K"]
CALLS: Final = {SIZES["64K"]: 2000, SIZES["1M"]: 1000, SIZES["16M"]: 200}
BATCH_CALLS: Final = 50
STORED_TIMES: Final = 4
"""How often values are stored at most until all that are to be read are there."""
# Not by its path: the folder's copy.py would stand before Python's.
_ENVIRON: Final = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}


class PeerFailed(RuntimeError):
    """A peer's process ended or refused an order; the message names the peer and the reason."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: microseconds of `op` on values of `bytes` bytes; of one key, for the *_key operations."""

    peer: str
    op: Op
    bytes: int
    median_us: float
    p99_us: float


class Worker:
    """A process of one peer, called by `called`. It carries out orders (worker.serve) and answers each."""

    def __init__(self, called: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._called = called
        self._process = subprocess.Popen(
            command, env={**os.environ, **environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ready(self) -> None:
        """Returns when the process has its writer or reader."""
        self._answer()

    def do(self, what: str, **arguments: Any) -> Any:
        """Gives an order and returns its result. Raises PeerFailed."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()["result"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"{self._called} ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self._called}: {answer['error']}")
        return answer

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class RunningPeer:
    """A peer with its servers, writer and reader. One run owns all of them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        kind: type[BasePeer] = module_of(name).Peer
        self.ops: tuple[Op, ...] = kind.ops
        self._python = kind.python()
        self._warm_bytes = kind.warm_bytes
        self._evicts_by_itself = kind.evicts_by_itself
        self._folder = folder
        self._peer = kind(folder)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._folder.mkdir()
            self._peer.start()
            stack.callback(self._peer.stop)
            roles = ["writer"] if self.ops == ("copy",) else ["writer", "reader"]
            self._workers = {}
            for role in roles:  # the reader starts after the writer, which may create what the reader opens
                command = [self._python, "-m", "peers.worker", self.name, role, str(self._folder)]
                worker = self._workers[role] = Worker(f"{self.name}'s {role}", command, _ENVIRON)
                stack.callback(worker.close)
                worker.ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def warm(self, sizes: Sequence[int]) -> None:
        """Writes to all memory that later puts write to, the largest values first."""
        for value_bytes in sorted(sizes, reverse=True):
            if self._workers.keys() > {"writer"}:
                self._workers["writer"].do("put_keys", value_bytes=value_bytes)
            self._workers["writer"].do("warm", value_bytes=value_bytes, total_bytes=self._warm_bytes)

    def prepare_reads(self, value_bytes: int) -> None:
        """Stores every value that the reads ask for, and checks each. A policy that expects other values to be read
        sooner may evict some of them: those are stored again, beside others that were read by then."""
        for left in reversed(range(STORED_TIMES if self._evicts_by_itself else 1)):
            tokens = self._workers["writer"].do("put_keys", value_bytes=value_bytes)
            try:
                self._workers["reader"].do("learn", value_bytes=value_bytes, tokens=tokens)
                return
            except PeerFailed:
                if not left:
                    raise

    def prepare_puts(self, value_bytes: int) -> None:
        """Fills a quarter of the memory with values of this size, if the peer evicts old values for new ones.

        Without this the first large puts pay for the eviction of many small values each.
        """
        if self._evicts_by_itself:
            self._workers["writer"].do("warm", value_bytes=value_bytes, total_bytes=self._warm_bytes // 4)

    def measure(self, op: Op, value_bytes: int, calls: int, seconds: float) -> list[float]:
        """The nanoseconds of each call."""
        role = "reader" if op in READ_OPS else "writer"
        samples: list[float] = self._workers[role].do(
            "measure", op=op, value_bytes=value_bytes, calls=calls, seconds=seconds
        )
        return samples


def missing_peers(names: Iterable[str]) -> dict[str, str]:
    """The peers that cannot run on this machine, with the reason."""
    reasons = {name: module_of(name).Peer.missing() for name in names}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def steps(sizes: Sequence[int]) -> list[tuple[str, tuple[Op, ...], int]]:
    """The steps of a round: all of `reads` or all of `puts`, for one size."""
    found: list[tuple[str, tuple[Op, ...], int]] = []
    for value_bytes in sizes:
        reads = tuple(op for op in READ_OPS if value_bytes == BATCH_BYTES or not op.startswith("get_many"))
        found.append(("reads", reads, value_bytes))
        many: tuple[Op, ...] = ("put_many",) if value_bytes == BATCH_BYTES else ()
        found.append(("puts", (*PUT_OPS, *many, "copy"), value_bytes))
    return found


def run(
    names: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    seconds: float,
    seed: int = 0,
    told: Callable[[str], None] = lambda _: None,
    *,
    warm: bool = True,
) -> list[Row]:
    """Measures these peers, `seconds` for each operation, size and round. Raises PeerFailed.

    Without `warm` the puts meet memory that nobody has written to yet; use this only to check that everything runs.
    """
    chance = random.Random(seed)
    samples: dict[tuple[str, Op, int], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="tensord-bench-") as folder, ExitStack() as stack:
        peers = []
        for name in names:
            told(f"starting and warming {name}")
            peers.append(stack.enter_context(RunningPeer(name, Path(folder, name))))
            if warm:
                peers[-1].warm(sizes)
        for number in range(rounds):
            plan = steps(sizes)
            chance.shuffle(plan)
            for kind, ops, value_bytes in plan:
                told(f"round {number + 1} of {rounds}: {kind} of {value_bytes} bytes")
                for op in ops:
                    able = [peer for peer in peers if op in peer.ops]
                    for peer in chance.sample(able, len(able)):
                        if op == ops[0] and kind == "reads":
                            peer.prepare_reads(value_bytes)
                        elif op == ops[0] and warm:
                            peer.prepare_puts(value_bytes)
                        calls = BATCH_CALLS if op.startswith("get_many") else CALLS[value_bytes]
                        samples[peer.name, op, value_bytes] += peer.measure(op, value_bytes, calls, seconds)
    return [_row(*what, found) for what, found in sorted(samples.items())]


def _row(peer: str, op: Op, value_bytes: int, nanoseconds: Sequence[float]) -> Row:
    middle, high = np.percentile(nanoseconds, [50, 99]) / 1e3
    return Row(peer, op, value_bytes, round(float(middle), 4), round(float(high), 4))


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Writes the rows as a list of objects with the keys peer, op, bytes, median_us, p99_us."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A plain table: the first column is left-aligned, all others are right-aligned."""
    cells = [list(heads), *map(list, lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    written = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    return "\n".join([written[0], "-" * len(written[0]), *written[1:]])


def rows_table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Medians and 99th percentiles: one line for each operation and size, one column for each peer."""
    by = {(row.op, row.bytes, row.peer): row for row in rows}
    order = {op: n for n, op in enumerate(get_args(Op))}
    lines = []
    for op, value_bytes in sorted({(r.op, r.bytes) for r in rows}, key=lambda k: (order[k[0]], k[1])):
        found = [by.get((op, value_bytes, name)) for name in names]
        cells = [f"{_us(r.median_us)} /{_us(r.p99_us):>7}" if r else "" for r in found]
        size = next(name for name, known in SIZES.items() if known == value_bytes)
        lines.append([f"{op} {size}", *cells])
    return table(["µs: median / p99", *names], lines)


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit("peers/harness.py runs nothing by itself: see hotpath.py")
