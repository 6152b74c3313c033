"""Measures the hits and puts of one client while another client floods the daemon, and without a flood.

    python benchmarks/fairness.py [--quick] [--json PATH]

Owns: the floods, each in its own process, and the rounds. A round measures the quiet client without a flood and with
each flood, so a slow minute of the machine affects all of them. A figure is the ratio of the medians over all rounds.

The machine needs two cores for the daemon (loop and copier), one for the quiet client and one for the flood. With fewer
cores the figures show the scheduler. The busy loop shows by how much: it loads a core and leaves the daemon alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from bars import Figure, figures_table, save_figures
from peers.tensord_peer import WAIT_S, serving
from worker import key_of

import tensord

MIB: Final = 1 << 20
RING_BYTES: Final = 256 * MIB
HIT_BYTES: Final = 64 << 10
PUT_BYTES: Final = MIB
LARGE_BYTES: Final = 32 * MIB
HIT_MAX, PUT_MAX = 1.5, 3.0
_THREADS: Final = 1


def _flood_of_puts(client: tensord.Client, number: int, size_bytes: int) -> None:
    key = key_of(f"flood-{threading.get_ident()}", size_bytes, number)
    client.put(key, np.empty(size_bytes, np.uint8))


def _flood_of_requests(client: tensord.Client, number: int) -> None:
    client.touch(*(key_of("flood", 0, 1024 * number + each) for each in range(1024)))


FLOODS: Final[dict[str, Callable[[tensord.Client, int], object]]] = {
    "puts of 1 MiB": lambda client, number: _flood_of_puts(client, number, PUT_BYTES),
    "puts of 32 MiB": lambda client, number: _flood_of_puts(client, number, LARGE_BYTES),
    "requests of 1,024 keys": _flood_of_requests,
    "questions for status": lambda client, _: client.status(),
    "a busy loop, the daemon left alone": lambda _client, number: sum(range(10_000)),
}


def _flood(kind: str, socket: Path, on: Event, ends: Event) -> None:
    """Floods the daemon from several threads while `on` is set; returns when `ends` is set."""

    def work(client: tensord.Client) -> None:
        number = 0
        while not ends.is_set():
            if not on.wait(0.1):
                continue
            number += 1
            try:
                FLOODS[kind](client, number)
            except tensord.TensordError:
                # The daemon refuses a flood that sends too many requests.
                continue

    with tensord.Client(socket, name="flood", timeout_s=WAIT_S, required=True) as client:
        threads = [threading.Thread(target=work, args=(client,)) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _hit_us(client: tensord.Client, keys: list[bytes], calls: int) -> list[float]:
    """The durations of `calls` hits, in microseconds."""
    samples = []
    for call in range(calls):
        before = time.perf_counter_ns()
        lease = client.get(keys[call % len(keys)])
        samples.append((time.perf_counter_ns() - before) / 1e3)
        if lease is None:
            # A flood of the same uid may evict the entry. The put stores it again for the next call.
            client.put(keys[call % len(keys)], np.empty(HIT_BYTES, np.uint8), wait=True)
            samples.pop()
    return samples


def _put_us(client: tensord.Client, value: Any, calls: int) -> list[float]:
    """The durations of `calls` puts until the payload is visible, in microseconds."""
    samples = []
    for _ in range(calls):
        key = os.urandom(32)
        before = time.perf_counter_ns()
        put = client.put(key, value, wait=True)
        samples.append((time.perf_counter_ns() - before) / 1e3)
        if put.state != "stored":
            raise RuntimeError(f"a put was {put.state}: {put.error}")
    return samples


def measured(quick: bool, told: Callable[[str], None]) -> list[Figure]:
    """All figures. `quick` takes few samples."""
    rounds, hits, puts = (1, 200, 10) if quick else (5, 5000, 200)
    spawn = multiprocessing.get_context("spawn")
    value = np.ones(PUT_BYTES, np.uint8)
    hit_us: dict[str, list[float]] = defaultdict(list)
    put_us: dict[str, list[float]] = defaultdict(list)
    with serving(RING_BYTES) as daemon:
        ends = spawn.Event()
        switches = {kind: spawn.Event() for kind in FLOODS}
        processes = [
            spawn.Process(target=_flood, args=(kind, daemon.socket, on, ends)) for kind, on in switches.items()
        ]
        try:
            for process in processes:
                process.start()
            with tensord.Client(daemon.socket, name="quiet", timeout_s=WAIT_S, required=True) as client:
                keys = [key_of("quiet", HIT_BYTES, number) for number in range(64)]
                for key in keys:
                    client.put(key, np.empty(HIT_BYTES, np.uint8), wait=True)
                # The ring is full, so that every put evicts, with and without a flood.
                _put_us(client, value, RING_BYTES // PUT_BYTES)
                for number in range(rounds):
                    for kind in ("", *FLOODS):
                        told(f"round {number + 1} of {rounds}: {kind or 'no flood'}")
                        if kind:
                            switches[kind].set()
                            time.sleep(0.2)
                        hit_us[kind] += _hit_us(client, keys, hits)
                        put_us[kind] += _put_us(client, value, puts)
                        if kind:
                            switches[kind].clear()
                            time.sleep(0.5)
        finally:
            ends.set()
            for process in processes:
                if process.pid is not None:
                    process.join()
    figures = []
    for kind in FLOODS:
        figures.append(Figure(f"hit under {kind}", median(hit_us[kind]) / median(hit_us[""]), HIT_MAX, "×"))
        figures.append(Figure(f"put under {kind}", median(put_us[kind]) / median(put_us[""]), PUT_MAX, "×"))
    return figures


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round; its figures mean little")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    figures = measured(given.quick, lambda what: print(what, flush=True))
    print(figures_table(figures))
    if given.json is not None:
        save_figures(given.json, figures)


if __name__ == "__main__":
    main()
