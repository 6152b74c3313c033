"""Runs seeds of the simulation on all cores, or one seed with a trace of its steps.

    python -m tests.simulation.simulate --seeds 10000         seeds 0 to 9,999; exit status 1 if one of them fails
    python -m tests.simulation.simulate --seed 273            seed 273 alone, with a line for each event

A seed gives the same run on every machine: the hash seed is fixed, and cycle collection runs only where the schedule
calls it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Final

from ..ended_cleanly import SIGNALS, end_cleanly
from .world import World

STEPS: Final = 500
SEED_S_MAX: Final = 120
"""Time limit of a seed. A seed takes some 50 ms; one over the limit counts as failed."""
SHOWN_EVERY: Final = 200

Outcome = tuple[int, Counter[str], str | None]
"""A seed, the number of its events of each kind, and why it failed, if it did."""


def run_seed(seed: int, steps: int, *, trace: bool = False) -> Counter[str]:
    """Runs one seed to its end.

    Returns:
        The number of events of each kind.

    Raises:
        AssertionError: an invariant is violated.
    """
    world = World(seed, print if trace else None)
    try:
        world.run(steps)
        counted = world.counts()
        world.finish()
    finally:
        world.close()
    return counted


def outcome(seed: int, steps: int) -> Outcome:
    """In a process of the run: runs one seed to its end, and says what happened, and why it failed if it did."""
    signal.alarm(SEED_S_MAX)
    try:
        return seed, run_seed(seed, steps), None
    except Exception:
        return seed, Counter(), traceback.format_exc(limit=-1).strip().splitlines()[-1]
    finally:
        signal.alarm(0)
        gc.collect()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if every seed passed, else 1."""
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="number of the first seed")
    parser.add_argument("--seed", type=int, help="run only this seed, with a trace")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps per seed ({STEPS}); same for a replay")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of processes")
    given = parser.parse_args(argv)
    if given.seed is not None:
        _prepare()
        end_cleanly()
        signal.alarm(SEED_S_MAX)
        run_seed(given.seed, given.steps, trace=True)
        print(f"seed {given.seed} holds")
        return 0
    seeds = range(given.first, given.first + given.seeds)
    counts: Counter[str] = Counter()
    failed: list[int] = []
    began = time.monotonic()
    pool = ProcessPoolExecutor(min(given.jobs, len(seeds)), get_context("fork"), _prepare)
    try:
        for done, (seed, happened, why) in enumerate(pool.map(partial(outcome, steps=given.steps), seeds), 1):
            counts += happened
            if why is not None:
                failed.append(seed)
                print(f"seed {seed} FAILED: {why}\n  replay: make simulate SEED={seed}", flush=True)
            if not done % SHOWN_EVERY or done == len(seeds):
                took_s = time.monotonic() - began
                print(f"{done} of {len(seeds)} seeds, {len(failed)} failed, {took_s:.0f} s", flush=True)
            if failed and given.stop:
                break
    finally:
        pool.shutdown(cancel_futures=True)
    print(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    return 1 if failed else 0


def _prepare() -> None:
    """Begins a process that runs seeds: excludes imported objects from cycle collection, silences the library's log.

    Signals that end the run pass it by: it ends with its seed, which removes its shared memory.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("tensord").addHandler(logging.NullHandler())
    signal.signal(signal.SIGALRM, _too_long)
    gc.disable()
    gc.collect()
    gc.freeze()


def _too_long(*_: object) -> None:
    raise TimeoutError(f"the seed has not ended after {SEED_S_MAX} s")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.simulate", *sys.argv[1:]])
    end_cleanly()
    raise SystemExit(main())
