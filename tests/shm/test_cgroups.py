"""The memory limits that apply to a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensord.shm.ring.cgroups import Cgroup, available_bytes, cgroups

MIB = 1 << 20
UNLIMITED = 9223372036854771712


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _v1(folder: Path, limit: int, used: int, hierarchical: int | None = None) -> None:
    _write(folder / "memory.limit_in_bytes", f"{limit}\n")
    _write(folder / "memory.usage_in_bytes", f"{used}\n")
    stat = f"inactive_file 1\nhierarchical_memory_limit {limit if hierarchical is None else hierarchical}\n"
    _write(folder / "memory.stat", stat)


def _mounted(proc: Path, *mounts: tuple[Path, str, str, str]) -> None:
    lines = [
        f"{number} 31 0:{number} {root} {point} rw,nosuid shared:9 - {kind} {kind} rw,{options}\n"
        for number, (point, root, kind, options) in enumerate(mounts, 32)
    ]
    _write(proc / "self/mountinfo", "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + "".join(lines))


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


def test_the_limits_of_cgroup_v1_count_from_the_own_cgroup_upwards(tmp_path: Path) -> None:
    proc, memory = tmp_path / "proc", tmp_path / "cg/memory"
    _write(proc / "self/cgroup", "8:pids:/a\n5:cpu,memory:/a/b\n1:name=systemd:/a\n0::/\n")
    _mounted(
        proc,
        (tmp_path / "cg/unified", "/", "cgroup2", ""),
        (tmp_path / "cg/pids", "/", "cgroup", "pids"),
        (memory, "/", "cgroup", "cpu,memory"),
    )
    _v1(memory / "a/b", 1000, 10)
    _v1(memory / "a", 800, 600)
    _v1(memory, UNLIMITED, 5000)
    assert list(cgroups(None, tmp_path / "cg", proc)) == [Cgroup("/a/b", 1000, 10), Cgroup("/a", 800, 600)]


def test_a_container_reads_its_limit_of_cgroup_v1_at_the_mount_that_it_sees(tmp_path: Path) -> None:
    """The membership is the host's, and so is the root of the mount, in whose place the container's folder stands."""
    proc, memory = tmp_path / "proc", tmp_path / "with space/memory"
    _write(proc / "self/cgroup", "4:memory:/docker/0123\n")
    _mounted(proc, (Path(str(memory).replace(" ", "\\040")), "/docker/0123", "cgroup", "memory"))
    _v1(memory, UNLIMITED, 300, hierarchical=700)
    assert list(cgroups(None, tmp_path / "cg", proc)) == [Cgroup("/", 700, 300)], "the limit of one that is not seen"


def test_a_membership_outside_of_the_mount_is_read_at_the_mount(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cg"
    _write(proc / "self/cgroup", "0::/../../elsewhere\n")
    _mounted(proc, (root, "/", "cgroup2", ""))
    _write(root / "memory.max", "5000\n")
    _write(root / "memory.current", "30\n")
    assert list(cgroups(None, tmp_path / "nowhere", proc)) == [Cgroup("/", 5000, 30)]


# The lines of memory.stat that count, and beside it memory.usage_in_bytes or memory.current, read from real cgroups of
# 300 MiB. In `v1` (Linux 6.18) and `v2` (Linux 6.1) a process had 30 MiB of its own and 40 MiB in /dev/shm, had locked
# 20 MiB of a file, had written 25 MiB of another one, and had read a third one of 120 MiB twice. In v1 5 MiB of the 25
# were clean already; 5,279,744 bytes were the kernel's. In v2 the process had also made 8,000 files.
RECORDED = Path(__file__).with_name("recorded")
V1_NAMES = ("total_rss", "total_shmem", "total_unevictable", "total_dirty", "total_writeback")
V2_NAMES = ("anon", "shmem", "unevictable", "file_dirty", "file_writeback", "slab_unreclaimable", "pagetables")


@pytest.mark.parametrize(
    ("name", "version", "charged_bytes", "stays", "kernel_bytes"),
    [
        ("v1", 1, 314_421_248, V1_NAMES, 5_279_744),
        ("v2", 2, 266_616_832, V2_NAMES, 0),
    ],
)
def test_what_the_kernel_can_take_back_is_not_used(
    tmp_path: Path, name: str, version: int, charged_bytes: int, stays: tuple[str, ...], kernel_bytes: int
) -> None:
    stat = (RECORDED / f"memory.stat.{name}").read_text()
    proc, folder = tmp_path / "proc", tmp_path / "cg"
    _write(proc / "self/cgroup", "4:memory:/\n0::/\n")
    _mounted(proc, (folder, "/", "cgroup", "memory") if version == 1 else (folder, "/", "cgroup2", ""))
    _write(folder / ("memory.limit_in_bytes" if version == 1 else "memory.max"), f"{300 * MIB}\n")
    _write(folder / ("memory.usage_in_bytes" if version == 1 else "memory.current"), f"{charged_bytes}\n")
    _write(folder / "memory.stat", stat)
    (found,) = cgroups(None, tmp_path, proc)
    figures = {line.split()[0]: int(line.split()[1]) for line in stat.splitlines()}
    assert found.used_bytes == pytest.approx(sum(figures[each] for each in stays) + kernel_bytes, abs=MIB)


def test_what_a_cgroup_leaves_is_available_if_it_is_less_than_what_the_machine_has(tmp_path: Path) -> None:
    assert available_bytes() > 0
    _write(tmp_path / "meminfo", "MemTotal: 9 kB\nMemAvailable:       8 kB\n")
    _write(tmp_path / "self/cgroup", "4:memory:/\n")
    _mounted(tmp_path, (tmp_path / "memory", "/", "cgroup", "memory"))
    assert available_bytes(tmp_path) == 8192
    _v1(tmp_path / "memory", limit=7_000, used=1_000)
    assert available_bytes(tmp_path) == 6_000
