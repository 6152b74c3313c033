"""A daemon with workers, for the soak: starts, kills and restarts them, and checks for leaks.

Owns: the processes, their folder, the instance's memory, and the count of kills. Does not own: the work of the workers.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import numpy as np

import tensord
from soaking.ledger import Ledger
from tensord.errors import TensordError
from tensord.testing.fake_vram import FakeCard

SHM_FOLDER: Final = Path("/dev/shm")
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
        self._instance = f"soak-{name}-{os.getpid()}"
        self._ring_bytes = ring_bytes
        self._lossy = lossy
        self._chance = random.Random(seed)
        self._count = workers
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._stopped: list[tuple[float, int]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-soak-")))
            (self.folder / "card").mkdir()
            self._card = stack.enter_context(FakeCard(self.folder / "card", CARD, CARD_BYTES))
            self.ledgers = [Ledger(self.folder / f"ledger.{worker}", worker) for worker in range(self._count)]
            self._log = stack.enter_context((self.folder / "daemon.log").open("ab"))
            self._workers_log = stack.enter_context((self.folder / "workers.log").open("ab"))
            stack.callback(self._remove_memory)
            self._start_daemon()
            stack.callback(self._end_all)
            self.client = stack.enter_context(tensord.Client(self.folder / "control.sock", name="soak"))
            self._await_daemon()
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
            self._kill_worker: 4,
            self._terminate_worker: 1,
            self._stop_worker: 2,
            self._fill_card: 3,
        }
        if daemon_too:
            acts |= {self._kill_daemon: 1.5, self._terminate_daemon: 1, self._stop_daemon: 1}
        [act] = self._chance.choices([*acts], [*acts.values()])
        act()

    def sample(self) -> None:
        """Samples the daemon's own memory."""
        status = Path(f"/proc/{self._daemon.pid}/status").read_text()
        [kib] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")]
        self.rss.append((time.monotonic(), kib * 1024))

    def ended_by_itself(self) -> list[str]:
        """The processes that ended without a kill; starts such workers again."""
        found = []
        if self._daemon.poll() is not None:
            found.append(f"the daemon of {self.name} ended with {self._daemon.returncode}: {self._end_of_log()}")
            self._start_daemon()
        for worker, process in list(self._workers.items()):
            if process.poll() is not None:
                why = self._end_of_log("workers")
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
        self._terminate_daemon()
        left["descriptors"] = max(0, before - self._descriptors())
        parts = {path.name.removeprefix(f"tensord.{self._instance}.") for path in self._segments()}
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
        flags = {
            "config": os.devnull,
            "instance": self._instance,
            "socket": self.folder / "control.sock",
            "ring-bytes": self._ring_bytes,
            "limits-claim-s": 5,
            "gauges-device": "file",
            "gauges-host": "none",
            "gauges-file": self._card.gauge_file,
            "gauges-sample-s": "100ms",
            "gauges-sample-pressed-s": "100ms",
            "log-level": "warning",
        }
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TENSORD_")}
        self._daemon = subprocess.Popen(
            [sys.executable, "-m", "tensord.daemon", *words, "--no-memory-prefault"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
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

    def _kill_worker(self) -> None:
        self._end_worker(signal.SIGKILL)

    def _terminate_worker(self) -> None:
        self._end_worker(signal.SIGTERM)

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
        self._stop(self._daemon.pid, "daemon SIGSTOP")

    def _stop(self, pid: int, what: str) -> None:
        if not any(pid == stopped for _, stopped in self._stopped):
            os.kill(pid, signal.SIGSTOP)
            self._stopped.append((time.monotonic() + self._chance.uniform(0.05, 1.0), pid))
            self.kills[what] += 1

    def _kill_daemon(self) -> None:
        self._end_daemon(signal.SIGKILL)

    def _terminate_daemon(self) -> None:
        self._end_daemon(signal.SIGTERM)

    def _end_daemon(self, number: signal.Signals) -> None:
        """Ends the daemon, and starts another over the same memory. Returns when it serves."""
        daemon = self._daemon
        daemon.send_signal(number)
        daemon.send_signal(signal.SIGCONT)
        daemon.wait()
        self._stopped = [(at, pid) for at, pid in self._stopped if pid != daemon.pid]
        self.kills[f"daemon {number.name}"] += 1
        self._start_daemon()
        self._await_daemon()

    def _await_daemon(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self._serves():
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the daemon of {self.name} does not serve: {self._end_of_log()}")
            time.sleep(0.01)

    def _serves(self) -> bool:
        try:
            self.client.touch(bytes(32))
            return int(self.client.status()["pid"]) == self._daemon.pid
        except TensordError:
            return False

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
            found.append(len(os.listdir(f"/proc/{self._daemon.pid}/fd")))
            time.sleep(0.05)
        return min(found)

    def _segments(self) -> list[Path]:
        return sorted(SHM_FOLDER.glob(f"tensord.{self._instance}.*"))

    def _end_of_log(self, whose: str = "daemon") -> str:
        lines = (self.folder / f"{whose}.log").read_text(errors="replace").splitlines()
        return " | ".join(lines[-12:])

    def _end_all(self) -> None:
        self.end_load()
        self._daemon.send_signal(signal.SIGCONT)
        self._daemon.send_signal(signal.SIGINT)
        self._daemon.wait()

    def _remove_memory(self) -> None:
        for segment in self._segments():
            segment.unlink(missing_ok=True)
