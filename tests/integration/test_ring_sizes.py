"""A ring that gets another size, at a start or by `tensorctl limit`: what is kept, what goes, what is seen. And memory
that others have filled: /dev/shm, where some are refused and told; the page cache, which is no pressure.
"""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.errors import NotEnoughMemory
from tensord.ipc.messages import control as messages

from ..daemon_process import MIB, Daemon, some, until
from ..faults.payloads import has, is_payload, key, payload
from ..faults.raw import RawClient
from ..memory_cgroup import memory_cgroup, within

ENTRY_BYTES = 300_000
SMALL, LARGE = 4 * MIB, 16 * MIB
GIB = 1 << 30


def fill(client: tensord.Client, numbers: range, size_bytes: int = ENTRY_BYTES) -> None:
    puts = [client.put(key(number), payload(number, size_bytes)) for number in numbers]
    assert {put.wait(60).state for put in puts} == {"stored"}


def here(client: tensord.Client, numbers: range) -> list[int]:
    """Those of `numbers` that are there, each checked word for word."""
    found = []
    for number in numbers:
        lease = client.get(key(number), verify=True)
        if lease is not None:
            assert is_payload(lease.tree, number)
            found.append(number)
    return found


def allocated_bytes(daemon: Daemon) -> int:
    """What the ring takes of the machine's memory, as the kernel counts it."""
    return daemon.segment("ring").stat().st_blocks * 512


def again(daemon: Daemon, **flags: object) -> Daemon:
    """Restarts it with these flags changed; None takes one away."""
    for name, value in flags.items():
        daemon.flags.pop(name, None)
        if value is not None:
            daemon.flags[name] = value
    return daemon.restart()


def grown(daemon: Daemon, ring_bytes: int) -> None:
    daemon.until(lambda s: s["store"]["resident_bytes"] == ring_bytes, f"{ring_bytes} bytes in memory")
    until(lambda: allocated_bytes(daemon) >= ring_bytes, "their pages")


def limit(daemon: Daemon, limit_bytes: int) -> None:
    with RawClient(daemon.socket, attach=False) as operator:
        answer = operator.ask(lambda number: messages.Limit(number, limit_bytes))
    assert answer.after_bytes == limit_bytes


def test_a_restart_evicts_nothing_because_limits_would_be_derived_otherwise_now() -> None:
    with Daemon(ring_bytes=SMALL, max_entries=6000) as daemon:
        daemon.start()
        fill(daemon.client(), range(5000), 8)
        for _ in range(2):
            # Of 4 MiB 4,096 entries would be derived, and of the memory that is free now a ring of 4 GiB.
            again(daemon, ring_bytes=None, max_entries=None)
            told = daemon.status()
            assert (told["ring_bytes"], told["store"]["max_entries"]) == (SMALL, 6000)
            assert told["configured"] == {"ring_bytes": None, "max_entries": None}
            assert told["store"]["entries"] == 5000
        assert len(here(daemon.client(), range(5000))) == 5000
        assert daemon.store("evictions") == {}


def test_a_ring_that_is_enlarged_keeps_what_it_has_and_takes_more() -> None:
    with Daemon(ring_bytes=SMALL, policy="lru") as daemon:
        client = daemon.start().client()
        fill(client, range(12))
        lease = client.get(key(3))
        again(daemon, ring_bytes=LARGE)
        assert daemon.status()["ring_bytes"] == LARGE
        grown(daemon, LARGE)
        fill(daemon.client(), range(100, 140))
        assert here(daemon.client(), range(12)) == list(range(12))
        daemon.attached(client)
        assert here(client, range(100, 140)) == list(range(100, 140)), "a client from before maps the larger ring"
        assert lease is not None and is_payload(lease.tree, 3)
        batch = client.get_many(np.frombuffer(b"".join(key(n) for n in range(100, 140)), np.uint8).reshape(-1, 32))
        assert batch.found.all()
        del batch, lease
        gc.collect()
        daemon.until(lambda s: s["pins"] == 0, "every pin, those from before too, to be released")
        again(daemon)
        assert len(here(daemon.client(), range(140))) == 52


