"""The processes on a card, as status lists them."""

from __future__ import annotations

from pathlib import Path

from tensord.daemon.gauges.sources.processes import PROCESSES_MAX, listed


def test_in_a_pid_namespace_of_its_own_the_daemon_names_no_process(tmp_path: Path) -> None:
    """The host's pid 11 is another process there."""
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026532500]")
    (tmp_path / "proc/11").mkdir()
    (tmp_path / "proc/11/comm").write_text("python3\n")
    assert listed({11: 5}, tmp_path) == {"processes": [{"pid": 11, "name": None, "bytes": 5, "seen": False}]}


def test_only_the_processes_with_the_most_bytes_are_listed(tmp_path: Path) -> None:
    rows = listed({pid: pid for pid in range(1, 2 * PROCESSES_MAX)}, tmp_path)["processes"]
    assert [row["pid"] for row in rows] == list(range(2 * PROCESSES_MAX - 1, PROCESSES_MAX - 1, -1))
