"""Measures the longest-prefix match of 32k-token queries among 100,000 sequences, beside a linear scan, in one run.

    python benchmarks/prefix.py [--json PATH] [--sequences N] [--client-sequences N] [--rounds N]

Owns: the timed operations, and the bars. Does not own: the sequences (forest.py).

The index is timed call by call, as the daemon's loop makes the calls. Its text lies in one array, as in the ring. Every
round draws new queries, so that no query finds its text in a cache of the processor. Each scan is compared with the
index's answer to the same query. With 100,000 sequences the run takes 8 GiB and some minutes.

`client_ping` is a request that needs no work of the daemon. A client's match costs the difference to it. Payloads are
tiny, so that a moderate ring holds many sequences: a match moves no payload.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from forest import LONGEST, SHORTEST, TAG, Block, Forest, Query
from peers import bars
from peers.bars import Figure
from peers.harness import table
from peers.tensord_peer import WAIT_S, serving

import tensord
from tensord.daemon.prefix.index import PrefixIndex
from tensord.daemon.store.families import Families
from tensord.daemon.store.table import LIVE, RowTable
from tensord.shm.payloads.prefix import PrefixRecord

# Calls of each operation in a round; few scans, because they are slow and alike.
CALLS: Final = {
    "match": 64,
    "match_deep": 64,
    "match_branching": 64,
    "client_ping": 64,
    "client_match": 64,
    "insert": 16,
    "linear_scan": 3,
}
# median and 95th percentile, in microseconds
BARS_US: Final = {
    "match": (100, 250),
    "match_deep": (100, 250),
    "match_branching": (300, None),
    "client_match": (400, None),
    "insert": (300, None),
}
NODE_BYTES_MAX: Final = 520
"""A node's share of the index, at most: 0.5 bytes for each of its tokens, and 400."""
_SEED: Final = 1
_TRACED_BLOCKS: Final = 200_000
_SCAN_TOKENS: Final = 256
_SPARE_BLOCKS: Final = 1 << 17
"""Blocks that the rounds insert."""
_RING_BYTES: Final = 512 << 20
_ENTRIES: Final = 200_000


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: microseconds of `op` with this number of cached sequences."""

    op: str
    sequences: int
    median_us: float
    p95_us: float


class IndexedRows:
    """An index with room for `most` blocks over rows of its own, which have no entries."""

    def __init__(self, forest: Forest, most: int) -> None:
        self._table = RowTable((most + 1).bit_length(), 1)
        self._families = Families(self._table)
        self._rows: dict[bytes, int] = {}
        self._index = PrefixIndex(self._table, forest.memory, _SEED)
        self.match = self._index.match

    def __len__(self) -> int:
        return len(self._index)

    def row_of(self, key: bytes) -> int:
        """The row of a block, also of one that is added later."""
        return self._rows.setdefault(key, len(self._rows) + 1)

    def add(self, *blocks: Block) -> None:
        for block in blocks:
            self._add(*block)

    def _add(self, key: bytes, record: PrefixRecord, text_at: int) -> None:
        row = self.row_of(key)
        above = 0 if record.parent is None else self._rows[record.parent]
        self._table.states[row], self._table.records[row] = LIVE, record.record_bytes
        self._index.add(row, TAG, above, record, text_at - record.text_at)
        if above:
            self._families.link(row, above)


def every_block(forest: Forest) -> Iterator[Block]:
    return (block for number in range(len(forest)) for block in forest.blocks(number))


def bytes_a_node(forest: Forest) -> float:
    """What the index allocates for a block of the first sequences, besides the store's row of it."""
    blocks = list(islice(every_block(forest), _TRACED_BLOCKS))
    rows = IndexedRows(forest, len(blocks))
    for key, _, _ in blocks:
        rows.row_of(key)
    gc.collect()
    tracemalloc.start()
    for block in blocks:
        rows.add(block)
    gc.collect()
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size_bytes / len(blocks)


def scan(forest: Forest, query: Query) -> int:
    """The longest common prefix with any sequence: compares each in turn up to the first difference."""
    record, tokens = query
    best = 0
    for start, end in zip(forest.starts.tolist(), forest.ends.tolist(), strict=True):
        length = min(end - start, record.count - 1)
        at, step = 0, _SCAN_TOKENS
        while at < length:
            step = min(step, length - at)
            other = forest.text[start + at : start + at + step] != tokens[at : at + step]
            first = int(other.argmax())
            if other[first]:
                at += first
                break
            at += step
            step *= 4
        best = max(best, at)
    return best


@contextmanager
def served(forest: Forest) -> Iterator[tuple[tensord.Client, tensord.PrefixCache]]:
    """A private daemon with all sequences of a forest, and a client."""
    namespace = tensord.Namespace(model="bench", revision="1", dtype="uint8", processor="none")
    with (
        serving(_RING_BYTES if len(forest) > 100 else 32 << 20, "--max-entries", str(_ENTRIES)) as daemon,
        tensord.Client(daemon.socket, name="bench-prefix", timeout_s=WAIT_S, required=True) as client,
    ):
        cache = tensord.PrefixCache(client, namespace, block_tokens=forest.block_tokens)
        for number in range(len(forest)):
            tokens = forest.sequence(number)
            put = cache.put(tokens, [tensord.NormalLayer(np.zeros((len(tokens), 1), np.uint8))]).wait(WAIT_S)
            if put.error is not None:
                raise RuntimeError(f"sequence {number} was {put.state}: {put.error}")
        yield client, cache


