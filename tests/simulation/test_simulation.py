"""The simulation passes a few seeds, and detects each of several broken mechanisms.

`make simulate SEEDS=10000` runs it at length.
"""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from ..processes import python

SEEDS = 50
LONG_S = 1200.0


def simulated(*arguments: str, sabotage: str = "") -> subprocess.CompletedProcess[str]:
    """Runs seeds in a process of their own, after the code of `sabotage`."""
    program = f"import sys\nfrom tests.simulation import simulate\n{sabotage}\nsys.exit(simulate.main({arguments!r}))"
    environ = {**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
    return python("-c", program, timeout_s=LONG_S, env=environ)


def test_under_many_seeds_nothing_wrong_is_shown_nothing_is_lost_and_nothing_leaks() -> None:
    done = simulated("--seeds", str(SEEDS))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    happened = {name: int(count) for count, name in re.findall(r"(\d+) ([a-z ]+)", done.stdout.splitlines()[-1])}
    often = {"hits", "published", "restarts", "forks", "matches", "attachments"}
    assert {name for name in often if happened[name] < SEEDS // 2} == set(), happened
    assert len([name for name in happened if name.startswith("ended as")]) > 3, happened


def test_a_seed_is_the_same_run_each_time() -> None:
    first, again = simulated("--seed", "7"), simulated("--seed", "7")
    assert first.returncode == 0, first.stdout[-4000:] + first.stderr[-4000:]
    assert len(first.stdout.splitlines()) > 50
    assert first.stdout == again.stdout


SABOTAGES = {
    "pins are ignored": """
from tensord.daemon.actors import lanes
lanes._pins = lambda readers: iter(())
""",
    "a fork does not freeze lanes": """
from tensord.shm.lanes.lane import Lane
Lane.freeze = lambda self: None
""",
    "removals are not announced": """
from tensord.daemon.lifetimes.removals import Removals
Removals._announce = lambda self, gone: None
""",
    "the copier leaves out the end of a payload": """
from tensord.daemon.memory import copier
copy = copier.copy_checked
copier.copy_checked = lambda to, source, checksum: copy(to[:-8], source[:-8], checksum)
""",
    "a place that a client may be writing is freed at once": """
from tensord.daemon.store.grants import Grants
Grants.revoke = lambda self, grant: [self._holes.free(row) for row in self.give_back(grant)]
""",
    "a client writes in place without a pin": """
import numpy as np
from tensord.shm.lanes.lane import Lane
Lane.lend = lambda self, span_id: np.empty(0, np.uint8)
""",
    "a record is added before its payload is whole": """
from tensord.shm.payloads.packing import Packed
write = Packed.write
Packed.write = lambda self, memory, start: write(self._replace(sources=self.sources[:-1]), memory, start)
""",
    "generations are ignored": """
from tensord.shm.index.generations import GenerationWriter
GenerationWriter.is_past = lambda self, key: False
""",
    "a restart forgets the pins of lanes": """
from tensord.daemon.memory.segments import Segments
Segments._find_lanes = lambda self: None
""",
}


FIRST = {
    "a fork does not freeze lanes": 76,
    "a client writes in place without a pin": 146,
}
"""The seeds before these find nothing."""


@pytest.mark.parametrize("broken", SABOTAGES)
def test_a_broken_mechanism_is_found(broken: str) -> None:
    first = str(FIRST.get(broken, 0))
    done = simulated("--first", first, "--seeds", "600", "--stop", sabotage=SABOTAGES[broken])
    assert done.returncode == 1 and " FAILED: " in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert "replay: make simulate SEED=" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
