"""Runs all cells repeatedly, in random order, with random pauses: `make crossings ROUNDS=200`.

Half of the cells get a second disturbance after the first.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import time
import traceback
from random import Random

from ..client.device.card import card_folder
from ..ended_cleanly import end_cleanly
from .cell import Cells
from .disturbances import BY_NAME as DISTURBANCES
from .states import CELLS, name_of

# About the time that the daemon takes for a pending call.
JITTER_S = 0.01


def main() -> int:
    """Runs the rounds of the command line. Returns the exit status: 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.crossings")
    parser.add_argument("--rounds", type=int, default=1, help="number of runs of each cell")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="draws the order and the pauses")
    parser.add_argument("--round", type=int, help="repeat the pauses of this round")
    parser.add_argument("--only", default="", help="only cells whose names contain this text")
    asked = parser.parse_args()
    # The cells check refusals as outcomes.
    logging.getLogger("tensord").setLevel(logging.CRITICAL)
    chosen = [cell for cell in CELLS if asked.only in name_of(*cell)]
    if not chosen:
        parser.error(
            f"no cell's name contains {asked.only!r}; names are such as {name_of(*CELLS[0])!r} and "
            f"{name_of(*CELLS[-1])!r}, and all of them follow from tests/crossings/states.py"
        )
    print(f"{asked.rounds} rounds of {len(chosen)} cells, seed {asked.seed}", flush=True)
    failed, began = 0, time.monotonic()
    with card_folder() as cards:
        cells = Cells(cards)
        try:
            for turn in range(asked.rounds):
                number = turn if asked.round is None else asked.round
                told = f"round {turn}" if asked.round is None else f"round {number}, time {turn + 1} of {asked.rounds}"
                Random(f"{asked.seed} {number}").shuffle(chosen)
                for cell in chosen:
                    seed = f"{asked.seed} {number} {name_of(*cell)}"
                    drawn = Random(seed)
                    second = [drawn.choice(list(DISTURBANCES))] if drawn.random() < 0.5 else []
                    try:
                        cells.run(*cell, *second, seed=seed, jitter_s=JITTER_S)
                    except Exception:
                        failed += 1
                        traceback.print_exc()
                        print(f"FAILED {name_of(*cell, *second)}: repeat it by", file=sys.stderr)
                        replay = f'make crossings ROUNDS=20 SEED={asked.seed} ROUND={number} ONLY="{name_of(*cell)}"'
                        print(f"    {replay}", file=sys.stderr, flush=True)
                print(f"{told}: {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
        finally:
            cells.end()
    return 1 if failed else 0


if __name__ == "__main__":
    end_cleanly()
    sys.exit(main())
