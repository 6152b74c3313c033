"""Daemons under limits of the service manager or the shell: one line says which limit, its value, and what to do."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

import tensord

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


@pytest.mark.parametrize("files", [8, 24, 47])
def test_a_daemon_that_may_open_too_few_files_says_how_many_it_needs(files: int) -> None:
    with limited(Daemon(), "RLIMIT_NOFILE", files) as daemon:
        line = only_line(daemon.refused())
        assert f"RLIMIT_NOFILE is {files}" in line and "48" in line and "ulimit -n" in line, line
        assert not daemon.segments()


def lacks_addresses(stage: Stage, path: Path, free_bytes: int) -> Any:
    client_of = tensord.Client  # imported before the limit
    leave_memory(free_bytes)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    client = client_of(path, timeout_s=PATIENCE_S)
    found, put = client.get(key(1)) is None, client.put(key(1), payload(1), wait=True)
    computed = client.get_or_compute(key(2), lambda: 2)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    again = client.wait_connected(PATIENCE_S) and client.put(key(3), payload(3), wait=True).state
    return found, put.state, type(put.error).__name__, str(put.error), computed, again


def test_a_client_that_cannot_map_the_ring_names_its_size_and_the_limit_until_it_can() -> None:
    with Daemon(ring_bytes=256 * MIB) as daemon, Child(lacks_addresses, daemon.start().socket, 200 * MIB) as child:
        missed, state, error, text, computed, again = child.hear()
    assert (missed, state, error, computed) == (True, "lost", "ProcessLimit", 2)
    assert f"the ring of {256 * MIB} bytes cannot be mapped" in text, text
    assert "RLIMIT_AS" in text and "ulimit -v" in text and "smaller ring_bytes" in text
    assert again == "stored"