def test_a_ring_that_is_made_smaller_gives_memory_back_and_keeps_what_fits() -> None:
    with Daemon(ring_bytes=LARGE, policy="lru") as daemon:
        client = daemon.start().client()
        fill(client, range(40))
        held = {number: client.get(key(number)) for number in range(0, 9, 3)}
        again(daemon, ring_bytes=SMALL)
        until(lambda: allocated_bytes(daemon) <= SMALL, "pages given back")
        told = daemon.until(lambda s: s["store"]["used_bytes"] <= SMALL and s, "what is over to go")
        assert (told["ring_bytes"], told["configured"]["ring_bytes"]) == (SMALL, SMALL)
        for number, lease in held.items():
            assert lease is not None and is_payload(lease.tree, number)
        left = here(daemon.client(), range(40))
        assert set(held) <= set(left) and len(left) >= SMALL // ENTRY_BYTES - 2
        with daemon.client() as writer:
            fill(writer, range(100, 120))
            refused = writer.put(key(500), payload(500, 5 * MIB), wait=True)
            assert refused.state == "refused"
        assert allocated_bytes(daemon) <= SMALL
        for number, lease in held.items():
            assert lease is not None and is_payload(lease.tree, number)
        again(daemon, ring_bytes=None)
        told = daemon.status()
        assert told["ring_bytes"] == SMALL, "a restart without the setting keeps what stands"
        assert allocated_bytes(daemon) <= SMALL
        for ring_bytes in (LARGE // 2, 2 * LARGE):
            again(daemon, ring_bytes=ring_bytes)
            grown(daemon, ring_bytes)
            assert daemon.status()["ring_bytes"] == ring_bytes
            for number, lease in held.items():
                assert lease is not None and is_payload(lease.tree, number)
        fill(daemon.client(), range(200, 290))
        assert here(daemon.client(), range(200, 290)) == list(range(200, 290))


def test_a_ring_that_cannot_be_enlarged_serves_as_it_is_and_says_so() -> None:
    with Daemon(ring_bytes=SMALL) as daemon:
        fill(daemon.start().client(), range(12))
        again(daemon, ring_bytes=8192 * GIB)
        told = daemon.status()
        assert (told["ring_bytes"], told["configured"]["ring_bytes"]) == (SMALL, 8192 * GIB)
        health = daemon.ask(messages.HealthQuery)
        assert not health["healthy"]
        (problem,) = health["problems"]
        assert problem.startswith(f"the ring has {SMALL} of {8192 * GIB} configured bytes. It grows at a start only: ")
        assert "restart the daemon. At its last start: enlarging the ring from" in problem
        assert here(daemon.client(), range(12)) == list(range(12))


def test_views_held_while_the_ring_shrinks_stay_what_they_were(daemon: Daemon) -> None:
    client = daemon.client()
    grown(daemon, LARGE)
    fill(client, range(40))
    held = {number: client.get(key(number)) for number in range(0, 40, 5)}
    limit(daemon, 3 * MIB)
    until(lambda: allocated_bytes(daemon) <= 3 * MIB, "pages given back beside what is held")
    fill(client, range(100, 108))
    for number, lease in held.items():
        assert lease is not None and is_payload(lease.tree, number)
    del lease
    held.clear()
    limit(daemon, MIB)
    until(lambda: allocated_bytes(daemon) <= MIB, "what was held has gone too")


def test_a_client_sees_that_pages_went_before_anything_lies_in_new_ones(daemon: Daemon) -> None:
    """A GPU's driver that has registered the ring keeps the pages that went."""
    client = daemon.client()
    grown(daemon, LARGE)
    fill(client, range(40))
    view = some(client.link.view)
    ring = view._ring
    counted = ring.punches
    assert counted > 0 and ring.is_resident(0, LARGE)
    fill(client, range(100, 140))
    assert ring.punches == counted, "pages that are used again are the same pages"
    limit(daemon, SMALL)
    daemon.until(lambda status: status["store"]["resident_bytes"] <= SMALL, "pages given back")
    assert ring.punches > counted and not ring.is_resident(0, LARGE)
    counted = ring.punches
    limit(daemon, LARGE)
    grown(daemon, LARGE)
    fill(client, range(200, 280))
    assert ring.punches == counted and ring.is_resident(0, SMALL)
    daemon.kill()
    daemon.start()
    until(lambda: ring.punches > counted, "the next daemon counts its start")


PAGE_BYTES = 4096


def with_shm(options: str) -> list[str]:
    """What a program is run under, so that its /dev/shm is its own. Skips the test where that cannot be."""
    prefix = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces for this user here")
    return prefix


@pytest.fixture
def confined() -> Iterator[Daemon]:
    """A daemon whose /dev/shm has 8 MiB and 32 files."""
    with Daemon(ring_bytes=2 * MIB, max_entries=256) as daemon:
        daemon.prefix = with_shm("size=8m,nr_inodes=32")
        yield daemon.start()


def shm(daemon: Daemon) -> Path:
    return Path(f"/proc/{daemon.pid}/root/dev/shm")


def fill_bytes(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        for _ in range(10_000):
            filler.write(bytes(PAGE_BYTES))
    assert not os.statvfs(folder).f_bavail


def fill_files(folder: Path) -> None:
    (folder / "filler").mkdir()
    with suppress(OSError):
        for number in range(1000):
            (folder / "filler" / str(number)).touch()
    assert not os.statvfs(folder).f_favail


def empty(folder: Path) -> None:
    filler = folder / "filler"
    if filler.is_dir():
        for path in filler.iterdir():
            path.unlink()
        filler.rmdir()
    else:
        filler.unlink()


def problems(daemon: Daemon) -> list[str]:
    told = daemon.ask(messages.HealthQuery)
    assert told["healthy"] == (not told["problems"])
    found: list[str] = told["problems"]
    return found


@pytest.mark.root
@pytest.mark.parametrize("fill", [fill_bytes, fill_files])
def test_a_full_shm_is_reported_while_it_lasts_and_disturbs_no_attached_client(
    confined: Daemon, fill: Callable[[Path], None]
) -> None:
    attached = confined.client()
    confined.until(lambda s: s["ring_ready_bytes"] == s["ring_bytes"], "the whole ring")
    assert attached.put(key(1), payload(1), wait=True).state == "stored"
    assert problems(confined) == []
    for episode in (1, 2):
        fill(shm(confined))
        (problem,) = problems(confined)
        assert "/dev/shm" in problem and "new clients are refused" in problem and "remount" in problem
        for _ in range(3):
            with pytest.raises(NotEnoughMemory, match="/dev/shm"):
                RawClient(confined.socket)
        assert confined.log.count("new clients are refused: no memory for a lane") == episode
        assert attached.put(key(10 + episode), payload(10 + episode), wait=True).state == "stored"
        assert has(attached, 1)
        assert confined.status()["clients"] >= 1
        empty(shm(confined))
        assert problems(confined) == []
        with RawClient(confined.socket):
            pass
        confined.until(lambda s: s["lanes"] == 1, "its lane to be removed")


@pytest.mark.root
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("size=8m", ("a ring of 16777216 bytes with its index needs ", "free in /dev/shm", "ring_bytes")),
        ("ro", ("Read-only file system", "mount -o remount,rw /dev/shm")),
    ],
)
def test_a_daemon_without_room_in_shm_says_so_and_what_to_do(options: str, says: tuple[str, ...]) -> None:
    with Daemon(ring_bytes=16 * MIB) as daemon:
        daemon.prefix = with_shm(options)
        told = daemon.refused()
        assert all(each in told for each in says) and "Traceback" not in told, told


