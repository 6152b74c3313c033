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
from collections.abc import Sequence
from itertools import cycle
from typing import Final

from ..ended_cleanly import end_cleanly
from .daemon_rounds import KINDS, AnySession, session
from .points import Round

_ROUNDS: Final = 60
"""The kills that one instance goes through. Then all of its memory must be free."""
_DEPTH_FIRST: Final = 24
_DEPTH_MAX: Final = 1024
_TOLD_EVERY_S: Final = 10.0


class Draw:
    """Random rounds: every point of a kind is equally likely, at a random depth."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._depths: defaultdict[str, int] = defaultdict(lambda: _DEPTH_FIRST)

    def next(self, points: Sequence[str]) -> Round:
        point = self._chance.choice(points)
        return Round(point, self._chance.randint(1, self._depths[point]), self._chance.randrange(1 << 31))

    def played(self, turn: Round, places: tuple[str, ...]) -> None:
        """Adapts the depth of a point: deeper next time, or less deep if the load did not reach the line."""
        depth = self._depths[turn.point]
        self._depths[turn.point] = max(depth, min(2 * turn.at, _DEPTH_MAX)) if places else max(1, turn.at - 1)


class Report:
    def __init__(self) -> None:
        self.kills = self.rounds = self.checked = 0
        self.last: deque[tuple[Round, tuple[str, ...]]] = deque(maxlen=4)
        self._by_group: Counter[str] = Counter()
        self._places: defaultdict[str, set[str]] = defaultdict(set)
        self._began = self._told_at = time.monotonic()

    def add(self, turn: Round, places: tuple[str, ...]) -> None:
        """Counts a round. If the load did not reach the point, a kill from outside ended the round."""
        self.rounds += 1
        self.kills += max(1, len(places))
        self._by_group[turn.group] += len(places)
        self._places[turn.group].update(places)
        self.last.append((turn, places))
        now = time.monotonic()
        if now - self._told_at > _TOLD_EVERY_S:
            self._told_at = now
            print(f"{self.kills} kills, {now - self._began:.0f} s", flush=True)

    def __str__(self) -> str:
        rows = [
            f"{group:12} {self._by_group[group]:6} kills at {len(places):4} lines"
            for group, places in sorted(self._places.items())
        ]
        took_s = time.monotonic() - self._began
        end = f"{self.kills} kills in {self.rounds} rounds and {took_s:.0f} s, {self.checked} entries compared"
        return "\n".join([*rows, end])


def run(kills: int, seed: int, report: Report) -> None:
    """Plays rounds until that many processes were killed. Raises AssertionError if an entry is lost, torn or wrong, or
    something leaked."""
    draw = Draw(seed)
    kinds = cycle(KINDS)
    while report.kills < kills:
        kind = next(kinds)
        with session(kind) as playing:
            for _ in range(_ROUNDS):
                if report.kills < kills:
                    draw.played(*play(playing, draw.next(KINDS[kind]), report))
            playing.finish()
            report.checked += playing.checked


def play(playing: AnySession, turn: Round, report: Report) -> tuple[Round, tuple[str, ...]]:
    """Plays one round, and returns it with the places at which processes died."""
    report.last.append((turn, ()))
    places = playing.play(turn)
    report.last.pop()
    report.add(turn, places)
    return turn, places


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crashes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    points = [point for points in KINDS.values() for point in points]
    parser.add_argument("--point", help="play one round, at this point", choices=points, metavar="POINT")
    parser.add_argument("--at", type=int, default=1, help="the line at which it dies, counted as lines begin")
    given = parser.parse_args(arguments)
    report = Report()
    print(f"seed {given.seed}", flush=True)
    try:
        if given.point:
            kind = next(kind for kind, points in KINDS.items() if given.point in points)
            with session(kind) as playing:
                play(playing, Round(given.point, given.at, given.seed), report)
                playing.finish()
                report.checked += playing.checked
        else:
            run(given.kills, given.seed, report)
    except AssertionError:
        traceback.print_exc()
        print("the last rounds, newest first; one of their crashes caused the failure:")
        for turn, places in reversed(report.last):
            print(f"    make crashes {turn}    # died at {', '.join(places) or 'no point'}")
        print(report)
        return 1
    print(report)
    return 0


if __name__ == "__main__":
    end_cleanly()
    sys.exit(main(sys.argv[1:]))