class Bench:
    """One run: the index, the queries, and the samples."""

    def __init__(self, forest: Forest, index: IndexedRows) -> None:
        self.samples_ns: dict[str, list[int]] = defaultdict(list)
        self._forest = forest
        self._index = index
        self._chance = random.Random(0)

    def timed(self, op: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter_ns()
        found = call()
        self.samples_ns[op].append(time.perf_counter_ns() - began)
        return found

    def client_round(self, forest: Forest, client: tensord.Client, cache: tensord.PrefixCache) -> None:
        """Whole calls of a client of a daemon that has this forest."""

        def match(tokens: Any) -> None:
            with cache.match(tokens) or ExitStack():
                pass

        for _ in range(CALLS["client_ping"]):
            self.timed("client_ping", lambda: client.touch(bytes(32)))
        for _ in range(CALLS["client_match"]):
            _, tokens = forest.going_on()
            self.timed("client_match", lambda tokens=tokens: match(tokens))  # type: ignore[misc]

    def round(self) -> None:
        """Runs every operation of the index, in random order."""
        drawn = {
            "match": self._forest.going_on,
            "match_deep": self._forest.deep,
            "match_branching": self._forest.branching,
        }
        ops = [*drawn, "insert"]
        self._chance.shuffle(ops)
        for op in ops:
            if op == "insert":
                self._insert()
                continue
            queries = [drawn[op]() for _ in range(CALLS[op])]
            offsets = [self.timed(op, lambda query=query: self._index.match(TAG, *query)).offset for query in queries]  # type: ignore[misc]
            query, offset = queries[0], offsets[0]
            found = self.timed("linear_scan", lambda query=query: scan(self._forest, query))  # type: ignore[misc]
            if found != offset:
                raise RuntimeError(f"the index says that {offset} tokens are cached, the scan {found}")

    def _insert(self) -> None:
        """Inserts sequences of the usual lengths with all their new blocks; each branches off a cached one."""
        chance = self._chance
        for _ in range(CALLS["insert"]):
            length = int(SHORTEST * (LONGEST / SHORTEST) ** chance.random())
            blocks = self._forest.more(chance.randrange(len(self._forest)), length)
            self.timed("insert", lambda blocks=blocks: self._index.add(*blocks))  # type: ignore[misc]


def figures(rows: Sequence[Row], node_bytes: float) -> list[Figure]:
    """Each figure with its bar."""
    by = {each.op: each for each in rows}
    found = []
    for op, (median_us, p95_us) in BARS_US.items():
        measured = by.get(op)
        found.append(Figure(f"{op}, median", measured.median_us if measured else None, median_us, "µs"))
        if p95_us is not None:
            found.append(Figure(f"{op}, 95th percentile", measured.p95_us if measured else None, p95_us, "µs"))
    return [*found, Figure("index memory, a node", node_bytes, NODE_BYTES_MAX, "bytes")]


def rows_table(rows: Sequence[Row]) -> str:
    scanned = next(each.median_us for each in rows if each.op == "linear_scan")
    lines = [
        [
            each.op,
            f"{each.sequences:,}",
            f"{each.median_us:,.1f}",
            f"{each.p95_us:,.1f}",
            f"{each.median_us / scanned:.2g} ×",
        ]
        for each in rows
    ]
    return table(["operation", "sequences", "median µs", "p95 µs", "of a scan"], lines)


def run(sequences: int, client_sequences: int, rounds: int, told: Callable[[str], None]) -> tuple[list[Row], float]:
    """The whole run: the rows, in the order of CALLS, and the bytes of a node."""
    gc.set_threshold(10_000, 20, 1000)  # the daemon's thresholds
    told(f"drawing {sequences:,} sequences")
    forest = Forest(sequences)
    node_bytes = bytes_a_node(forest)
    index = IndexedRows(forest, forest.block_count + _SPARE_BLOCKS)
    for block in every_block(forest):
        index.add(block)
    told(f"{forest.tokens / 1e6:,.0f} M tokens, in {len(index):,} blocks")
    bench = Bench(forest, index)
    for number in range(rounds):
        told(f"round {number + 1} of {rounds}")
        bench.round()
    if client_sequences:
        told(f"filling a daemon with {client_sequences:,} sequences")
        few = Forest(client_sequences, seed=2)
        with served(few) as (client, cache):
            for _ in range(rounds):
                bench.client_round(few, client, cache)
    rows = []
    for op in CALLS:
        if samples_ns := bench.samples_ns[op]:
            middle, high = np.percentile(samples_ns, [50, 95]) / 1e3
            many = client_sequences if op.startswith("client") else sequences
            rows.append(Row(op, many, round(float(middle), 2), round(float(high), 2)))
    return rows, node_bytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures the longest cached prefix beside a linear scan.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there")
    parser.add_argument("--sequences", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument("--client-sequences", type=int, default=2000, help="in a real daemon; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="default: %(default)s")
    given = parser.parse_args(argv)
    rows, node_bytes = run(
        given.sequences, given.client_sequences, given.rounds, lambda text: print(text, file=sys.stderr, flush=True)
    )
    if given.json:
        given.json.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, numpy {np.__version__}")
    print(f"Python {platform.python_version()}; queries of {LONGEST:,} tokens; {given.rounds} rounds\n")
    print(f"{rows_table(rows)}\n")
    print(bars.figures_table(figures(rows, node_bytes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
