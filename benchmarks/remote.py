"""Measures what a remote store costs and gains: Redis on loopback behind one daemon, and a daemon without a store.

    python benchmarks/remote.py [--quick] [--json PATH]

Owns: the daemons and the rounds. A round measures every figure once with the store and once without, so a
slow minute of the machine affects both. A figure is the ratio of the medians over all rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import redis
from peers.bars import Figure, figures_table, save_figures
from peers.tensord_peer import WAIT_S, serving

import tensord

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.daemon.remote_stores.servers import RedisServer

MIB: Final = 1 << 20
RING_BYTES: Final = 512 * MIB
HIT_BYTES: Final = 64 << 10
PUT_BYTES: Final = MIB
LARGE_BYTES: Final = 16 * MIB
COST_MS: Final = 10_000.0
READ_MAX, HIT_MAX, PUT_MAX, FAULT_HIT_MAX, MISS_MAX = 1.3, 1.1, 1.2, 1.2, 1.05
SERVER: Final = ("--maxmemory", "2gb", "--maxmemory-policy", "volatile-lru")
NAMESPACE: Final = tensord.Namespace(model="bench", revision="1", dtype="uint8", processor="none")


def _flood(socket_path: Path, ready: Event, on: Event, ends: Event) -> None:
    """Puts entries that are worth writing to the store while `on` is set; returns when `ends` is set. Sets `ready`."""
    value = np.empty(PUT_BYTES, np.uint8)
    with tensord.Client(socket_path, name="flood", timeout_s=WAIT_S, required=True) as client:
        client.put(key_named(b"ready"), value, wait=True)
        ready.set()
        while not ends.is_set():
            if on.wait(0.1):
                client.put(key_named(os.urandom(8)), value, cost_ms=COST_MS)


def key_named(name: bytes) -> bytes:
    return NAMESPACE.key("encoder", "image", name)


def timed_us(call: Callable[[], Any]) -> float:
    before = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - before) / 1e3


def _hits_us(client: tensord.Client, keys: list[bytes], calls: int) -> list[float]:
    samples = []
    for call in range(calls):
        key = keys[call % len(keys)]
        before = time.perf_counter_ns()
        lease = client.get(key)
        samples.append((time.perf_counter_ns() - before) / 1e3)
        if lease is None:
            client.put(key, np.empty(HIT_BYTES, np.uint8), wait=True)
            samples.pop()
    return samples


def _puts_us(client: tensord.Client, value: Any, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        client.put(key_named(os.urandom(8)), value, cost_ms=COST_MS)
    return (time.perf_counter() - began) * 1e6 / calls


def _misses_us(client: tensord.Client, calls: int) -> list[float]:
    value = np.zeros(100, np.uint8)
    return [timed_us(lambda: client.get_or_compute(key_named(os.urandom(8)), lambda: value)) for _ in range(calls)]


def settled(client: tensord.Client) -> dict[str, Any]:
    """Waits until nothing is read from the store or written to it. Its figures."""
    while True:
        remote: dict[str, Any] = client.status()["remote"]
        if not any(remote[name] for name in ("fetches", "writes", "queued")):
            return remote
        time.sleep(0.02)


def _reads(client: tensord.Client, server: RedisServer, calls: int) -> dict[str, list[float]]:
    """The times of reads of 16 MB into the ring, and of redis-py's with a copy, one after the other."""
    value = np.random.default_rng(1).integers(0, 256, LARGE_BYTES, np.uint8)
    keys = [key_named(b"large %d" % number) for number in range(8)]
    for key in keys:
        client.put(key, value, cost_ms=COST_MS, wait=True)
        settled(client)
    buffer = memoryview(bytearray(LARGE_BYTES + 4096))
    direct = redis.Redis(port=server.port)
    ways: dict[str, Callable[[bytes], object]] = {
        "copied": lambda key: _copied(direct, buffer, key),
        "read": lambda key: client.get_or_compute(key, never),
    }
    us: dict[str, list[float]] = defaultdict(list)
    for call in range(calls):
        client.clear()
        key = keys[call % len(keys)]
        # Each is the first as often as the others: the daemon gives back the memory of what was cleared.
        names = list(ways)
        for name in names[call % len(ways) :] + names[: call % len(ways)]:
            us[name].append(timed_us(partial(ways[name], key)))
    return us


def _copied(direct: Any, buffer: memoryview, key: bytes) -> None:
    found = direct.get(f"tensord-1:{key.hex()}")
    buffer[: len(found)] = found


