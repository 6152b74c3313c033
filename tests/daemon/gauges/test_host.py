from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensord.daemon.gauges.reading import GaugeFailed, Reading
from tensord.daemon.gauges.sources.host import HostSource
from tensord.ipc.messages.modes import HOST_GAUGE, Tier

from .conformance import AnySource, Stage

MIB = 1 << 20
GIB = 1 << 30
MEMINFO = "MemTotal:       67108864 kB\nMemFree:         1048576 kB\nMemAvailable:   50331648 kB\nBuffers:  30260 kB\n"


class Machine:
    """/proc and a cgroup tree, in the formats that the kernel writes."""

    def __init__(self, folder: Path, own: str = "/") -> None:
        self.root, self.proc = folder / "cgroup", folder / "proc"
        self.root.mkdir()
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(MEMINFO)
        (self.proc / "self/cgroup").write_text(f"4:memory:/old\n0::{own}\n")

    def cgroup(self, path: str, limit: str, current: int, cache: int = 0) -> Path:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(f"{current}\n")
        half = cache // 2
        (folder / "memory.stat").write_text(f"anon 1\nfile 2\ninactive_file {half}\nactive_file {cache - half}\n")
        return folder

    def read(self) -> Reading:
        result = HostSource(self.root, self.proc).read(0.0)
        assert set(result) == {"host"}
        reading = result["host"]
        assert isinstance(reading, Reading)
        return reading


@pytest.mark.parametrize(
    ("own", "cgroups", "expected"),
    [
        pytest.param("/a/b", {"a": ("max", 5), "a/b": ("max", 4)}, (16, 64, "machine"), id="no limit"),
        pytest.param("/a/b", {"a": ("max", 9), "a/b": ("8", 6, 2)}, (4, 8, "cgroup /a/b"), id="without page cache"),
        pytest.param("/a/b", {"a": ("32", 31), "a/b": ("8", 4)}, (31, 32, "cgroup /a"), id="the fullest of all above"),
        pytest.param("/", {"": ("2", 1)}, (1, 2, "cgroup /"), id="a container sees its limit at the root"),
        pytest.param("/a", {"a": ("1024", 1)}, (16, 64, "machine"), id="above the machine's memory"),
    ],
)
def test_the_limit_that_is_nearest_counts(
    tmp_path: Path, own: str, cgroups: dict[str, tuple[Any, ...]], expected: tuple[int, int, str]
) -> None:
    machine = Machine(tmp_path, own)
    for path, (limit, *gib) in cgroups.items():
        machine.cgroup(path, limit if limit == "max" else str(int(limit) * GIB), *(each * GIB for each in gib))
    reading = machine.read()
    assert (reading.used_bytes / GIB, reading.total_bytes / GIB, reading.shown["of"]) == expected


def test_a_limit_of_cgroup_v1_counts_without_page_cache_that_can_be_dropped(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    memory = machine.root / "memory"
    (machine.proc / "self/mountinfo").write_text(f"35 31 0:32 / {memory} rw - cgroup cgroup rw,memory\n")
    (memory / "old").mkdir(parents=True)
    for folder, limit in ((memory / "old", 8 * GIB), (memory, 9223372036854771712)):
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{6 * GIB}\n")
        stat = f"inactive_file 1\nhierarchical_memory_limit {limit}\ntotal_active_file {2 * GIB}\n"
        (folder / "memory.stat").write_text(stat)
    reading = machine.read()
    assert (reading.used_bytes, reading.total_bytes) == (4 * GIB, 8 * GIB)
    assert reading.shown == {"of": "cgroup /old"}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("cgroup/a/memory.current", "garbage"),
        ("cgroup/a/memory.max", "0"),
        ("cgroup/a/memory.max", "-1"),
        ("cgroup/a/memory.stat", None),
        ("proc/meminfo", "MemTotal: 5 kB\n"),
        ("proc/meminfo", ""),
    ],
)
def test_an_unreadable_file_is_a_failure_and_not_a_value(tmp_path: Path, file: str, text: str | None) -> None:
    machine = Machine(tmp_path, "/a")
    machine.cgroup("a", str(2 * GIB), 1 * GIB)
    (tmp_path / file).write_text(text) if text is not None else (tmp_path / file).unlink()
    with pytest.raises(GaugeFailed, match=Path(file).name):
        HostSource(machine.root, machine.proc).read(0.0)


def test_stalls_are_waited_for_where_the_limit_is_and_else_at_the_machine(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "/a")
    source = HostSource(machine.root, machine.proc)
    assert source.pressure_files() == [machine.proc / "pressure/memory"]
    folder = machine.cgroup("a", str(2 * GIB), 1 * GIB)
    assert source.pressure_files() == [folder / "memory.pressure", machine.proc / "pressure/memory"]


def test_this_machine_has_a_reading() -> None:
    reading = HostSource().read(0.0)["host"]
    assert isinstance(reading, Reading)
    assert 0 < reading.used_bytes < reading.total_bytes
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert 64 * MIB < reading.total_bytes <= total_kib * 1024


class Memory(Stage):
    gauge = HOST_GAUGE

    def __init__(self, folder: Path) -> None:
        self.machine = Machine(folder)
        self.source = HostSource(self.machine.root, self.machine.proc)

    def show(self, used_bytes: int, total_bytes: int) -> None:
        total, available = total_bytes // 1024, (total_bytes - used_bytes) // 1024
        (self.machine.proc / "meminfo").write_text(f"MemTotal: {total} kB\nMemAvailable: {available} kB\n")

    def lose(self) -> None:
        (self.machine.proc / "meminfo").write_text("MemFree: 1 kB\n")


class TestSource(AnySource):
    tier = Tier.HOST

    @pytest.fixture
    def set_up(self, tmp_path: Path) -> Stage:
        return Memory(tmp_path)
