"""The memory limits that apply to a process."""

from __future__ import annotations

from pathlib import Path

from tensord.shm.cgroups import Cgroup, cgroups


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_every_limited_cgroup_above_a_process_counts(tmp_path: Path) -> None:
    _write(tmp_path / "proc/7/cgroup", "0::/system.slice/tensord.service\n")
    root = tmp_path / "cg"
    _write(root / "system.slice/tensord.service/memory.max", "1000\n")
    _write(root / "system.slice/tensord.service/memory.current", "10\n")
    _write(root / "system.slice/memory.max", "max\n")
    _write(root / "system.slice/memory.current", "20\n")
    _write(root / "memory.max", "5000\n")
    _write(root / "memory.current", "30\n")
    found = list(cgroups(7, root, tmp_path / "proc"))
    assert found == [Cgroup("/system.slice/tensord.service", 1000, 10), Cgroup("/", 5000, 30)]


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    assert list(cgroups(None, tmp_path / "cg", tmp_path / "proc")) == []