def never() -> Any:
    raise RuntimeError("the store has the entry, and it was computed")


def measured(quick: bool, told: Callable[[str], None]) -> list[Figure]:
    """All figures. `quick` takes few samples."""
    rounds, hits, puts, reads, misses = (1, 200, 10, 4, 20) if quick else (8, 5000, 1000, 24, 1000)
    us: dict[str, list[float]] = defaultdict(list)
    with RedisServer(*SERVER) as server:
        told("reads of 16 MB")
        # By a daemon of their own: what they leave in a ring would be in one of the two that are compared below.
        with (
            serving(RING_BYTES, f"--remote-url={server.url}") as reading,
            tensord.Client(reading.socket, name="reads", timeout_s=WAIT_S, required=True) as reader,
        ):
            us |= _reads(reader, server, reads)
        _compare(server, us, (rounds, hits, puts, misses), told)

    def ratio(of: str, against: str) -> float:
        return median(us[of]) / median(us[against])

    for name, samples in us.items():
        told(f"{name:>14}: {median(samples):10.1f} µs, median of {len(samples)}")
    return [
        Figure("16 MB from the store into the ring, against GET and a copy", ratio("read", "copied"), READ_MAX, "×"),
        Figure("hit while entries are written to the store", ratio("hit with", "hit without"), HIT_MAX, "×"),
        Figure("put returns while entries are written to it", ratio("put with", "put without"), PUT_MAX, "×"),
        Figure("hit, server stopped", ratio("hit, stopped", "hit, served"), FAULT_HIT_MAX, "×"),
        Figure("hit, server killed", ratio("hit, killed", "hit, served"), FAULT_HIT_MAX, "×"),
        Figure("miss with the store left alone, against none", ratio("miss with", "miss without"), MISS_MAX, "×"),
    ]


def _compare(
    server: RedisServer, us: dict[str, list[float]], counts: tuple[int, int, int, int], told: Callable[[str], None]
) -> None:
    """Hits, puts and misses of a daemon with the store beside those of one without. Kills the server. `counts`:
    rounds, and in each of them hits, puts and misses."""
    rounds, hits, puts, misses = counts
    spawn = multiprocessing.get_context("spawn")
    with serving(RING_BYTES, f"--remote-url={server.url}") as shared, serving(RING_BYTES) as alone:
        ends = spawn.Event()
        switches = {"with": spawn.Event(), "without": spawn.Event()}
        daemons = {"with": shared, "without": alone}
        ready = {on: spawn.Event() for on in daemons}
        floods = [
            spawn.Process(target=_flood, args=(daemons[on].socket, ready[on], switches[on], ends)) for on in daemons
        ]
        clients = {
            on: tensord.Client(daemon.socket, name="quiet", timeout_s=WAIT_S, required=True)
            for on, daemon in daemons.items()
        }
        try:
            keys = [key_named(b"hit %d" % number) for number in range(64)]
            for client in clients.values():
                for key in keys:
                    client.put(key, np.empty(HIT_BYTES, np.uint8), wait=True)
                us["warm"] = _hits_us(client, keys, hits)
            for flood in floods:
                flood.start()
            for event in ready.values():
                event.wait()
            value = np.ones(PUT_BYTES, np.uint8)
            for number in range(rounds):
                # Each is the first in every other round.
                for on, client in [*clients.items()][:: 1 - 2 * (number % 2)]:
                    told(f"round {number + 1} of {rounds}: a flood of puts, {on} the store")
                    switches[on].set()
                    time.sleep(0.3)
                    us[f"hit {on}"] += _hits_us(client, keys, hits)
                    # Some return at once and others wait for room: the mean of a round says more than a median.
                    us[f"put {on}"].append(_puts_us(client, value, puts))
                    switches[on].clear()
                    time.sleep(0.5)
                    settled(clients["with"])
            told("hits with the server running, stopped and killed; misses with it killed")
            for _ in range(rounds):
                us["hit, served"] += _hits_us(clients["with"], keys, hits)
                with server.paused():
                    us["hit, stopped"] += _hits_us(clients["with"], keys, hits)
            server.kill()
            while clients["with"].status()["remote"]["serves"]:
                _misses_us(clients["with"], 1)
            for _ in range(rounds):
                us["hit, killed"] += _hits_us(clients["with"], keys, hits)
                for on, client in clients.items():
                    us[f"miss {on}"] += _misses_us(client, misses)
        finally:
            ends.set()
            for flood in floods:
                if flood.pid is not None:
                    flood.join()
            for client in clients.values():
                client.close()


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
