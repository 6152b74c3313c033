"""What the replacement policies over rows cost: microseconds an insertion, a use and a victim; bytes a row.

    python benchmarks/policy_cost.py [--policies hazard,lru] [--rows 10000,1000000] [--rounds 5]

Owns: the measurement, in one process, without a store. A batch of puts has 32 rows, a batch of uses 256, in random
order; victims come in batches of 64 and of 256, and are removed and put again, as in a full ring. Each figure is the
median of the rounds, in time of the processor, since the machine may do other things. Memory is what the process has
taken for the policy when all rows are put, used and, as far as ghosts go, evicted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Final

import numpy as np

from tensord.daemon.replacement import POLICIES, Facts, Replacement

PUTS: Final = 32
USES: Final = 256
VICTIMS: Final = (64, 256)
_KINDS: Final = {
    "digests": "u8",
    "sizes": "u8",
    "costs": "f4",
    "tokens": "u4",
    "owners": "u2",
    "agents": "u2",
    "depths": "u2",
    "befores": "u8",
    "parents": "u4",
    "children": "u4",
}


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class Scene:
    """A full ring of `rows` rows."""

    def __init__(self, name: str, rows: int) -> None:
        self.chance = np.random.default_rng(1)
        self.rows = rows
        self.columns: dict[str, Any] = {column: np.zeros(rows + 1, kind) for column, kind in _KINDS.items()}
        self.columns["sizes"][:] = self.chance.integers(64, 2048, rows + 1) * 64
        self.columns["costs"][:] = self.chance.random(rows + 1) * 100
        self.columns["tokens"][:] = 64
        self.columns["owners"][:] = 1
        self.digests(np.arange(rows + 1))
        before = _resident()
        self.policy: Replacement = POLICIES[name](Facts.of(self.columns.__getitem__))
        self.now = 0.0
        self.first_us = self.put(np.arange(1, rows + 1).tolist())
        self.used_us = self.use(max(rows // 2, 20_000))
        self.churn(min(rows, 100_000), VICTIMS[-1])
        self.row_bytes = (_resident() - before) / rows

    def digests(self, rows: Any) -> None:
        self.columns["digests"][rows] = self.chance.integers(1, 1 << 63, len(rows), dtype=np.uint64) * np.uint64(2)

    def put(self, rows: list[int]) -> float:
        """Puts rows; returns microseconds a row, of appending and of taking in."""
        window = self.policy.window
        began = time.thread_time()
        for first in range(0, len(rows), PUTS):
            append = window.append
            for row in rows[first : first + PUTS]:
                append(row)
            self.now += 0.001
            window.batch_ended(self.now)
        self.policy.take_in()
        return (time.thread_time() - began) / len(rows) * 1e6

    def use(self, count: int) -> float:
        """Uses rows, nine in ten of a tenth of the rows; returns microseconds a use."""
        hot = self.chance.integers(1, self.rows // 10 + 1, count)
        rows = np.where(self.chance.random(count) < 0.9, hot, self.chance.integers(1, self.rows + 1, count)).tolist()
        began = time.thread_time()
        for first in range(0, count, USES):
            self.now += 0.01
            self.policy.used(rows[first : first + USES], self.now)
        return (time.thread_time() - began) / count * 1e6

    def churn(self, count: int, most: int) -> tuple[float, float, float, float]:
        """Evicts rows and puts others, with uses between. Returns microseconds a victim of choosing and of removing,
        microseconds a put, and the longest choice in milliseconds."""
        chosen = removed = put = longest = 0.0
        done = 0
        while done < count:
            began = time.thread_time()
            victims = self.policy.victims(most)
            after = time.thread_time()
            self.policy.removed(victims, evicted=True)
            chosen += after - began
            longest = max(longest, after - began)
            removed += time.thread_time() - after
            done += len(victims)
            self.digests(np.array(victims))
            put += self.put(victims) * len(victims)
            self.use(most)
        return chosen / done * 1e6, removed / done * 1e6, put / done, longest * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the replacement policies over rows.")
    parser.add_argument("--policies", default="hazard,lru,lfu,sieve")
    parser.add_argument("--rows", default="10000,1000000")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"µs of processor time; batches: {PUTS} puts, {USES} uses, and victims as given; longest choice in ms\n")
    each = "   ".join(f"{most} victims: choose + remove, longest; put" for most in VICTIMS)
    print(f"policy        rows  first put    use   {each}   bytes a row")
    for name in arguments.policies.split(","):
        for rows in map(int, arguments.rows.split(",")):
            scene = Scene(name, rows)
            uses = [scene.use(20_000) for _ in range(arguments.rounds)]
            parts = []
            for most in VICTIMS:
                rounds = [scene.churn(8_192, most) for _ in range(arguments.rounds)]
                choose, remove = (statistics.median(each[at] for each in rounds) for at in (0, 1))
                put, longest = statistics.median(each[2] for each in rounds), max(each[3] for each in rounds)
                parts.append(f"{choose:6.2f} + {remove:5.2f} = {choose + remove:5.2f}, {longest:4.1f}; put {put:5.2f}")
            print(
                f"{name:8} {rows:9,}  {scene.first_us:9.2f} {statistics.median(uses):5.2f}   "
                f"{'   '.join(parts)}   {scene.row_bytes:6.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
