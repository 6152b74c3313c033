"""Four processes look at the same photographs; each photograph is encoded once.

    python examples/shared_vision.py [--json PATH] [--processes N] [--passes N]

Starts a private daemon (256 MiB, a private name and private sockets), and stops it. Every process goes through the
photographs in its own order. It runs a real encoder, EfficientNet-Lite0 at 448 px, when no process has encoded the
photograph and none is encoding it. Then the embeddings are compared with fresh encodings, a process is killed while it
holds one, and `tensorctl status` is shown.

The exit status is 1 if a photograph was encoded twice, an embedding was wrong, the killed process left a pin, or the
status failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from demonstration import own_daemon
from figures import Figures, Seen, figures, table
from vision import photographs
from vision.encoder import TOKEN_FLOATS, TOKEN_PIXELS, Encoder
from vision.photographs import Photograph

import tensord

SIDE: Final = 448
TOKENS: Final = (SIDE // TOKEN_PIXELS) ** 2
GONE_S: Final = 10.0
# A wait has a limit; on a busy machine an encoding may be slow.
ENCODE_S_MAX: Final = 60.0


def key_of(encoder: Encoder, picture: Photograph) -> bytes:
    """The key of a photograph's embedding by this encoder."""
    namespace = tensord.Namespace(
        model=encoder.name,
        revision=encoder.revision,
        dtype="float32",
        processor=f"bicubic-{SIDE}",
    )
    return namespace.key("encoder", "image", picture.pixels)


def look_at(cache: tensord.Client, encoder: Encoder, picture: Photograph, seen: Seen) -> None:
    """One embedding: from the cache, from a process that is encoding it, or encoded here."""
    key = key_of(encoder, picture)

    def encode() -> Any:
        began = time.thread_time()
        embedding = encoder.encode(picture.pixels)
        seen.encoded_s[picture.name] = time.thread_time() - began
        return embedding

    found, waited = cache.tally.found, cache.tally.waited
    began_ns = time.perf_counter_ns()
    embedding = cache.get_or_compute(key, encode, tokens=TOKENS, timeout_s=ENCODE_S_MAX)
    took_us = (time.perf_counter_ns() - began_ns) / 1e3

    seen.lookups += 1
    if cache.tally.found > found:
        seen.hits += 1
        seen.hit_us.append(took_us)
    elif cache.tally.waited > waited:
        seen.waits += 1
    else:
        return
    seen.answered.append(picture.name)
    seen.shared_bytes += embedding.nbytes


def process(socket: Path, number: int, passes: int, together: Any, orders: Any) -> None:
    """One process: looks at every photograph, reports its lookups, then carries out orders."""
    encoder = Encoder()
    pictures = photographs.load_all(SIDE)
    order = random.Random(number)
    seen = Seen()
    with tensord.Client(socket, name=f"vision-{number + 1}", required=True) as cache:
        together.wait()
        for _ in range(passes):
            for picture in order.sample(pictures, len(pictures)):
                look_at(cache, encoder, picture, seen)
        orders.send(seen)
        if orders.recv() == "hold":
            lease = cache.get(key_of(encoder, pictures[0]))
            orders.send(lease is not None)
            orders.recv()  # SIGKILL comes instead of an order


@dataclass(frozen=True)
class Running:
    """One of the processes, with its pipe."""

    process: Any
    orders: Any


@contextmanager
def several(count: int, passes: int, socket: Path) -> Iterator[list[Running]]:
    """So many processes that share only the daemon's socket; they begin together."""
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(count)
    running = []
    for number in range(count):
        ours, theirs = spawn.Pipe()
        started = spawn.Process(target=process, args=(socket, number, passes, together, theirs))
        started.start()
        theirs.close()  # so that the pipe ends when the process ends
        running.append(Running(started, ours))
    try:
        yield running
        for one in running:
            if one.process.is_alive():
                one.orders.send("end")
                one.process.join(GONE_S)
    finally:
        for one in running:
            one.process.kill()
            one.process.join()


def equal_to_fresh(cache: tensord.Client, encoder: Encoder, pictures: Sequence[Photograph]) -> int:
    """The number of shared embeddings that equal a fresh encoding byte for byte."""
    equal = 0
    for picture in pictures:
        lease = cache.get(key_of(encoder, picture))
        if lease is not None:
            equal += np.array_equal(lease.tree, encoder.encode(picture.pixels))
    return equal


@dataclass(frozen=True)
class Killed:
    """The pins before and after a process was killed, and the seconds until the daemon dropped them."""

    before: int
    after: int
    took_s: float


def kill_holding(one: Running, cache: tensord.Client) -> Killed:
    """Kills a process that holds a lease with SIGKILL; waits for its pins to go, with a limit."""
    one.orders.send("hold")
    if not one.orders.recv():
        raise RuntimeError("the photograph to hold is not in the cache")
    before = cache.status()["pins"]
    began = time.monotonic()
    one.process.kill()
    one.process.join()
    while (after := cache.status()["pins"]) and time.monotonic() - began < GONE_S:
        time.sleep(0.01)
    return Killed(before, after, time.monotonic() - began)


def tell(all_seen: Sequence[Seen], found: Figures, equal: int, killed: Killed) -> None:
    """Prints the results."""
    print(f"\n{table(all_seen)}\n")
    print(f"{found.photographs} photographs, {found.lookups} lookups, {found.encoder_runs} encoder runs")
    print(f"equal to a fresh encoding: {equal} of {found.photographs}")
    print(
        f"SIGKILL for a process with one lease: pins {killed.before} → {killed.after} "
        f"within {killed.took_s * 1e3:.0f} ms"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Several processes share one encoder's work.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument("--processes", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--passes", type=int, default=3, help="default: %(default)s")
    arguments = parser.parse_args()

    encoder = Encoder()  # builds the graph for all processes, if it is not cached
    pictures = photographs.load_all(SIDE)
    print(
        f"{arguments.processes} processes, {len(pictures)} photographs at {SIDE} px, "
        f"{arguments.passes} passes; {encoder.name}: {TOKENS} × {TOKEN_FLOATS} float32",
        flush=True,
    )
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-demo-"))
        socket = stack.enter_context(own_daemon(Path(folder), "vision", ring_bytes="256MiB"))
        cache = stack.enter_context(tensord.Client(socket, name="vision", required=True))
        running = stack.enter_context(several(arguments.processes, arguments.passes, socket))
        all_seen = [one.orders.recv() for one in running]
        equal = equal_to_fresh(cache, encoder, pictures)
        killed = kill_holding(running[0], cache)
        found = figures(all_seen, len(pictures), killed.after)
        tell(all_seen, found, equal, killed)
        print("\n$ tensorctl status", flush=True)
        shown = subprocess.run(
            [sys.executable, "-m", "tensord.client.ctl", "status"],
            env={**os.environ, "TENSORD_SOCKET": str(socket)},
            check=False,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(found), indent=1) + "\n")
    once = found.encoder_runs == found.photographs == equal
    return 0 if once and killed.before and not killed.after and not shown.returncode else 1


if __name__ == "__main__":
    sys.exit(main())
