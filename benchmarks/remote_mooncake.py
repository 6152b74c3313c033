"""Measures a read of 16 MB from a Mooncake Store into the ring, beside Mooncake's own get_into.

    python benchmarks/remote_mooncake.py [--quick] [--json PATH]

Needs root, since the master and its clients listen on all addresses: they get a network namespace with only a loopback.
Owns: the master, two daemons that share it, a client of Mooncake's own, and the reads. The objects lie in the first
daemon's segment. The second daemon, tensord's store without a daemon, and Mooncake's client read them in turn.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from bars import Figure, figures_table, save_figures
from peers.tensord_peer import WAIT_S, serving
from remote import COST_MS, LARGE_BYTES, MIB, READ_MAX, RING_BYTES, key_named, never, settled, timed_us

import tensord
from tensord.daemon.tiers.registry import open_store

MASTER: Final = "127.0.0.1:50051"
QUIET: Final = "GLOG_minloglevel"
"""Mooncake's clients print a line for most calls. The master's lines tell when it serves."""
INSIDE: Final = "TENSORD_BENCH_INSIDE"
OBJECTS: Final = 8


@contextmanager
def master(folder: Path) -> Iterator[None]:
    """Mooncake's master, from the wheel."""
    spec = find_spec("mooncake")
    assert spec is not None and spec.origin is not None
    program = Path(spec.origin).with_name("mooncake_master")
    host, port = MASTER.split(":")
    words = [f"-rpc_address={host}", f"-rpc_port={port}", f"-metrics_port={int(port) + 1}"]
    log = folder / "master.log"
    told = {name: value for name, value in os.environ.items() if name != QUIET}
    with log.open("wb") as output:
        process = subprocess.Popen([program, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=told)
    try:
        while "Task cleanup thread started" not in log.read_text(errors="replace"):
            if process.poll() is not None:
                raise SystemExit(f"Mooncake's master has ended:\n{log.read_text()}")
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


def own_reads(buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> Callable[[bytes], object]:
    """Reads of Mooncake's own client into `buffer`, which is registered."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", MASTER)
    if code:
        raise SystemExit(f"Mooncake's client cannot be set up: code {code}")
    store.register_buffer(buffer.ctypes.data, buffer.nbytes)

    def read(key: bytes) -> None:
        size = store.get_into(f"tensord-1-{key.hex()}", buffer.ctypes.data, buffer.nbytes)
        assert size > LARGE_BYTES, f"Mooncake's code {size}"

    return read


def measured(quick: bool) -> dict[str, list[float]]:
    """The microseconds of each way's reads."""
    url = f"mooncake://{MASTER}"
    us: dict[str, list[float]] = defaultdict(list)
    value = np.random.default_rng(1).integers(0, 256, LARGE_BYTES, np.uint8)
    keys = [key_named(b"large %d" % number) for number in range(OBJECTS)]
    with (
        tempfile.TemporaryDirectory(prefix="tensord-bench-") as folder,
        master(Path(folder)),
        serving(RING_BYTES, f"--remote-url={url}?segment=512MiB", "--remote-timeout-s=5") as giver,
        serving(RING_BYTES, f"--remote-url={url}", "--remote-timeout-s=5") as taker,
        tensord.Client(giver.socket, timeout_s=WAIT_S, required=True) as gives,
        tensord.Client(taker.socket, timeout_s=WAIT_S, required=True) as takes,
    ):
        for key in keys:
            gives.put(key, value, cost_ms=COST_MS, wait=True)
            settled(gives)
        # It tells the other daemon what computing takes, so that readers wait for the store.
        takes.put(key_named(b"own"), value[:100], cost_ms=COST_MS, wait=True)
        store = open_store(url)
        buffer = memoryview(bytearray(LARGE_BYTES + MIB))
        own = np.empty(LARGE_BYTES + MIB, np.uint8)
        ways: dict[str, Callable[[bytes], object]] = {
            "Mooncake's get_into": own_reads(own),
            "tensord's store": lambda key: store.get_into(key, buffer, time.monotonic() + WAIT_S),
            "into the ring": lambda key: takes.get_or_compute(key, never),
        }
        for way in ways.values():
            # The first call connects.
            with suppress(RuntimeError):
                way(keys[0])
        for call in range(4 if quick else 48):
            takes.clear()
            key = keys[call % OBJECTS]
            names = list(ways)
            for name in names[call % len(ways) :] + names[: call % len(ways)]:
                us[name].append(timed_us(partial(ways[name], key)))
        store.close()
    return us


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few reads; the figure means little")
    parser.add_argument("--json", type=Path, help="write the figure there")
    given = parser.parse_args()
    if find_spec("mooncake") is None or os.geteuid() != 0:
        print("remote_mooncake: needs root and Mooncake, which `make test-remote` installs", file=sys.stderr)
        return 2
    if INSIDE not in os.environ:
        command = [sys.executable, *sys.argv]
        return subprocess.run(["unshare", "--net", *command], env={**os.environ, INSIDE: "1"}, check=False).returncode
    os.environ[QUIET] = "3"
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    us = measured(given.quick)
    for name, samples in us.items():
        print(f"{name:>20}: {median(samples) / 1e3:6.1f} ms, median of {len(samples)}")
    ratio = median(us["into the ring"]) / median(us["Mooncake's get_into"])
    figures = [Figure("16 MB from Mooncake into the ring, against its own get_into", ratio, READ_MAX, "×")]
    print(figures_table(figures))
    if given.json is not None:
        save_figures(given.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
