"""A daemon with workers, for the soak: starts, kills and restarts them, and checks for leaks.

Owns: the workers, the disturbances and their count. Does not own: what the workers do, the daemon's files and memory.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Self

import numpy as np

from soaking.ledger import Ledger
from tensord.testing.fake_vram import FakeCard
from tests.daemon_process import Daemon

CARD: Final = "soak-card"
CARD_BYTES: Final = 4 << 20
PATIENCE_S: Final = 60.0
"""Not a measurement: a process that takes longer is stuck."""
_WORKER: Final = Path(__file__).with_name("worker.py")
_KEPT: Final = ("ring", "index", "lock", "learned")
"""The shared memory of an instance without clients."""


class Host:
    """A context manager. `lossy`: its ring is too small for the puts of its workers."""

    def __init__(self, name: str, ring_bytes: int, workers: int, seed: int, *, lossy: bool) -> None:
        self.name = name
        self.kills: Counter[str] = Counter()
        self.rss: list[tuple[float, int]] = []
        """(monotonic seconds, bytes of the daemon's own memory), of the current daemon."""
        self._ring_bytes = ring_bytes
        self._lossy = lossy
        self._chance = random.Random(seed)
        self._count = workers
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._stopped: list[tuple[float, int]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.daemon = stack.enter_context(Daemon())
            self.folder = self.daemon.folder
            (self.folder / "card").mkdir()
            self._card = stack.enter_context(FakeCard(self.folder / "card", CARD, CARD_BYTES))
            self.daemon.flags = {
                "config": os.devnull,
                "ring_bytes": self._ring_bytes,
                "memory_prefault": False,
                "limits_claim_s": 5,
                "gauges_device": "file",
                "gauges_host": "none",
                "gauges_file": self._card.gauge_file,
                "gauges_sample_s": "100ms",
                "gauges_sample_pressed_s": "100ms",
                "log_level": "warning",
            }
            # A program of its own, whose memory is its own: not forked.
            self.daemon.prefix = ["env"]
            self.ledgers = [Ledger(self.folder / f"ledger.{worker}", worker) for worker in range(self._count)]
            self._workers_log = stack.enter_context((self.folder / "workers.log").open("ab"))
            self.daemon.start(PATIENCE_S)
            self.client = self.daemon.client(name="soak")
            stack.callback(self.end_load)
            for worker in range(self._count):
                self._start_worker(worker)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ---- during the run

    def disturb(self, *, daemon_too: bool) -> None:
        """Makes one random disturbance. A stopped process continues when its time has come."""
        now = time.monotonic()
        for at, pid in list(self._stopped):
            if now >= at:
                self._stopped.remove((at, pid))
                os.kill(pid, signal.SIGCONT)
        acts: dict[Callable[[], None], float] = {
            partial(self._end_worker, signal.SIGKILL): 4,
            partial(self._end_worker, signal.SIGTERM): 1,
            self._stop_worker: 2,
            self._fill_card: 3,
        }
        if daemon_too:
            acts[partial(self._end_daemon, signal.SIGKILL)] = 1.5
            acts[partial(self._end_daemon, signal.SIGTERM)] = 1
            acts[self._stop_daemon] = 1
        [act] = self._chance.choices([*acts], [*acts.values()])
        act()

    def sample(self) -> None:
        """Samples the daemon's own memory."""
        self.rss.append((time.monotonic(), self.daemon.memory_bytes()))

    def ended_by_itself(self) -> list[str]:
        """The processes that ended without a kill; starts such workers again."""
        found = []
        if not self.daemon.running:
            found.append(f"the daemon of {self.name} ended: {self._end_of_log('log')}")
            self._start_daemon()
        for worker, process in list(self._workers.items()):
            if process.poll() is not None:
                why = self._end_of_log("workers.log")
                found.append(f"worker {worker} of {self.name} ended with {process.returncode}: {why}")
                self._start_worker(worker)
        return found

    # ---- at the end

    def end_load(self) -> None:
        """Kills all workers."""
        self._resume_all()
        for process in self._workers.values():
            process.kill()
        for process in self._workers.values():
            process.wait()
        self._workers.clear()

    def leaked(self, patience_s: float = PATIENCE_S) -> dict[str, int]:
        """The leaks of the workers by kind; a leak that goes within `patience_s` counts 0."""
        left = {"pins": 0, "lanes": 0, "claims": 0, "lent_bytes": 0, "inboxes": 0}
        deadline = time.monotonic() + patience_s
        while any(left := self._left()) and any(left.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.client.clear()
        while self._used_bytes() and time.monotonic() < deadline:
            time.sleep(0.1)
        left["ring_bytes"] = self._used_bytes()
        before = self._descriptors()
        self._end_daemon(signal.SIGTERM)
        left["descriptors"] = max(0, before - self._descriptors())
        parts = {path.name.removeprefix(f"tensord.{self.daemon.instance}.") for path in self.daemon.segments()}
        own = f"lane.{self._own_lane():x}"
        left["segments"] = sum(part not in _KEPT and not part.startswith(own) for part in parts)
        return left

    def counted(self) -> Counter[str]:
        """The counts of all workers: operations and faults."""
        return sum((Counter(ledger.counted()) for ledger in self.ledgers), Counter())

    def faults(self) -> list[str]:
        """Wrong payloads and lost entries, one line each."""
        path = self.folder / "faults"
        return path.read_text().splitlines() if path.exists() else []

    def growth_bytes_per_hour(self) -> float:
        """The growth of the daemon's own memory: a straight line through the second half of the samples."""
        half = self.rss[len(self.rss) // 2 :]
        if len(half) < 3:
            return 0.0
        at, size = np.array(half).T
        return float(np.polyfit(at - at[0], size, 1)[0] * 3600)

    # ---- inside

    def _left(self) -> dict[str, int]:
        status = self.client.status()
        store = status["store"]
        return {
            "pins": status["pins"],
            "lanes": status["lanes"] - 1,
            "claims": store["claims_held"],
            "lent_bytes": store["lent_bytes"],
            "inboxes": status["inboxes"],
        }

    def _used_bytes(self) -> int:
        """The bytes of the ring that are neither free nor lent."""
        store = self.client.status()["store"]
        return int(store["used_bytes"] - store["lent_bytes"])

    def _own_lane(self) -> int:
        view = self.client.link.view
        return view.lane.lane_id if view is not None else 0

    def _start_daemon(self) -> None:
        self.daemon.start(PATIENCE_S)
        self.daemon.attached(self.client)
        self.rss.clear()

    def _start_worker(self, worker: int) -> None:
        words = [str(self.folder), str(worker), str(self._count), str(self._chance.randrange(1 << 31))]
        self._workers[worker] = subprocess.Popen(
            [sys.executable, str(_WORKER), *words, "lossy" if self._lossy else "whole"],
            stdin=subprocess.DEVNULL,
            stdout=self._workers_log,
            stderr=self._workers_log,
        )

    def _some_worker(self) -> int:
        return self._chance.choice([*self._workers])

    def _end_worker(self, number: signal.Signals) -> None:
        worker = self._some_worker()
        process = self._workers[worker]
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        process.wait()
        self._stopped = [(at, pid) for at, pid in self._stopped if pid != process.pid]
        self.kills[f"worker {number.name}"] += 1
        self._start_worker(worker)

    def _stop_worker(self) -> None:
        self._stop(self._workers[self._some_worker()].pid, "worker SIGSTOP")

    def _stop_daemon(self) -> None:
        self._stop(self.daemon.pid, "daemon SIGSTOP")

    def _stop(self, pid: int, what: str) -> None:
        if not any(pid == stopped for _, stopped in self._stopped):
            os.kill(pid, signal.SIGSTOP)
            self._stopped.append((time.monotonic() + self._chance.uniform(0.05, 1.0), pid))
            self.kills[what] += 1

    def _end_daemon(self, number: signal.Signals) -> None:
        """Ends the daemon, and starts another over the same memory. Returns when it serves."""
        pid = self.daemon.pid
        self.daemon.kill() if number == signal.SIGKILL else self.daemon.terminate()
        self._stopped = [(at, stopped) for at, stopped in self._stopped if stopped != pid]
        self.kills[f"daemon {number.name}"] += 1
        self._start_daemon()

    def _fill_card(self) -> None:
        """Fills the card so far that the governor offloads, or so little that it does not."""
        # A stopped worker may hold the card's lock.
        self._resume_all()
        self._card.occupy(int(CARD_BYTES * self._chance.choice([0.0, 0.5, 0.8])))

    def _resume_all(self) -> None:
        for _, pid in self._stopped:
            os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def _descriptors(self) -> int:
        """The least of several counts: a connection for status may be open for a moment."""
        found = []
        for _ in range(20):
            found.append(self.daemon.descriptors())
            time.sleep(0.05)
        return min(found)

    def _end_of_log(self, name: str) -> str:
        lines = (self.folder / name).read_text(errors="replace").splitlines()
        return " | ".join(lines[-12:])
