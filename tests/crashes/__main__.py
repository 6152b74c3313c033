"""Kills daemons and clients at random crash points, a given number of times, and reports the outcome.

    make crashes KILLS=10000
    make crashes POINT=commit/daemon.store.commit:Commits.take AT=12 SEED=7    # replays one round

Owns: the draw of rounds, how deep into a point each kill comes, and the report. Exits with 1 if an entry was lost, torn
or wrong, or if anything leaked, and prints the commands that replay the last rounds.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from typing import Final

from ..ended_cleanly import end_cleanly
from .daemon_rounds import KINDS, session
from .points import Round

_ROUNDS: Final = 60
"""The kills that one instance goes through. Then all of its memory must be free."""
_DEPTH_BITS: Final = 10


class Run:
    """Plays rounds, and counts. If the load did not reach a round's point, a kill from outside ended the round."""

    def __init__(self) -> None:
        self.kills = self.checked = 0
        self.last: deque[Round] = deque(maxlen=4)
        self._reached: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._began = time.monotonic()

    def play(self, kind: str, rounds: Iterable[Round]) -> None:
        """Plays these rounds with one instance. Raises AssertionError if an entry is lost, torn or wrong, or something
        leaked."""
        with session(kind) as playing:
            for turn in rounds:
                self.last.append(turn)
                places = playing.play(turn)
                self.kills += max(1, len(places))
                self._reached[turn.group].update(places)
            playing.finish()
            self.checked += playing.checked
        print(f"{self.kills} kills, {time.monotonic() - self._began:.0f} s", flush=True)

    def __str__(self) -> str:
        rows = [
            f"{group:12} {places.total():6} kills at {len(places):4} lines"
            for group, places in sorted(self._reached.items())
        ]
        return "\n".join([*rows, f"{self.kills} kills, {self.checked} entries compared"])


def drawn(chance: random.Random, points: Sequence[str]) -> Iterator[Round]:
    """The rounds of one instance: every point is equally likely. Most kills come early, since the load may not reach a
    later line."""
    for _ in range(_ROUNDS):
        at = int(2 ** chance.uniform(0, _DEPTH_BITS))
        yield Round(chance.choice(points), at, chance.randrange(1 << 31))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crashes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    kind_of = {point: kind for kind, points in KINDS.items() for point in points}
    parser.add_argument("--point", help="play one round, at this point", choices=kind_of, metavar="POINT")
    parser.add_argument("--at", type=int, default=1, help="the line at which it dies, counted as lines begin")
    given = parser.parse_args(arguments)
    run, chance, kinds = Run(), random.Random(given.seed), cycle(KINDS)
    print(f"seed {given.seed}", flush=True)
    try:
        if given.point:
            run.play(kind_of[given.point], [Round(given.point, given.at, given.seed)])
        while not given.point and run.kills < given.kills:
            kind = next(kinds)
            run.play(kind, drawn(chance, KINDS[kind]))
    except AssertionError:
        traceback.print_exc()
        print("the last rounds, newest first; one of their crashes caused the failure:")
        for turn in reversed(run.last):
            print(f"    make crashes {turn}")
        print(run)
        return 1
    print(run)
    return 0


if __name__ == "__main__":
    end_cleanly()
    sys.exit(main(sys.argv[1:]))
