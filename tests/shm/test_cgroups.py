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


def test_the_limits_of_version_1_count_too(tmp_path: Path) -> None:
    _write(tmp_path / "proc/7/cgroup", "12:cpuset:/\n9:memory:/docker/ab\n1:name=systemd:/docker/ab\n0::/docker/ab\n")
    root = tmp_path / "cg"
    _write(root / "memory/docker/ab/memory.limit_in_bytes", "1000\n")
    _write(root / "memory/docker/ab/memory.usage_in_bytes", "10\n")
    _write(root / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    _write(root / "memory/memory.usage_in_bytes", "30\n")
    assert list(cgroups(7, root, tmp_path / "proc")) == [Cgroup("/docker/ab", 1000, 10)]


def test_in_a_container_the_limit_of_version_1_stands_at_the_root(tmp_path: Path) -> None:
    _write(tmp_path / "proc/7/cgroup", "9:cpu,memory:/docker/ab\n")
    _write(tmp_path / "cg/memory/memory.limit_in_bytes", "1000\n")
    _write(tmp_path / "cg/memory/memory.usage_in_bytes", "990\n")
    assert list(cgroups(7, tmp_path / "cg", tmp_path / "proc")) == [Cgroup("/", 1000, 990)]
