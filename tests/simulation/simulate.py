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
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Final, cast

from ..command_line import SIGNALS, end_cleanly, whole
from .world import World

STEPS: Final = 500
SEED_S_MAX: Final = 120
"""Time limit of a seed. A seed takes some 50 ms; one over the limit counts as failed."""
FAILURES_SHOWN: Final = 20

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
    """Runs one seed to its end, and says what happened, and why it failed if it did."""
    signal.alarm(SEED_S_MAX)
    try:
        return seed, run_seed(seed, steps), None
    except Exception:
        return seed, Counter(), traceback.format_exc(limit=-1).strip().splitlines()[-1]
    finally:
        signal.alarm(0)
        gc.collect()


def work(seeds: Iterable[int], steps: int, outcomes: Connection, inherited: Iterable[Connection] = ()) -> None:
    """In a process of the run: runs the seeds, and sends the outcome of each.

    It ends once a signal tells it to, but only between two seeds, so that a seed removes its shared memory. A handler
    that raised an exception would do so within a finalizer too, where it is lost. It also ends once nobody can receive
    the outcomes: a signal that arrives while a process is forked may be lost, and one that cannot be caught ends only
    the process that receives it.

    Args:
        inherited: connections of the parent, which this process must not keep open.
    """
    told = False

    def tell(*_: object) -> None:
        nonlocal told
        told = True

    for number in SIGNALS:
        signal.signal(number, tell)
    for connection in inherited:
        connection.close()
    _prepare()
    with outcomes, suppress(BrokenPipeError):
        for seed in seeds:
            outcomes.send(outcome(seed, steps))
            if told:
                return


def outcomes_of(seeds: Sequence[int], steps: int, jobs: int) -> Generator[Outcome]:
    """Runs the seeds in `jobs` processes, and gives the outcome of each as it ends. Its `close` ends the processes.

    The seed in which a process ends by itself has failed; that process's further seeds are not run.
    """
    fork = get_context("fork")
    readers: list[Connection] = []
    processes: list[ForkProcess] = []
    left: dict[Connection, tuple[ForkProcess, list[int]]] = {}
    try:
        for index in range(min(jobs, len(seeds))):
            reader, writer = fork.Pipe(duplex=False)
            readers.append(reader)
            share = seeds[index::jobs]
            process = fork.Process(target=work, args=(share, steps, writer, list(readers)), daemon=True)
            process.start()
            processes.append(process)
            left[reader] = process, list(reversed(share))
            writer.close()
        while left:
            for ready in wait(list(left)):
                reader = cast(Connection, ready)
                process, unfinished = left[reader]
                try:
                    happened: Outcome = reader.recv()
                except (EOFError, OSError):
                    del left[reader]
                    process.join()
                    if unfinished:
                        further = len(unfinished) - 1
                        why = f"its process ended, with status {process.exitcode}; {further} further seeds were not run"
                        yield unfinished[-1], Counter(), why
                else:
                    unfinished.pop()
                    yield happened
    finally:
        for reader in readers:
            reader.close()
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if every seed passed, else 1."""
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=whole(1), default=1000, help="number of seeds")
    parser.add_argument("--first", type=whole(0), default=0, help="number of the first seed")
    parser.add_argument("--seed", type=whole(0), help="run only this seed, with a trace")
    parser.add_argument("--steps", type=whole(1), default=STEPS, help=f"steps per seed ({STEPS}); same for a replay")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--jobs", type=whole(1), default=os.cpu_count() or 1, help="number of processes")
    given = parser.parse_args(argv)
    if given.seed is not None:
        _prepare()
        signal.alarm(SEED_S_MAX)
        run_seed(given.seed, given.steps, trace=True)
        print(f"seed {given.seed} holds")
        return 0
    seeds = range(given.first, given.first + given.seeds)
    counts: Counter[str] = Counter()
    failed: list[int] = []
    began, shown = time.monotonic(), 0.0
    with closing(outcomes_of(seeds, given.steps, given.jobs)) as outcomes:
        for done, (seed, happened, why) in enumerate(outcomes, 1):
            counts += happened
            if why is not None:
                failed.append(seed)
                if len(failed) <= FAILURES_SHOWN:
                    print(f"seed {seed} FAILED: {why}\n  replay: make simulate SEED={seed}", flush=True)
            if time.monotonic() - shown > 5 or done == len(seeds):
                shown = time.monotonic()
                print(f"{done} of {len(seeds)} seeds, {len(failed)} failed, {shown - began:.0f} s", flush=True)
            if failed and given.stop:
                break
    print(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    if failed:
        print(f"{len(failed)} of {len(seeds)} seeds failed: {sorted(failed)[:100]}")
    return 1 if failed else 0


def _prepare() -> None:
    """Excludes imported objects from cycle collection, silences the library's log, sets the alarm's handler."""
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