# ---- files that are read beside a daemon, within its memory limit

LIMIT_BYTES = 256 * MIB


def weights(path: Path, size_bytes: int) -> Path:
    """A file of which nothing is in memory."""
    with path.open("wb") as file:
        for _ in range(size_bytes // MIB):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    kind = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()
    if kind == "tmpfs":
        pytest.skip(f"{path} is on a tmpfs, whose files cannot leave memory")
    return path


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_are_read_again_and_again_are_no_pressure_on_the_ring(version: int, tmp_path: Path) -> None:
    with (
        memory_cgroup(version, LIMIT_BYTES) as folder,
        Daemon(ring_bytes=32 * MIB, memory_prefault=True, gauges_device="none", gauges_sample_s=0.25) as daemon,
    ):
        daemon.prefix = within(folder)
        daemon.start()
        daemon.until(lambda status: status["ring_ready_bytes"] == status["ring_bytes"], "the whole ring")
        client = daemon.client()
        charged = folder / ("memory.usage_in_bytes" if version == 1 else "memory.current")
        # All of it fits, so that the second read finds it in memory: from then on it is active page cache.
        file = weights(tmp_path / "weights", int(0.94 * LIMIT_BYTES) - int(charged.read_text()))
        for _ in range(2):
            subprocess.run(within(folder, ["cat", str(file)]), stdout=subprocess.DEVNULL, check=True)

        seen: list[dict[str, Any]] = []

        def sampled() -> bool:
            """Whether two samples have come: the second one began after the files were read."""
            (gauge,) = daemon.status()["governor"]["gauges"]
            if gauge not in seen:
                seen.append(gauge)
            return len(seen) > 2

        until(sampled, "two samples of the host's gauge")
        gauge = seen[-1]
        assert gauge["total_bytes"] == LIMIT_BYTES
        assert gauge["used_bytes"] < 0.7 * LIMIT_BYTES
        assert gauge["mode"] == "relaxed"
        assert daemon.store("withdrawn_bytes") == 0
        assert int(charged.read_text()) > 0.75 * LIMIT_BYTES, "the page cache was to fill the cgroup"
        assert client.put(b"k" * 32, np.zeros(MIB, np.uint8), wait=True).state == "stored"
