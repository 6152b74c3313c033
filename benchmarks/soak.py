"""Runs a mixed load with random kills, and reports everything that is wrong, lost or leaked.

    python benchmarks/soak.py [--minutes N] [--seed N] [--json PATH]

Owns: the processes, the times of the disturbances, and the report. The ring of one daemon holds everything that its
workers store, so that a miss is a loss. The ring of the other is too small, so that it evicts all the time. During the
last two fifths of the time the daemons are undisturbed, and their memory is sampled. Exit status 1: something was
wrong, lost or leaked.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from soaking.host import Host
from soaking.ledger import FAULTS, OPERATIONS

from tests.ended_cleanly import end_cleanly

MIB: Final = 1 << 20
_QUIET_FROM: Final = 0.6
_EVERY_S: Final = (0.1, 0.8)
_SHOWN_MAX: Final = 20


def soak(seconds: float, seed: int) -> dict[str, Any]:
    """Runs for that time, and returns the report."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(Host("roomy", 512 * MIB, 3, chance.randrange(1 << 31), lossy=False)),
            stack.enter_context(Host("tight", 16 * MIB, 2, chance.randrange(1 << 31), lossy=True)),
        ]
        began = time.monotonic()
        ended: list[str] = []
        while (passed_s := time.monotonic() - began) < seconds:
            for host in hosts:
                ended += host.ended_by_itself()
                host.disturb(daemon_too=passed_s < _QUIET_FROM * seconds)
                host.sample()
            time.sleep(chance.uniform(*_EVERY_S))
        for host in hosts:
            host.end_load()
        return report(hosts, seconds, seed, ended)


def report(hosts: Sequence[Host], seconds: float, seed: int, ended: list[str]) -> dict[str, Any]:
    """The counts and faults, for JSON."""
    growth = {host.name: round(host.growth_bytes_per_hour()) for host in hosts}
    leaked = {host.name: host.leaked() for host in hosts}
    counted = sum((host.counted() for host in hosts), Counter[str]())
    kills = sum((host.kills for host in hosts), Counter[str]())
    faults = [*ended, *(fault for host in hosts for fault in host.faults())]
    wrong, lost = (counted[name] for name in FAULTS)
    leaks = sum(sum(each.values()) for each in leaked.values())
    return {
        "seconds": seconds,
        "seed": seed,
        "operations": {name: counted[name] for name in OPERATIONS},
        "payloads_checked": counted["checked"],
        "kills": dict(sorted(kills.items())),
        "wrong": wrong,
        "lost": lost,
        "ended_by_themselves": len(ended),
        "leaked": leaked,
        "rss_growth_bytes_per_hour": growth,
        "faults": faults[:_SHOWN_MAX],
        "ok": not (wrong or lost or leaks or ended),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--json", type=Path, help="write the report there, as JSON")
    given = parser.parse_args(arguments)
    found = soak(given.minutes * 60, given.seed)
    text = json.dumps(found, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    end_cleanly()
    sys.exit(main())
