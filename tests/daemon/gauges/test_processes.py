"""The processes on a card: their names, and the list that the amdgpu driver keeps in /sys."""

from __future__ import annotations

from pathlib import Path

from tensord.daemon.gauges.sources.processes import PROCESSES_MAX, computing, listed
from tensord.daemon.gauges.sources.sysfs import SysfsSource

from .test_sysfs import card

HOST = "pid:[4026531836]"


def proc(root: Path, namespace: str = HOST, **names: str) -> None:
    """/proc with processes: p11="python3"."""
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/pid").symlink_to(namespace)
    for pid, name in names.items():
        (root / "proc" / pid[1:]).mkdir()
        (root / "proc" / pid[1:] / "comm").write_text(f"{name}\n")


def node(root: Path, number: int, gpu: int, location: int = 0, domain: int = 0) -> None:
    """A node of kfd's topology; `gpu` 0: a processor."""
    folder = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    folder.mkdir(parents=True)
    (folder / "gpu_id").write_text(f"{gpu}\n")
    (folder / "properties").write_text(f"cpu_cores_count 0\nlocation_id {location}\ndomain {domain}\n")


def uses(root: Path, pid: int, **used: int) -> None:
    """A process in kfd's list, with bytes by GPU: g7=1000."""
    folder = root / f"sys/class/kfd/kfd/proc/{pid}"
    folder.mkdir(parents=True)
    for gpu, size_bytes in used.items():
        (folder / f"vram_{gpu[1:]}").write_text(f"{size_bytes}\n")


def test_the_processes_that_compute_on_an_amd_card_are_shown_with_their_bytes(tmp_path: Path) -> None:
    card(tmp_path, 0, "0000:c1:00.0", "9000")
    card(tmp_path, 1, "0001:c4:00.0", "2000")
    node(tmp_path, 0, 0)
    node(tmp_path, 1, 7, 0xC100)
    node(tmp_path, 2, 8, 0xC400, 1)
    uses(tmp_path, 11, g7=1000, g8=0)
    uses(tmp_path, 12, g7=8000, g8=2000)
    proc(tmp_path, p11="python3", p12="ollama")
    readings = SysfsSource(tmp_path).read(0.0)
    shown = {name: reading.shown["processes"] for name, reading in readings.items()}  # type: ignore[union-attr]
    first, second = {"pid": 11, "name": "python3", "seen": True}, {"pid": 12, "name": "ollama", "seen": True}
    assert shown == {
        "0000:c1:00.0": [{**second, "bytes": 8000}, {**first, "bytes": 1000}],
        "0001:c4:00.0": [{**second, "bytes": 2000}],
    }


def test_partitions_that_share_an_address_are_counted_as_their_gauges_are(tmp_path: Path) -> None:
    for number in range(3):
        node(tmp_path, number, 7 + number, 0xC100)
        uses(tmp_path, 11 + number, **{f"g{7 + number}": 100 + number})
    assert computing(tmp_path) == {f"0000:c1:00.{number}": {11 + number: 100 + number} for number in range(3)}


def test_without_the_list_no_process_is_shown(tmp_path: Path) -> None:
    assert computing(tmp_path) is None
    card(tmp_path, 0, "0000:c1:00.0", "9000")
    (reading,) = SysfsSource(tmp_path).read(0.0).values()
    assert not reading.shown  # type: ignore[union-attr]


def test_in_a_pid_namespace_of_its_own_the_daemon_names_no_process(tmp_path: Path) -> None:
    """The host's pid 11 is another process there."""
    proc(tmp_path, "pid:[4026532500]", p11="python3")
    assert listed({11: 5}, tmp_path) == {"processes": [{"pid": 11, "name": None, "bytes": 5, "seen": False}]}


def test_only_the_processes_with_the_most_bytes_are_listed(tmp_path: Path) -> None:
    rows = listed({pid: pid for pid in range(1, 2 * PROCESSES_MAX)}, tmp_path)["processes"]
    assert [row["pid"] for row in rows] == list(range(2 * PROCESSES_MAX - 1, PROCESSES_MAX - 1, -1))
