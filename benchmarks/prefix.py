"""Measures the longest-prefix match of 32k-token queries among 100,000 sequences, beside a linear scan, in one run.

    python benchmarks/prefix.py [--json PATH] [--sequences N] [--client-sequences N] [--rounds N]

Owns: the timed operations, and the bars. Does not own: the sequences (sequences/forest.py), a daemon and its client
(sequences/daemon.py).

The index is timed call by call, as the daemon's loop makes the calls. Its text lies in one array, as in the ring. Every
round draws new queries, so that no query finds its text in a cache of the processor. Each scan is compared with the
index's answer to the same query. With 100,000 sequences the run takes 8 GiB and some minutes.

`client_ping` is a request that needs no work of the daemon. A client's match costs the difference to it.

A missed bar is printed, and does not change the exit status.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from peers import bars
from peers.bars import Figure
from peers.harness import table
from sequences.daemon import Served
from sequences.forest import LONGEST, SHORTEST, TAG, Forest
from sequences.rows import IndexedRows

from tensord.shm.payloads.prefix import PrefixRecord, Tokens, uncut

Query = tuple[PrefixRecord, Tokens]

# Calls of each operation in a round; few scans, because they are slow and alike.
CALLS: Final = {
    "match": 64,
    "match_deep": 64,
    "match_branching": 64,
    "match_unknown": 64,
    "client_ping": 64,
    "client_match": 64,
    "client_match_deep": 64,
    "client_match_deep_views": 64,
    "insert": 16,
    "insert_longest": 4,
    "insert_block": 64,
    "rebuild_block": 64,
    "linear_scan": 1,
}
# median and 95th percentile, in microseconds
BARS_US: Final = {
    "match": (100, 250),
    "match_deep": (100, 250),
    "match_branching": (300, None),
    "client_match": (400, None),
    "client_match_deep": (400, None),
    "insert": (300, None),
}
TOKEN_BYTES_MAX, NODE_BYTES_MAX = 0.5, 400
_SEED: Final = 1
_TRACED_BLOCKS: Final = 200_000
_SCAN_TOKENS: Final = 256
_SPARE_BLOCKS: Final = 1 << 17
"""Blocks that the rounds insert."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: microseconds of `op` with this number of cached sequences."""

    op: str
    sequences: int
    median_us: float
    p95_us: float


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of an index, without text and payloads.

    Args:
        nodes: blocks.
        tokens: tokens of these blocks, each counted once.
        size_bytes: bytes allocated for the blocks.
    """

    nodes: int
    tokens: int
    size_bytes: int

    @property
    def allowed_bytes(self) -> float:
        return TOKEN_BYTES_MAX * self.tokens + NODE_BYTES_MAX * self.nodes

    def __str__(self) -> str:
        each = f"{self.size_bytes / self.nodes:.0f} a node, {self.size_bytes / self.tokens:.2f} a token"
        return f"{self.size_bytes / 1e6:,.1f} MB for {self.nodes:,} nodes of {self.tokens:,} tokens: bytes {each}"


def build(forest: Forest, rows: IndexedRows) -> tuple[int, int]:
    """Adds all sequences. Returns (blocks, tokens)."""
    blocks = tokens = 0
    for number in range(len(forest)):
        for key, record, at in forest.blocks(number):
            rows.add(key, record, at)
            blocks += 1
            tokens += record.count
    return blocks, tokens


def traced(forest: Forest) -> Memory:
    """The memory that an index of the first sequences allocates, besides the store's rows."""
    every = (block for number in range(len(forest)) for block in forest.blocks(number))
    blocks = list(islice(every, _TRACED_BLOCKS))
    rows = IndexedRows(forest.memory, len(blocks), _SEED)
    for key, _, _ in blocks:
        rows.row_of(key)
    gc.collect()
    tracemalloc.start()
    for block in blocks:
        rows.add(*block)
    gc.collect()
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == len(blocks)
    return Memory(len(blocks), sum(record.count for _, record, _ in blocks), size_bytes)


def scan(forest: Forest, query: Query) -> int:
    """The longest common prefix with any sequence: compares each in turn up to the first difference."""
    record, folded = query
    best = 0
    for start, end in zip(forest.starts.tolist(), forest.ends.tolist(), strict=True):
        length = min(end - start, record.count - 1)
        at, step = 0, _SCAN_TOKENS
        while at < length:
            step = min(step, length - at)
            other = forest.text[start + at : start + at + step] != folded[at : at + step]
            first = int(other.argmax())
            if other[first]:
                at += first
                break
            at += step
            step *= 4
        best = max(best, at)
    return uncut(best, record.media)


