"""The processes on a card as a daemon's status lists them, from the stand-in NVML under the real nvidia-ml-py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..daemon_process import Daemon
from .gauges.cards import GIB, Card, Cards, compiled
from .test_hanging_gauges import preload

CARD = "0000:65:00.0"
NO_PROCESS = 4194305
"""Above the largest pid that Linux gives."""


def test_status_lists_every_process_on_a_card_clients_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a name only where the daemon sees the pids of the host."""
    cards, listing = Cards(tmp_path / "cards", [Card(10 * GIB)]), tmp_path / "processes"
    cards.show()
    listing.write_text(f"c 0 {os.getpid()} {9 * GIB}\nc 0 {NO_PROCESS} {GIB}\n")
    monkeypatch.setenv("STANDIN_CARDS", str(cards.file))
    monkeypatch.setenv("STANDIN_PROCESSES", str(listing))
    library = compiled("nvml.c", tmp_path / "nvml/libnvidia-ml.so.1")
    with Daemon(gauges_device="nvidia", gauges_host="none", gauges_sample_s="1s") as daemon:
        daemon.before = (f"{preload.__module__}:{preload.__name__}", {"library": str(library)})
        daemon.start()
        daemon.client()
        (client,) = (row["client"] for row in daemon.client_rows())
        sees = os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"
        name = Path("/proc/self/comm").read_text().strip()
        own = {"name": name if sees else None, "client": client if sees else None}
        daemon.until(lambda status: status["governor"]["gauges"], "the first sample")
        (gauge,) = daemon.status()["governor"]["gauges"]
        assert gauge["processes"] == [
            {"pid": os.getpid(), "bytes": 9 * GIB, "seen": sees, **own},
            {"pid": NO_PROCESS, "bytes": GIB, "seen": sees, "name": None, "client": None},
        ]
