"""Measures a put on the client's side alone, beside np.copyto of its leaves, and counts its calls.

    python benchmarks/put_cost.py [--seconds S] [--quantile Q]

Owns: the command. Does not own: the daemon's side, a stand-in that works between the puts and outside of their times
(tests/writing_bench.py). The ring is full, and each put writes where an evicted one was.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tensord.shm.packing import pack, write
from tests.memory_bench import key
from tests.writing_bench import WritingBench

RING_BYTES = 256 << 20
SOURCES = 8
BATCH = 64


def trees(random: np.random.Generator) -> dict[str, Callable[[], tuple[Any, list[np.ndarray[Any, Any]]]]]:
    """By name: what makes a tree, and its leaves as np.copyto takes them."""

    def array(size: int) -> tuple[Any, list[np.ndarray[Any, Any]]]:
        made = random.integers(0, 255, size, np.uint8)
        return made, [made]

    def many() -> tuple[Any, list[np.ndarray[Any, Any]]]:
        leaves = {f"layer{i}": random.random((16, 100), np.float32) for i in range(40)}
        return leaves, list(leaves.values())

    def tensor() -> tuple[Any, list[np.ndarray[Any, Any]]]:
        import torch

        made = torch.from_numpy(random.integers(0, 255, 65536, np.uint8)).view(torch.bfloat16).view(256, 128)
        return made, [made.view(torch.int16).numpy()]

    return {
        "64 KB": lambda: array(65536),
        "40 x 6.4 KB": many,
        "64 KB of bfloat16, torch": tensor,
        "1 MB": lambda: array(1 << 20),
        "16 MB": lambda: array(16 << 20),
    }


def calls(do: Callable[[], object]) -> int:
    """Python and C calls of `do`."""
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event.endswith("call")

    sys.setprofile(profile)
    try:
        do()
    finally:
        sys.setprofile(None)
    return count - 1


def measured(
    make: Callable[[], tuple[Any, list[np.ndarray[Any, Any]]]], seconds: float, quantile: float
) -> dict[str, float]:
    """Times in µs, and calls, of one kind of tree."""
    made = [make() for _ in range(SOURCES)]
    memory = np.ones(RING_BYTES, np.uint8)
    times: dict[str, list[int]] = {"put": [], "copyto": [], "pack": [], "write": []}
    counted = []
    clock = time.perf_counter_ns
    at = number = 0
    with WritingBench(RING_BYTES, buckets=4096) as bench:
        bench.asleep[0] = 0
        bench.eager = False
        payload_bytes = pack(made[0][0]).payload_bytes
        # As a client that has put for a while: it asks for as many ahead as its share has.
        bench.writer.arena._ahead = max(1, min(BATCH, bench.writer.arena._share_bytes // (payload_bytes + 256)))
        bench.writer.arena._lately.append(-(-payload_bytes // 64) * 64 + 192)
        bench.writer.arena._ask_ahead()
        bench.work()
        end = time.monotonic() + seconds
        batch = min(BATCH // 2, bench.writer.arena._ahead)
        while time.monotonic() < end:
            deadline = time.monotonic() + 10
            names = [key(number + i) for i in range(batch)]
            number += batch
            for i, name in enumerate(names):
                tree = made[i % SOURCES][0]
                start = clock()
                bench.put(name, tree, deadline)
                times["put"].append(clock() - start)
            bench.work()
            for i in range(batch):
                places = []
                for leaf in made[i % SOURCES][1]:
                    at = at if at + leaf.nbytes <= RING_BYTES else 0
                    places.append((np.ndarray(leaf.shape, leaf.dtype, memory, at), leaf))
                    at += (leaf.nbytes + 63) & -64
                start = clock()
                for to, leaf in places:
                    np.copyto(to, leaf)
                times["copyto"].append(clock() - start)
            for i in range(batch):
                tree = made[i % SOURCES][0]
                start = clock()
                packed = pack(tree)
                times["pack"].append(clock() - start)
                at = at if at + payload_bytes <= RING_BYTES else 0
                start = clock()
                write(packed, memory.data, at)
                times["write"].append(clock() - start)
                at += (payload_bytes + 63) & -64
            number += 1
            counted.append(calls(partial(bench.put, key(number), made[0][0], deadline)))
            bench.work()
    # What the first puts meet: pages that were never written.
    warm = {name: sorted(some[len(some) // 4 :]) for name, some in times.items()}
    return {name: some[int(len(some) * quantile)] / 1000 for name, some in warm.items()} | {
        "calls": float(np.median(counted))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures a put on the client's side, beside np.copyto.")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each kind of tree; default: %(default)s")
    parser.add_argument("--quantile", type=float, default=0.5, help="on a busy machine, 0.1; default: the median")
    arguments = parser.parse_args()
    gc.freeze()
    print(f"{'µs':26} {'put':>9} {'copyto':>9} {'more':>8} {'pack':>8} {'write':>9} {'calls':>6}")
    for name, make in trees(np.random.default_rng(1)).items():
        try:
            found = measured(make, arguments.seconds, arguments.quantile)
        except ImportError:
            print(f"{name:26} torch is not installed")
            continue
        more = found["put"] - found["copyto"]
        print(
            f"{name:26} {found['put']:9.1f} {found['copyto']:9.1f} {more:8.1f} {found['pack']:8.1f} "
            f"{found['write']:9.1f} {found['calls']:6.0f}"
        )


if __name__ == "__main__":
    main()
