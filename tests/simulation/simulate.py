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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import active_children, get_context
from typing import Final

from ..command_line import SIGNALS, end_cleanly, whole
from .world import World

STEPS: Final = 500
SEED_S_MAX: Final = 120
"""Time limit of a seed. A seed takes some 50 ms; one over the limit counts as failed."""
CHUNK_SEEDS: Final = 10
FAILURES_SHOWN: Final = 20
LOOK_S: Final = 1.0
"""The longest wait for seeds to end before the pool is looked at."""

Outcome = tuple[dict[str, int], list[tuple[int, str]]]


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


def run_seeds(seeds: Iterable[int], steps: int) -> Outcome:
    """Runs several seeds one after the other. Returns the numbers of events, and each failed seed with its error."""
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
    """Ends a process of the pool after a signal, but only between two seeds, so that a seed removes its shared memory.

    The handler raises no exception. An exception within a finalizer is lost, and the pool takes any other one for the
    result of the seeds. In both cases the process stays, and its parent waits for it.
    """

    def __init__(self) -> None:
        self._told, self._busy = 0, False

    def listen(self) -> None:
        """From now on the signals that end a run end this process. One that has come since its fork does at once."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Defers a signal until the next `if_told`, or until the end of the block."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            self.if_told()

    def if_told(self) -> None:
        """Ends the process if a signal has arrived."""
        if self._told:
            os._exit(1)

    def _on_signal(self, number: int, _: object) -> None:
        self._told = number
        if not self._busy:
            os._exit(1)


_end = _End()


@contextmanager
def _held_up() -> Iterator[None]:
    """In the parent: a signal within the block comes at its end. So it does for a process that is forked in it, at the
    latest when that listens. Without, Python forgets a signal that reaches a new process before its first line.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    # A chunk that has begun runs to its end, also those that the pool has handed out ahead.
    chunk_seeds = 1 if given.stop else CHUNK_SEEDS
    chunks = [seeds[at : at + chunk_seeds] for at in range(0, len(seeds), chunk_seeds)]
    counts: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    done, began, shown = 0, time.monotonic(), 0.0
    with _pool(given.jobs) as pool:
        for chunk, finished in _ended(pool, chunks, given.steps, 2 * given.jobs):
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


def _ended(
    pool: ProcessPoolExecutor, chunks: Iterable[Sequence[int]], steps: int, most: int
) -> Iterator[tuple[Sequence[int], Future[Outcome]]]:
    """Has the pool run the chunks of seeds, `most` at once, and gives each one that has ended. Once a process of the
    pool has ended by itself, no further chunk is begun.

    A signal is held up meanwhile, for LOOK_S at most: an exception within a call of the pool can leave one of its locks
    locked, and then this process never ends.
    """
    waiting, under_way = iter(chunks), dict[Future[Outcome], Sequence[int]]()
    while True:
        with _held_up():
            with suppress(BrokenProcessPool):
                for chunk in islice(waiting, most - len(under_way)):
                    under_way[pool.submit(run_seeds, chunk, steps)] = chunk
            ended = wait(under_way, LOOK_S, FIRST_COMPLETED).done
            lost = not ended and _is_broken(pool)
        for future in ended:
            yield under_way.pop(future), future
        if lost:
            # What was submitted while the pool broke never ends.
            for chunk in under_way.values():
                failed: Future[Outcome] = Future()
                failed.set_exception(BrokenProcessPool("a process of the pool has ended"))
                yield chunk, failed
        if lost or not (ended or under_way):
            return


def _is_broken(pool: ProcessPoolExecutor) -> bool:
    try:
        pool.submit(int)
    except BrokenProcessPool:
        return True
    return False


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes. If a signal ends this process, the pool drops the seeds that have not begun, and its
    processes are told too: one may have been forked after the signal, and would wait for a lock that another one had
    when it ended.

    The first call forks all processes. An exception of a signal's handler would be lost in a hook of the fork, or leave
    them without the pool's thread, which ends them.
    """
    with ProcessPoolExecutor(jobs, get_context("fork"), _end.listen) as pool:
        try:
            with _held_up():
                pool.submit(int)
            yield pool
        except SystemExit:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
            raise


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
