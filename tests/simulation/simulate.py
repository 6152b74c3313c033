"""Runs seeds of the simulation on all cores, or one of them with a trace of its steps.

    python -m tests.simulation.simulate --seeds 10000         seeds 0 to 9,999; exit status 1 if one of them fails
    python -m tests.simulation.simulate --seed 273            that one, with a line for each thing that happens

A seed gives the same run everywhere: the hash seed is set, and the cycle collector runs where the schedule says so.
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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Final

from ..command_line import SIGNALS, end_cleanly, whole
from .world import World

STEPS: Final = 500
SEED_S_MAX: Final = 120
"""A seed takes some 50 ms; one that takes so long is told as one that does not end."""
CHUNK_SEEDS: Final = 10
FAILURES_SHOWN: Final = 20

Outcome = tuple[dict[str, int], list[tuple[int, str]]]


def run_seed(seed: int, steps: int, *, trace: bool = False) -> Counter[str]:
    """One seed, to its end.

    Returns:
        How much of what happened.

    Raises:
        AssertionError: what does not hold.
    """
    world = World(seed, print if trace else None)
    try:
        world.run(steps)
        counted = world.counts()
        world.finish()
    finally:
        world.close()
    return counted


def run_seeds(seeds: Iterable[int], steps: int) -> Outcome:
    """Several, one after the other: what happened, and which failed how."""
    _prepare()
    counts: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    with _end.put_off():
        for seed in seeds:
            signal.alarm(SEED_S_MAX)
            try:
                counts += run_seed(seed, steps)
            except Exception:
                failed.append((seed, traceback.format_exc(limit=-1).strip().splitlines()[-1]))
            finally:
                signal.alarm(0)
            gc.collect()
            _end.if_told()
    return dict(counts), failed


class _End:
    """How a process of the pool ends by a signal: between two seeds, so that a seed removes its shared memory.

    The handler raises nothing: within a finalizer an exception is lost, and the pool takes one for what came of the
    seeds. Either way the process would stay, and whoever waits for it too.
    """

    def __init__(self) -> None:
        self._told = self._busy = False

    def listen(self) -> None:
        """From now on the signals that end a run end this process."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Within it a signal waits for `if_told`, or the end."""
        self._busy = True
        yield
        self._busy = False
        self.if_told()

    def if_told(self) -> None:
        """Ends the process if a signal came."""
        if self._told:
            os._exit(1)

    def _on_signal(self, *_: object) -> None:
        self._told = True
        if not self._busy:
            os._exit(1)


_end = _End()


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 if every seed held."""
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=whole(1), default=1000, help="how many")
    parser.add_argument("--first", type=whole(0), default=0, help="the first of them")
    parser.add_argument("--seed", type=whole(0), help="one alone, with a trace")
    parser.add_argument("--steps", type=whole(1), default=STEPS, help=f"of a seed; {STEPS}, and part of what a seed is")
    parser.add_argument("--stop", action="store_true", help="at the first that fails")
    parser.add_argument("--jobs", type=whole(1), default=os.cpu_count() or 1, help="processes at once")
    given = parser.parse_args(argv)
    if given.seed is not None:
        _prepare()
        signal.alarm(SEED_S_MAX)
        run_seed(given.seed, given.steps, trace=True)
        print(f"seed {given.seed} holds")
        return 0
    seeds = range(given.first, given.first + given.seeds)
    chunks = [seeds[at : at + CHUNK_SEEDS] for at in range(0, len(seeds), CHUNK_SEEDS)]
    counts: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    done, began, shown = 0, time.monotonic(), 0.0
    with _pool(given.jobs) as pool:
        under_way = {pool.submit(run_seeds, chunk, given.steps): chunk for chunk in chunks}
        for finished in as_completed(under_way):
            chunk = under_way[finished]
            try:
                happened, failures = finished.result()
            except Exception as error:
                why = f"a process ended within seeds {chunk[0]} to {chunk[-1]}: {error!r}"
                happened, failures = {}, [(chunk[0], why)]
            counts.update(happened)
            failed += failures
            done += len(chunk)
            for seed, why in failures[: max(0, FAILURES_SHOWN - len(failed) + len(failures))]:
                print(f"seed {seed} FAILED: {why}\n  replay: make simulate SEED={seed}", flush=True)
            if time.monotonic() - shown > 5 or done == len(seeds):
                shown = time.monotonic()
                print(f"{done} of {len(seeds)} seeds, {len(failed)} failed, {shown - began:.0f} s", flush=True)
            if failed and given.stop:
                pool.shutdown(cancel_futures=True)
                break
    print(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    if failed:
        print(f"{len(failed)} of {len(seeds)} seeds failed: {sorted(seed for seed, _ in failed)[:100]}")
    return 1 if failed else 0


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool that, where a signal ends this process, does not first work off all that was submitted."""
    with ProcessPoolExecutor(jobs, get_context("fork"), _end.listen) as pool:
        try:
            yield pool
        except SystemExit:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _prepare() -> None:
    """Collections walk what a seed has made, and not all that was imported; the library's log lines go nowhere."""
    logging.getLogger("tensord").addHandler(logging.NullHandler())
    signal.signal(signal.SIGALRM, _too_long)
    gc.disable()
    gc.collect()
    gc.freeze()


def _too_long(*_: object) -> None:
    raise TimeoutError(f"it has not ended after {SEED_S_MAX} s")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.simulate", *sys.argv[1:]])
    end_cleanly()
    raise SystemExit(main())
