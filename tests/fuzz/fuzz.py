"""Runs the fuzzers, two at a time, and reports the rounds with findings.

    python -m tests.fuzz.fuzz --minutes 30                     runs every fuzzer for 30 minutes
    python -m tests.fuzz.fuzz --only queues --first 17 --rounds 1  repeats round 17 of one fuzzer

The number of a round determines its input, but not the timing of other processes. Each finding is a file in
`fuzz-findings/`. The file holds the round, the violated condition and the daemon's log.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from ..ended_cleanly import end_cleanly
from . import queues, segments, sockets
from .besieged import Besieged

ROOT: Final = Path(__file__).parents[2]
FINDINGS: Final = ROOT / "fuzz-findings"
HOSTS_A_ROUND: Final = 20


def _in_daemon(attack: Callable[[random.Random, Besieged], None], **flags: Any) -> Callable[[random.Random], None]:
    """Makes a round with its own daemon from `attack`. A finding includes the log of that daemon."""

    def round_(chance: random.Random) -> None:
        with Besieged(**flags) as besieged:
            try:
                attack(chance, besieged)
            except Exception as error:
                raise AssertionError(f"{error}\n\nthe daemon's log:\n{besieged.log[-20_000:]}") from error

    return round_


def _hosts(chance: random.Random) -> None:
    """Runs several simulated hosts in a child process. A crash of the child does not end the fuzzer."""
    child = os.fork()
    if not child:
        status = 1
        try:
            logging.getLogger("tensord").addHandler(logging.NullHandler())
            for _ in range(HOSTS_A_ROUND):
                segments.segments(chance)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert not ended, f"the child process ended with {os.waitstatus_to_exitcode(ended)}; standard error has the reason"


TARGETS: Final[dict[str, Callable[[random.Random], None]]] = {
    "control": _in_daemon(sockets.control),
    "status": _in_daemon(sockets.status),
    # Clients may send Hello late on a busy machine. These fuzzers do not test the limit on Hello.
    "queues": _in_daemon(partial(queues.queues, in_place=True), hello_s_max=30.0),
    "other_uids": _in_daemon(partial(queues.queues, in_place=False), hello_s_max=30.0, write_in_place="off"),
    "segments": _hosts,
    "restarts": _in_daemon(segments.restarts),
}


def run(name: str, first: int, rounds: int | None, for_minutes: float) -> int:
    """Runs one fuzzer in this process. Returns 1 at the first finding, else 0."""
    ends_at = time.monotonic() + for_minutes * 60
    number = first
    while number < first + rounds if rounds is not None else time.monotonic() < ends_at:
        try:
            TARGETS[name](random.Random(f"{name} {number}"))
        except Exception:
            FINDINGS.mkdir(exist_ok=True)
            kept = FINDINGS / f"{name}-{number}.txt"
            kept.write_text(traceback.format_exc())
            print(f"FOUND by {name} in round {number}: {kept}", flush=True)
            print(f"  again: make fuzz ONLY={name} FIRST={number}", flush=True)
            print(traceback.format_exc(limit=-2)[-3000:], flush=True)
            return 1
        number += 1
    print(f"{name}: rounds {first} to {number - 1} found nothing", flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes for each fuzzer")
    parser.add_argument("--only", choices=TARGETS, help="run only this fuzzer")
    parser.add_argument("--first", type=int, help="number of the first round; by default a new one")
    parser.add_argument("--rounds", type=int, help="number of rounds, in place of --minutes")
    parser.add_argument("--jobs", type=int, default=2, help="number of fuzzers that run at once")
    given = parser.parse_args(argv)
    first = int(time.time()) if given.first is None else given.first
    if given.only is not None:
        return run(given.only, first, given.rounds, given.minutes)
    words = ["--first", str(first), "--minutes", str(given.minutes)]
    words += ["--rounds", str(given.rounds)] if given.rounds is not None else []

    def status_of(name: str) -> int:
        print(f"{name}: from round {first} on", flush=True)
        # The terminal's Ctrl-C reaches the fuzzers too.
        return subprocess.run([sys.executable, "-m", "tests.fuzz.fuzz", "--only", name, *words], cwd=ROOT).returncode

    with ThreadPoolExecutor(given.jobs) as pool:
        failed = [name for name, status in zip(TARGETS, pool.map(status_of, TARGETS), strict=True) if status]
    print(f"found by: {', '.join(failed)}; see {FINDINGS}" if failed else "nothing was found")
    return 1 if failed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.fuzz.fuzz", *sys.argv[1:]])
    end_cleanly()
    raise SystemExit(main())
