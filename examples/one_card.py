"""A day of three programs on one card, first without tensord and then with it: out-of-memory errors are counted.

    python examples/one_card.py [--minutes M] [--json PATH]

A chat engine, a coding agent and image generation, each a process of its own, use one card of 64 MiB. The card is a
stand-in (`tensord.testing`): its capacity holds across processes, and an allocation that does not fit fails. The
programs would like to keep 99 MiB together. The same day (card_day.py) is replayed twice, in M minutes (2) together:

- Alone: each program keeps a cache of its own, as large as if it had the card for itself, and allocates when a request
  comes. An allocation that fails is an out-of-memory error: the request fails, and the program drops half of its cache.
- Governed: a private daemon watches the card. The caches are `DeviceCache`s, each program announces its allocations by
  `reserve`, with a wait, and the chat engine drops adapters that it can load again when the card's mode says so.

Every entry that a request finds is compared, byte by byte, with the one that was computed. Computing takes no time
here: the saved seconds are declared costs (card_day.py). A table has every hour, another one both days.

The exit status is 1 if an expectation failed: no error without the governor or one with it, a request refused, no
entry offloaded, none fetched, or wrong bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

from card_day import CARD, CARD_BYTES, HOURS, MIB
from card_programs import Tally, be_program
from demonstration import PATIENCE_S, OwnProcess, own_daemon
from figures import aligned

import tensord
from tensord.testing.fake_card import FakeCard

PROGRAMS: Final = ("chat", "coder", "images")
MINUTES: Final = 2.0
MINUTES_MAX: Final = 2.0 * HOURS * 60  # both days as long as they are
RING_BYTES: Final = 192 * MIB
MODES: Final = list(tensord.Mode)  # from the emptiest to the fullest; there is no workflow here
LOOKS_AN_HOUR: Final = 50


def settings(hour_s: float) -> dict[str, object]:
    """The daemon's times, short as the day is."""
    return {
        "ring_bytes": RING_BYTES,
        "gauges_device": "file",
        "gauges_host": "none",
        "gauges_sample_s": 0.05,
        "gauges_sample_pressed_s": 0.02,
        "pressure_relaxed_idle_s": 4 * hour_s,
        "pressure_normal_idle_s": hour_s,
        "pressure_critical_idle_s": hour_s / 4,
        # Entries that a request is reading are not ordered away again for so long.
        "pressure_retry_s": max(0.05, hour_s / 10),
        "log_level": "error",
    }


@dataclass
class Day:
    """The counts of one replay, by program."""

    programs: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in PROGRAMS})

    @property
    def sums(self) -> Tally:
        """The counts of all programs."""
        sums = Tally()
        for tally in self.programs.values():
            sums.add(tally)
        return sums


@dataclass
class Seen:
    """Both replays, with their expectations."""

    alone: Day
    governed: Day

    @property
    def failures(self) -> list[str]:
        """The failed expectations."""
        alone, governed = self.alone.sums, self.governed.sums
        wanted = {
            "no out-of-memory error without the governor: the load is too small": alone.out_of_memory > 0,
            f"{governed.out_of_memory} out-of-memory errors with the governor": governed.out_of_memory == 0,
            f"{governed.refused} requests got no memory with the governor": governed.refused == 0,
            "no entry was offloaded": governed.offloaded > 0,
            "no entry was fetched from the host's memory": governed.fetched > 0,
            f"{alone.wrong + governed.wrong} entries had wrong bytes": alone.wrong + governed.wrong == 0,
        }
        return [text for text, fulfilled in wanted.items() if not fulfilled]


class ModesOfAnHour:
    """The highest mode since the last question, from a client's subscription."""

    def __init__(self) -> None:
        self._now = self._highest = tensord.Mode.RELAXED

    def changed(self, change: tensord.ModeChange) -> None:
        """Takes a change of the card's mode."""
        self._now = change.mode
        self._highest = max(self._highest, self._now, key=MODES.index)

    def take(self) -> str:
        """The highest mode since the last call."""
        highest, self._highest = self._highest, self._now
        return str(highest)


def replay(folder: Path, socket: Path | None, card: FakeCard, hour_s: float) -> Day:
    """Runs the three programs through one day, and prints a line for each hour."""
    day, modes = Day(), ModesOfAnHour()
    with ExitStack() as stack:
        if socket is not None:
            client = stack.enter_context(tensord.Client(socket, name="one_card", timeout_s=PATIENCE_S, required=True))
            stack.callback(client.on_mode(modes.changed, gauge=CARD).close)
        programs = []
        for name in PROGRAMS:
            programs.append(OwnProcess(name, be_program, folder, socket, hour_s))
            stack.callback(programs[-1].end)
            programs[-1].hear()  # the chat engine has its weights before the others begin
        print_heads()
        for hour in range(HOURS):
            began = time.monotonic()
            for program in programs:
                program.tell((hour, began))
            used_bytes = highest_use(card, programs, hour_s)
            tallies = {program.name: program.hear() for program in programs}
            for name, tally in tallies.items():
                day.programs[name].add(tally)
            print_hour(hour, used_bytes, modes.take() if socket is not None else "-", tallies)
    return day


