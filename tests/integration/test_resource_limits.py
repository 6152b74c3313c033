"""Daemons under limits of the service manager or the shell: one line says which limit, its value, and what to do."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

import tensord
from tensord.ipc.messages.schema import PREFIX_BYTES_MAX

from ..daemon_process import MIB, PATIENCE_S, Daemon
from ..faults.payloads import key, payload
from ..processes import Child, Stage


def limit(name: str, value: int) -> None:
    """Lowers a limit of this process, which becomes a daemon."""
    number = getattr(resource, name)
    resource.setrlimit(number, (value, resource.getrlimit(number)[1]))


def leave_memory(free_bytes: int) -> None:
    """Limits the addresses of this process, which becomes a daemon, to what it has and `free_bytes` more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit("RLIMIT_AS", pages * resource.getpagesize() + free_bytes)


def limited(daemon: Daemon, name: str, value: int) -> Daemon:
    daemon.before = (f"{__name__}:limit", {"name": name, "value": value})
    return daemon


def only_line(said: str) -> str:
    (line,) = said.splitlines()
    return line


@pytest.mark.parametrize("files", [8, 16, 20, 24, 28, 47])
def test_a_daemon_that_may_open_too_few_files_says_how_many_it_needs(files: int) -> None:
    with limited(Daemon(), "RLIMIT_NOFILE", files) as daemon:
        line = only_line(daemon.refused())
        assert f"RLIMIT_NOFILE is {files}" in line and "48" in line and "ulimit -n" in line, line
        assert not daemon.segments()


@pytest.mark.parametrize("free_bytes", [6 * MIB, 12 * MIB])
def test_a_daemon_without_memory_for_its_threads_says_so(free_bytes: int) -> None:
    with Daemon(ring_bytes=2 * MIB) as daemon:
        daemon.before = (f"{__name__}:leave_memory", {"free_bytes": free_bytes})
        assert daemon.spawn().wait(PATIENCE_S) == 1
        assert "no memory or no thread is left" in daemon.log and "RLIMIT_AS is " in daemon.log
        assert "fault of its own" not in daemon.log


def test_a_daemon_that_cannot_map_its_ring_names_its_size_and_the_limit() -> None:
    with Daemon(ring_bytes=256 * MIB) as daemon:
        daemon.before = (f"{__name__}:leave_memory", {"free_bytes": 200 * MIB})
        line = only_line(daemon.refused())
        assert f"the ring of {256 * MIB} bytes cannot be mapped" in line, line
        assert "(RLIMIT_AS)" in line and "ulimit -v" in line and "smaller ring_bytes" in line, line


def lacks_addresses(stage: Stage, path: Path, free_bytes: int) -> Any:
    client_of = tensord.Client  # imported before the limit
    leave_memory(free_bytes)
    limit_bytes, hard = resource.getrlimit(resource.RLIMIT_AS)
    client = client_of(path, timeout_s=PATIENCE_S)
    found, put = client.get(key(1)) is None, client.put(key(1), payload(1), wait=True)
    computed = client.get_or_compute(key(2), lambda: 2)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    again = client.wait_connected(PATIENCE_S) and client.put(key(3), payload(3), wait=True).state
    return limit_bytes, found, put.state, type(put.error).__name__, str(put.error), computed, again


def test_a_client_that_cannot_map_the_ring_names_its_size_and_the_limit_until_it_can() -> None:
    with Daemon(ring_bytes=256 * MIB) as daemon, Child(lacks_addresses, daemon.start().socket, 200 * MIB) as child:
        limit_bytes, missed, state, error, text, computed, again = child.hear()
    assert (missed, state, error, computed) == (True, "lost", "ProcessLimit", 2)
    assert f"the ring of {256 * MIB} bytes cannot be mapped" in text, text
    assert f"{limit_bytes} bytes in all (RLIMIT_AS)" in text and "ulimit -v" in text and "smaller ring_bytes" in text
    assert again == "stored"


def needs_an_inbox(stage: Stage, path: Path, limited_by: str) -> Any:
    """Two puts under a limit, and one after it was lifted."""
    client = tensord.Client(path, timeout_s=PATIENCE_S)
    assert client.wait_connected(PATIENCE_S)
    name = getattr(resource, limited_by)
    before = resource.getrlimit(name)
    if limited_by == "RLIMIT_AS":
        leave_memory(4 * MIB)
    else:
        resource.setrlimit(name, (MIB, before[1]))
    put, computed = client.put(key(1), payload(1), wait=True), client.get_or_compute(key(2), lambda: 2)
    resource.setrlimit(name, before)
    return put.state, str(put.error), computed, client.put(key(3), payload(3), wait=True).state


@pytest.mark.parametrize("limited_by", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_a_client_that_may_make_no_inbox_names_the_limit_until_it_may(limited_by: str) -> None:
    with (
        Daemon(write_in_place="off") as daemon,
        Child(needs_an_inbox, daemon.start().socket, limited_by) as child,
    ):
        state, error, computed, again = child.hear()
    size_bytes = 16 * MIB + PREFIX_BYTES_MAX
    assert state == "refused" and f"no inbox of {size_bytes} bytes can be made" in error, error
    assert f"({limited_by})" in error and "ulimit" in error
    assert (computed, again) == (2, "stored")


@pytest.mark.parametrize("size_bytes", [1 << 10, 100_000, 4 * MIB])
def test_a_daemon_that_may_make_only_smaller_files_than_its_ring_names_both_sizes(size_bytes: int) -> None:
    with limited(Daemon(ring_bytes=8 * MIB), "RLIMIT_FSIZE", size_bytes) as daemon:
        line = only_line(daemon.refused())
        assert f"{8 * MIB} bytes" in line and f"{size_bytes} bytes (RLIMIT_FSIZE)" in line and "ulimit -f" in line, line
        assert not daemon.segments()


def test_a_daemon_whose_log_cannot_be_written_any_more_serves_on() -> None:
    with limited(Daemon(ring_bytes=MIB, log_level="debug"), "RLIMIT_FSIZE", 4 * MIB) as daemon:
        (daemon.folder / "log").write_bytes(b"\n" * (4 * MIB))
        daemon.start()
        assert daemon.client().put(key(1), payload(1), wait=True).state == "stored"
        assert daemon.interrupt() == 0
