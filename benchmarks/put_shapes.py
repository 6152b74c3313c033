"""Puts of other payloads than one array, and of several processes at once, beside np.copyto of their leaves.

    python benchmarks/put_shapes.py [--seconds S]

Puts are back to back, into a full ring, in bursts of up to BURST until all are stored; a copy follows each burst, so
that both meet the same machine. Owns: the payloads and the table. Does not own: the daemon (peers/tensord_peer.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import random
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from peers.bars import Figure
from peers.harness import table
from peers.tensord_peer import WAIT_S, serving
from peers.worker import key_of

import tensord

Array = np.ndarray[Any, Any]
Payload = tuple[Any, list[Array]]
"""A tree, and its leaves as np.copyto takes them."""

RING_BYTES: Final = 1 << 30
SOURCE_BYTES: Final = 64 << 20
COPY_BYTES: Final = 256 << 20
BURST: Final = 64
READ_KEYS: Final = 256
KINDS: Final = ("64 KB", "40 × 6.4 KB", "64 KB of bfloat16", "1 MB")
BESIDE: Final = {"alone": (1, 0), "two writers": (2, 0), "four readers": (1, 4)}
"""By the name of a column: how many write, and how many read."""


def _made(kind: str, seed: int) -> Payload:
    random_ = np.random.default_rng(seed)
    if kind == "40 × 6.4 KB":
        leaves = {f"layer{number}": random_.random((16, 100), np.float32) for number in range(40)}
        return leaves, [*leaves.values()]
    made = random_.integers(0, 255, 1 << 20 if kind == "1 MB" else 1 << 16, np.uint8)
    if kind == "64 KB of bfloat16":
        import torch

        return torch.from_numpy(made).view(torch.bfloat16), [made]
    return made, [made]


def _write(socket: Path, kind: str, seconds: float, seed: int, together: Any, answers: Any) -> None:
    """A writer: sends the medians of a put and of its copy, in microseconds."""
    sources = [_made(kind, number) for number in range(8)]
    payload_bytes = sum(leaf.nbytes for leaf in sources[0][1])
    sources += [_made(kind, number) for number in range(8, max(9, SOURCE_BYTES // payload_bytes))]
    memory, at = np.ones(COPY_BYTES, np.uint8), 0
    puts_us, copies_us, number = [], [], 0
    with tensord.Client(socket, timeout_s=WAIT_S, required=True) as client:

        def burst() -> None:
            nonlocal number
            sent = []
            for tree, _ in (sources[(number + more) % len(sources)] for more in range(BURST)):
                number += 1
                sent.append(client.put(key_of(f"shape{seed}", payload_bytes, number), tree))
            for put in sent:
                if put.wait(WAIT_S).state != "stored":
                    raise RuntimeError(f"a put was {put.state}: {put.error}")

        while number * payload_bytes < RING_BYTES:
            burst()
        together.wait()
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            began = time.perf_counter()
            burst()
            puts_us.append((time.perf_counter() - began) / BURST * 1e6)
            copies = []
            for _, leaves in (sources[(number + more) % len(sources)] for more in range(BURST)):
                for leaf in leaves:
                    at = at if at + leaf.nbytes <= COPY_BYTES else 0
                    copies.append((np.ndarray(leaf.shape, leaf.dtype, memory, at), leaf))
                    at += leaf.nbytes + 63 & -64
            began = time.perf_counter()
            for to, leaf in copies:
                np.copyto(to, leaf)
            copies_us.append((time.perf_counter() - began) / BURST * 1e6)
        together.wait()
    answers.put((median(puts_us), median(copies_us)))


def _read(socket: Path, seed: int, together: Any, done: Any) -> None:
    """A reader: gets entries that writers do not put, as fast as it can."""
    chance = random.Random(seed)
    with tensord.Client(socket, timeout_s=WAIT_S, required=True) as client:
        together.wait()
        while not done.is_set():
            for _ in range(100):
                client.get(key_of("read", 0, chance.randrange(READ_KEYS)))
        together.wait()


def measured(kind: str, writers: int, readers: int, seconds: float) -> tuple[float, float]:
    """The medians of a put of `kind` and of a copy of its leaves, in microseconds, over all writers."""
    spawn = multiprocessing.get_context("spawn")
    together, answers, done = spawn.Barrier(writers + readers + 1), spawn.Queue(), spawn.Event()
    with serving(RING_BYTES) as daemon, ExitStack() as stack:
        with tensord.Client(daemon.socket, timeout_s=WAIT_S, required=True) as client:
            for number in range(READ_KEYS):
                client.put(key_of("read", 0, number), np.full(8192, number, np.uint64), wait=True)
        started = [
            spawn.Process(target=_write, args=(daemon.socket, kind, seconds, seed, together, answers))
            for seed in range(writers)
        ]
        started += [spawn.Process(target=_read, args=(daemon.socket, seed, together, done)) for seed in range(readers)]
        for process in started:
            process.start()
            stack.callback(process.join)
        together.wait()
        time.sleep(seconds)
        done.set()
        together.wait()
        found = [answers.get() for _ in range(writers)]
    puts_us, copies_us = zip(*found, strict=True)
    return median(puts_us), median(copies_us)


def rows(seconds: float, kinds: tuple[str, ...] = KINDS) -> dict[str, dict[str, tuple[float, float]]]:
    """By kind and column: the medians of a put and of a copy. Without torch, no kind that needs it."""
    kinds = tuple(kind for kind in kinds if "bfloat16" not in kind or importlib.util.find_spec("torch"))
    return {kind: {name: measured(kind, *who, seconds) for name, who in BESIDE.items()} for kind in kinds}


def shown(found: dict[str, dict[str, tuple[float, float]]]) -> str:
    """A table: a put in µs, and how many times the copy of its leaves in the same process that is."""
    lines = [
        [kind, *(f"{put:.0f} ({put / copy:.1f} ×)" for put, copy in columns.values())]
        for kind, columns in found.items()
    ]
    return table(["put back to back, µs (× np.copyto)", *BESIDE], lines)


def figures(found: dict[str, dict[str, tuple[float, float]]]) -> list[Figure]:
    """The figure with a bar."""
    put, copy = found["40 × 6.4 KB"]["alone"]
    return [Figure("put of 40 arrays of 6.4 KB, sustained, against np.copyto of them", put / copy, 4, "×")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures puts of other payloads, and of several processes at once.")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each payload and column; default: %(default)s")
    print(shown(rows(parser.parse_args().seconds)))


if __name__ == "__main__":
    main()
