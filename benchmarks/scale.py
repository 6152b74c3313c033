"""The figures with many entries and clients: hits, status meanwhile, the event loop, and the start.

Owns: these figures, each with its bar. Measures only tensord; a ratio is to tensord's own figure. Under load the daemon
has the priority of the installed service.
"""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from peers.bars import Figure
from peers.tensord_peer import WAIT_S, Daemon, serving
from peers.worker import key_of

import tensord

MIB: Final = 1 << 20
ENTRY_BYTES: Final = 4096
FEW, MANY, CLIENTS = 2048, 100_000, 16
RING_BYTES: Final = 1 << 30
START_RING_BYTES: Final = 4 << 30
_BURST: Final = 256


def figures(quick: bool, told: Callable[[str], None]) -> list[Figure]:
    """All figures. `quick` takes few samples, with fewer entries."""
    return [*_crowded(quick, told), _event_loop(quick, told), _start(told)]


def _fill(socket: Path, entries: int) -> None:
    value = np.arange(ENTRY_BYTES // 8, dtype=np.uint64)
    with tensord.Client(socket, timeout_s=WAIT_S, required=True) as client:
        for start in range(0, entries, _BURST):
            numbers = range(start, min(start + _BURST, entries))
            puts = [client.put(key_of("crowd", ENTRY_BYTES, n), value) for n in numbers]
            for put in puts:
                if put.wait(WAIT_S).state != "stored":
                    raise RuntimeError(f"a put was {put.state}: {put.error}")


def _hits_us(socket: Path, entries: int, calls: int, seed: int, together: Any, answers: Any) -> None:
    """One client: the median of `calls` hits on random keys, in microseconds."""
    chance = random.Random(seed)
    keys = [key_of("crowd", ENTRY_BYTES, chance.randrange(entries)) for _ in range(calls)]
    samples = []
    with tensord.Client(socket, timeout_s=WAIT_S, required=True) as client:
        together.wait()
        for key in keys:
            before = time.perf_counter_ns()
            _ = client.get(key).tree  # type: ignore[union-attr]
            samples.append(time.perf_counter_ns() - before)
        together.wait()  # no client ends its turn while others still measure
    answers.put(median(samples) / 1e3)


def _clients_us(socket: Path, entries: int, clients: int, calls: int, meanwhile: Callable[[], None]) -> float:
    """The median over `clients` concurrent processes of each one's median hit."""
    spawn = multiprocessing.get_context("spawn")
    together, answers = spawn.Barrier(clients + 1), spawn.Queue()
    processes = [
        spawn.Process(target=_hits_us, args=(socket, entries, calls, seed, together, answers))
        for seed in range(clients)
    ]
    for process in processes:
        process.start()
    together.wait()
    meanwhile()
    together.wait()
    found: float = median(answers.get() for _ in processes)
    for process in processes:
        process.join()
    return found


def _crowded(quick: bool, told: Callable[[str], None]) -> list[Figure]:
    many, calls, rounds = (2_000, 500, 1) if quick else (MANY, 20_000, 3)
    status_s: list[float] = []
    few_us, many_us = [], []
    with serving(RING_BYTES) as quiet, serving(RING_BYTES, "--max-entries", str(2 * MANY)) as busy:
        busy.as_service()
        told(f"filling {many} entries")
        _fill(quiet.socket, FEW)
        _fill(busy.socket, many)
        client = tensord.Client(busy.socket, timeout_s=WAIT_S)

        def ask_status() -> None:
            for _ in range(10):
                before = time.perf_counter()
                client.status()
                status_s.append(time.perf_counter() - before)

        for number in range(rounds):
            told(f"{CLIENTS} clients: round {number + 1} of {rounds}")
            few_us.append(_clients_us(quiet.socket, FEW, 1, calls, lambda: None))
            many_us.append(_clients_us(busy.socket, many, CLIENTS, calls, ask_status))
        client.close()
    return [
        Figure(
            f"hit: {many:,} entries, {CLIENTS} clients, random keys, against {FEW:,} and one",
            median(many_us) / median(few_us),
            1.3,
            "×",
        ),
        Figure("status meanwhile, slowest answer", max(status_s) * 1e3, 30, "ms"),
    ]


def _event_loop(quick: bool, told: Callable[[str], None]) -> Figure:
    """The time that the daemon's loop takes to answer during 16 MiB puts, which shows what blocks the loop.

    It is the 99th percentile of a request that needs only the loop, less the median on an idle daemon. It includes the
    delay that a busy machine adds to a round trip, so it is an upper bound for the loop.
    """
    told("the event loop under 16 MiB puts")
    value = np.ones(2 * MIB, np.uint64)
    puts = 20 if quick else 100
    with serving(RING_BYTES) as daemon, tensord.Client(daemon.socket, timeout_s=WAIT_S) as pinger:
        daemon.as_service()
        nobody = bytes(32)

        def ping_s() -> float:
            before = time.perf_counter()
            pinger.touch(nobody)
            return time.perf_counter() - before

        idle_s = median(ping_s() for _ in range(200))
        done = threading.Event()

        def put_all() -> None:
            with tensord.Client(daemon.socket, timeout_s=WAIT_S) as writer:
                for number in range(puts):
                    writer.put(key_of("loop", value.nbytes, number), value, wait=True)
            done.set()

        thread = threading.Thread(target=put_all)
        thread.start()
        pings_s = []
        while not done.wait(0.001):
            pings_s.append(ping_s() - idle_s)
        thread.join()
    slow_s = float(np.percentile(pings_s, 99))
    return Figure("event loop under 16 MB puts, a round trip's p99 over idle", slow_s * 1e3, 5, "ms")


def _start(told: Callable[[str], None]) -> Figure:
    """The time from the start of the program to the first value stored and read, with a 4 GiB ring."""
    told("a daemon's start with 4 GiB")
    name = "start of a daemon with a 4 GiB ring, to its first put and get"
    with tempfile.TemporaryDirectory(prefix="tensord-bench-") as folder:
        began = time.perf_counter()
        daemon = Daemon(Path(folder), START_RING_BYTES)
        try:
            daemon.wait_serving()
            with tensord.Client(daemon.socket, timeout_s=WAIT_S, required=True) as client:
                key = key_of("start", MIB, 0)
                client.put(key, np.ones(MIB // 8, np.uint64), wait=True)
                took_s = time.perf_counter() - began if client.contains(key) else None
        finally:
            daemon.stop()
    return Figure(name, took_s, 1, "s")
