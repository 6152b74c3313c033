"""Measures the hot path beside its peers in one interleaved run. Prints the table, and every figure with its bar.

    python benchmarks/hotpath.py [--json PATH] [--peers NAMES] [--rounds N] [--seconds S] [--quick]

Owns: the command. Does not own: peers (peers/), rounds (harness.py), bars (bars.py), the figures with many entries and
clients (scale.py), nor those of other payloads (put_shapes.py).

A missed bar is printed, and does not change the exit status.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path

import numpy as np
import peers
import put_shapes
import scale
from peers import bars, harness


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures the hot path beside its peers.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there")
    parser.add_argument("--peers", default=",".join(peers.NAMES), help="default: %(default)s")
    parser.add_argument("--sizes", default=",".join(harness.SIZES), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds for each peer, operation, size and round")
    parser.add_argument("--quick", action="store_true", help="one short round, to check that it runs")
    parser.add_argument("--no-scale", action="store_true", help="leave out the figures with many entries and clients")
    return parser.parse_args()


def _told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    arguments = _arguments()
    names = arguments.peers.split(",")
    rounds, seconds = (1, 0.05) if arguments.quick else (arguments.rounds, arguments.seconds)
    for name, reason in harness.missing_peers(names).items():
        _told(f"without {name}: {reason}")
        names.remove(name)
    rows = harness.run(
        names,
        [harness.SIZES[size] for size in arguments.sizes.split(",")],
        rounds,
        seconds,
        told=_told,
        warm=not arguments.quick,
    )
    if arguments.json:
        harness.write_json(arguments.json, rows)
    found, shapes = bars.figures(rows), {}
    if "tensord" in names and not arguments.no_scale:
        found += scale.figures(quick=arguments.quick, told=_told)
        _told("puts of other payloads, and beside others")
        shapes = put_shapes.rows(0.05 if arguments.quick else 2.0)
        found += put_shapes.figures(shapes)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}, numpy {np.__version__}; {rounds} rounds\n"
    )
    print(harness.rows_table(rows, names))
    print(
        "\nget: zero-copy where the peer can, release included; get_consume: every byte read."
        "\ncopy: np.copyto; source and destination rotate over 256 MiB.\n"
    )
    print(bars.figures_table(found))
    if shapes:
        print(f"\n{put_shapes.shown(shapes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