def highest_use(card: FakeCard, programs: Sequence[OwnProcess], hour_s: float) -> int:
    """The highest use of the card, in bytes, until all programs have answered, or are PATIENCE_S late."""
    busy = [program.answers for program in programs]
    deadline = time.monotonic() + hour_s + PATIENCE_S
    used_bytes = 0
    while busy and time.monotonic() < deadline:
        used_bytes = max(used_bytes, card.reading()[0])
        answered = wait(busy, hour_s / LOOKS_AN_HOUR)
        busy = [connection for connection in busy if connection not in answered]
    return used_bytes


def print_heads() -> None:
    """Prints the heads of the hours' table."""
    columns = f"{'requests':>8} {'hits':>9} {'OOM':>4} {'waits':>5} {'s':>5}"
    print(f"\n{'':21}" + "".join(f" | {name:<{len(columns)}}" for name in PROGRAMS).rstrip())
    print(f"{'hour':>4} {'card':>5} {'mode':<10}" + f" | {columns}" * len(PROGRAMS))


def print_hour(hour: int, used_bytes: int, mode: str, tallies: dict[str, Tally]) -> None:
    """Prints a line: the highest use and mode of the hour, and the counts of each program."""
    cells = [
        f" | {tally.requests:>8} {f'{tally.hits}/{tally.lookups}':>9} {tally.out_of_memory or '':>4} "
        f"{tally.waits or '':>5} {f'{tally.waited_s:.2f}' if tally.waits else '':>5}"
        for tally in (tallies[name] for name in PROGRAMS)
    ]
    print((f"{hour:>4} {used_bytes / CARD_BYTES:>5.0%} {mode:<10}" + "".join(cells)).rstrip(), flush=True)


def table(seen: Seen) -> str:
    """A line for each count, a column for each program and replay."""
    rows: dict[str, Callable[[Tally], str]] = {
        "requests": lambda tally: str(tally.requests),
        "served": lambda tally: str(tally.served),
        "out-of-memory errors": lambda tally: str(tally.out_of_memory),
        "refused": lambda tally: str(tally.refused),
        "waits for memory": lambda tally: str(tally.waits),
        "seconds waited": lambda tally: f"{tally.waited_s:.2f}",
        "entries needed": lambda tally: str(tally.lookups),
        "hits": lambda tally: str(tally.hits),
        "of them from the host": lambda tally: str(tally.fetched),
        "seconds saved": lambda tally: f"{tally.saved_s:.1f}",
        "offloaded": lambda tally: str(tally.offloaded),
        "dropped": lambda tally: str(tally.dropped),
        "adapters given up": lambda tally: str(tally.given_up),
        "wrong bytes": lambda tally: str(tally.wrong),
    }
    columns = [
        (name, with_tensord, tally)
        for with_tensord, day in (("no", seen.alone), ("yes", seen.governed))
        for name, tally in {**day.programs, "all": day.sums}.items()
    ]
    lines = [["", *(name for name, _, _ in columns)], ["with tensord", *(answer for _, answer, _ in columns)]]
    lines += [[name, *(show(tally) for _, _, tally in columns)] for name, show in rows.items()]
    return aligned(lines)


def both_days(hour_s: float) -> Seen:
    """Replays the day without tensord and with it, each with a card of its own."""
    days = []
    for with_daemon in (False, True):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-demo-")))
            card = stack.enter_context(FakeCard(folder, CARD, CARD_BYTES))
            socket = None
            print(f"\n{'With' if with_daemon else 'Without'} tensord:", flush=True)
            if with_daemon:
                watched: dict[str, Any] = {**settings(hour_s), "gauges_file": card.gauge_file}
                socket = stack.enter_context(own_daemon(folder, "card", **watched))
            days.append(replay(folder, socket, card, hour_s))
    return Seen(*days)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A day of three programs on one card, without tensord and with it.")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of both days together; default: %(default)g")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the counts there")
    given = parser.parse_args(argv)
    if not 0 < given.minutes <= MINUTES_MAX:
        parser.error(f"--minutes is {given.minutes:g}; it must be more than 0 and at most {MINUTES_MAX:g}")
    hour_s = given.minutes * 60 / (2 * HOURS)
    print(f"A card of {CARD_BYTES // MIB} MiB, {len(PROGRAMS)} programs; an hour takes {hour_s:.2g} s")
    seen = both_days(hour_s)
    print(f"\n{table(seen)}")
    if given.json:
        given.json.write_text(json.dumps(asdict(seen), indent=1) + "\n")
    for failure in seen.failures:
        print(f"one_card: {failure}", file=sys.stderr)
    return 1 if seen.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