class Bench:
    """One run: the index, the queries, and the samples."""

    def __init__(self, forest: Forest, index: IndexedRows, served: Served | None) -> None:
        self.samples_ns: dict[str, list[int]] = defaultdict(list)
        self._forest = forest
        self._index = index
        self._served = served
        self._chance = random.Random(0)

    def round(self) -> None:
        """Runs every operation, in random order."""
        known: list[tuple[Query, int]] = []
        ops = [op for op in CALLS if self._served is not None or not op.startswith("client_")]
        self._chance.shuffle(ops)
        for op in ops:
            if op.startswith("match"):
                known += self._match(op)[: CALLS["linear_scan"]]
            elif op.startswith("client_"):
                self._client(op)
            elif op != "linear_scan":
                getattr(self, f"_{op}")()
        for query, offset in known:
            began = time.perf_counter_ns()
            found = scan(self._forest, query)
            self.samples_ns["linear_scan"].append(time.perf_counter_ns() - began)
            if found != offset:
                raise RuntimeError(f"the index says that {offset} tokens are cached, the scan {found}")

    def rows(self) -> list[Row]:
        """The medians and 95th percentiles over all rounds."""
        counts = {"client": 0 if self._served is None else self._served.sequences}
        return [row(op, counts.get(op.split("_")[0], len(self._forest)), self.samples_ns[op]) for op in self.samples_ns]

    def _queries(self, op: str, forest: Forest) -> list[Query]:
        drawn: dict[str, Callable[[], Query]] = {
            "match": forest.going_on,
            "match_deep": forest.deep,
            "match_branching": forest.branching,
            "match_unknown": forest.unknown,
        }
        return [drawn[op]() for _ in range(CALLS[op])]

    def _match(self, op: str) -> list[tuple[Query, int]]:
        queries = self._queries(op, self._forest)
        match, samples, answers = self._index.match, self.samples_ns[op], []
        for record, folded in queries:
            began = time.perf_counter_ns()
            found = match(TAG, record, folded)
            samples.append(time.perf_counter_ns() - began)
            answers.append(found.offset)
        return list(zip(queries, answers, strict=True))

    def _client(self, op: str) -> None:
        assert self._served is not None
        if op == "client_ping":
            self.samples_ns[op] += [self._served.ping_ns() for _ in range(CALLS[op])]
            return
        views = op.endswith("_views")
        for query in self._queries(op.removeprefix("client_").removesuffix("_views"), self._served.forest):
            self.samples_ns[op].append(self._served.match_ns(query, views=views))

    def _insert(self) -> None:
        """Inserts sequences of the usual lengths with all their new blocks; each branches off a cached one."""
        chance = self._chance
        lengths = [int(SHORTEST * (LONGEST / SHORTEST) ** chance.random()) for _ in range(CALLS["insert"])]
        self._add("insert", [self._new(length) for length in lengths])

    def _insert_longest(self) -> None:
        self._add("insert_longest", [self._new(LONGEST) for _ in range(CALLS["insert_longest"])])

    def _insert_block(self) -> None:
        blocks = self._new(LONGEST) + self._new(LONGEST)
        self._add("insert_block", [[block] for block in blocks[: CALLS["insert_block"]]])

    def _new(self, length: int) -> list[tuple[bytes, PrefixRecord, int]]:
        return self._forest.more(self._chance.randrange(len(self._forest)), length)

    def _add(self, op: str, groups: Sequence[list[tuple[bytes, PrefixRecord, int]]]) -> None:
        add = self._index.add
        for group in groups:
            began = time.perf_counter_ns()
            for key, record, at in group:
                add(key, record, at)
            self.samples_ns[op].append(time.perf_counter_ns() - began)

    def _rebuild_block(self) -> None:
        """The cost of one block after a restart: reads its record's header and adds the block."""
        fresh = IndexedRows(self._forest.memory, 2 * CALLS["rebuild_block"] + LONGEST, _SEED)
        packed = []
        for number in range(len(self._forest)):
            for key, record, at in self._forest.blocks(number):
                text = self._forest.text[at // 4 : at // 4 + record.count]
                packed.append((key, record.pack(text), at))
            if len(packed) >= CALLS["rebuild_block"]:
                break
        for key, one, at in packed:
            began = time.perf_counter_ns()
            fresh.add(key, PrefixRecord.unpack(one.data), at)
            self.samples_ns["rebuild_block"].append(time.perf_counter_ns() - began)


def row(op: str, sequences: int, samples_ns: Sequence[float]) -> Row:
    middle, high = np.percentile(samples_ns, [50, 95]) / 1e3
    return Row(op, sequences, round(float(middle), 2), round(float(high), 2))


def figures(rows: Sequence[Row], memory: Memory) -> list[Figure]:
    """Each figure with its bar, and the ratio of the scan to a match."""
    by = {each.op: each for each in rows}
    found = []
    for op, (median_us, p95_us) in BARS_US.items():
        measured = by.get(op)
        found.append(Figure(f"{op}, median", measured.median_us if measured else None, median_us, "µs"))
        if p95_us is not None:
            found.append(Figure(f"{op}, 95th percentile", measured.p95_us if measured else None, p95_us, "µs"))
    name = f"index memory, of {TOKEN_BYTES_MAX:g} bytes a token and {NODE_BYTES_MAX} a node"
    found.append(Figure(name, memory.size_bytes / memory.allowed_bytes, 1, "×"))
    return found


def rows_table(rows: Sequence[Row]) -> str:
    scanned = next((each.median_us for each in rows if each.op == "linear_scan"), None)
    lines = []
    for each in rows:
        share = f"{each.median_us / scanned:.2g} ×" if scanned else ""
        lines.append([each.op, f"{each.sequences:,}", f"{each.median_us:,.1f}", f"{each.p95_us:,.1f}", share])
    return table(["operation", "sequences", "median µs", "p95 µs", "of a scan"], lines)


def resident_bytes() -> int:
    """The resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(
    sequences: int, client_sequences: int, rounds: int, block_tokens: int, told: Callable[[str], None]
) -> tuple[list[Row], Memory]:
    """The whole run. Rows come in the order of CALLS; the rows of the restart come last."""
    gc.set_threshold(10_000, 20, 1000)  # the daemon's thresholds
    with ExitStack() as stack:
        served = None
        if client_sequences:
            told(f"filling a daemon with {client_sequences:,} sequences")
            served = stack.enter_context(Served(Forest(client_sequences, block_tokens, seed=2)))
            told(f"stored {served.blocks:,} blocks in {served.filled_s:.1f} s")
        told(f"drawing {sequences:,} sequences")
        forest = Forest(sequences, block_tokens)
        memory = traced(forest)
        told(f"index: {memory}")
        before_bytes, began = resident_bytes(), time.perf_counter()
        index = IndexedRows(forest.memory, forest.block_count + _SPARE_BLOCKS, _SEED)
        blocks, tokens = build(forest, index)
        took_s = time.perf_counter() - began
        grown_mb = (resident_bytes() - before_bytes) / 1e6
        told(
            f"{forest.tokens / 1e6:,.0f} M tokens, {tokens / 1e6:,.0f} M of them unique, in {blocks:,} blocks\n"
            f"added in {took_s:.1f} s, {took_s / blocks * 1e6:.1f} µs each; the process grew by {grown_mb:,.0f} MB"
        )
        bench = Bench(forest, index, served)
        for number in range(rounds):
            told(f"round {number + 1} of {rounds}")
            bench.round()
        rows = sorted(bench.rows(), key=lambda each: list(CALLS).index(each.op))
        if served is not None:
            told("killing the daemon, and starting another")
            again = served.restart()
            told(f"{again}")
            rows.append(row("rebuild_first_match", served.sequences, [again.first_match_s * 1e9]))
            rows.append(row("rebuild_whole", served.sequences, [again.whole_s * 1e9]))
    return rows, memory


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures the longest cached prefix beside a linear scan.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there")
    parser.add_argument("--sequences", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument("--client-sequences", type=int, default=2000, help="in a real daemon; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--block-tokens", type=int, default=256, help="default: %(default)s")
    given = parser.parse_args(argv)

    def told(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    rows, memory = run(given.sequences, given.client_sequences, given.rounds, given.block_tokens, told)
    if given.json:
        given.json.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, numpy {np.__version__}")
    print(f"Python {platform.python_version()}; queries of {LONGEST:,} tokens; {given.rounds} rounds\n")
    print(f"{rows_table(rows)}\n\nindex: {memory}\n")
    print(bars.figures_table(figures(rows, memory)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
