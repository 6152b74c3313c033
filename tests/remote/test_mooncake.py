"""Mooncake Store behind the rings: the suite of all stores, and three hosts around one master."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts_network import HUB, Network

from ..daemon.remote_stores.servers import MooncakeMaster, mooncake_master
from ..daemon_process import until
from .hosts import MIB, Host

ROOT = Path(__file__).parents[2]
BYTES = [*[100_000] * 5, 20 * MIB]
SUITE = "tests/daemon/remote_stores/mooncake_suite.py"
pytestmark = pytest.mark.skipif(mooncake_master() is None, reason="`make test-remote` installs Mooncake")


def test_mooncake_keeps_the_promises_of_all_stores() -> None:
    run = f"ip link set lo up && exec {sys.executable} -m pytest -q -p no:cacheprovider {SUITE}"
    ran = subprocess.run(["unshare", "-n", "sh", "-c", run], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:]


def test_what_one_host_has_computed_the_others_read_from_its_memory(
    tmp_path: Path, network: Network, around: Callable[[str], list[Host]]
) -> None:
    with MooncakeMaster(tmp_path, address=HUB, prefix=network.within(network.hub)) as master:
        first, *others = hosts = around(f"mooncake://{master.address}?segment=64MiB")
        for host in hosts:
            # The first calls connect, which takes longer than most entries take to compute.
            until(lambda host=host: host.misses() and (host.remote()["answer_s"] or 1.0) < 0.05, "the store answers")  # type: ignore[misc]
            host.idle()
        before = first.remote().get("written", 0)
        for number in range(6):
            assert first.get(number, BYTES[number])

        def written() -> bool:
            # What was refused, for want of room that other hosts had not lent yet, is offered again once it is used.
            assert not any(first.get(number, BYTES[number]) for number in range(6)), "they are in the ring"
            return bool(first.remote().get("written", 0) >= before + 6)

        until(written, "all entries to be written")
        for host in others:
            assert not any(host.get(number, BYTES[number]) for number in range(6))
            assert host.remote()["fetched"] == 6
            assert host.remote()["corrupt"] == 0
