"""Upgrades: this release beside the one before, each as the daemon and as the client, with real processes of both."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

import tensord
from tensord.errors import LayoutMismatch
from tensord.ipc.messages import LatencyQuery
from tensord.ipc.schema import PROTOCOL_VERSION
from tensord.shm.layout import LAYOUT_VERSION

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..public.pages import ROOT
from .releases import FORMER_LAYOUT, FORMER_PROTOCOL, Release, last_release

RELEASES: Final = sorted({last_release(), FORMER_PROTOCOL})
SIZES: Final = {"small": 1000, "large": 2 * MIB, "huge": 33 * MIB}
"""In bytes: through the inbox; in place since protocol version 4; in place before it."""

# What a program of either release does: a line of JSON for each line that it reads.
CLIENT: Final = """
import json, sys
import numpy as np
import tensord

def key(name): return name.encode().ljust(16, b"0") + b"key of a program"
def array(name, size): return np.full(size, sum(name.encode()) % 251, np.uint8)

client = tensord.Client(sys.argv[1], timeout_s=30)
lease = None
for line in sys.stdin:
    act, name, size = json.loads(line)
    try:
        if act == "attach":
            told = client.wait_connected(30)
        elif act == "put":
            put = client.put(key(name), array(name, size), wait=True, timeout_s=30)
            told = put.state if put.error is None else f"{type(put.error).__name__}: {put.error}"
        elif act == "get":
            found = client.get(key(name))
            told = None if found is None else bool((found.tree == array(name, size)).all())
            del found
        elif act == "hold":
            lease = client.get(key(name))
            told = lease is not None
        elif act == "held":
            told = bool((lease.tree == array(name, size)).all())
        elif act == "compute":
            computed = []
            def compute():
                computed.append(name)
                return array(name, size)
            found = client.get_or_compute(key(name), compute)
            told = [bool((found == array(name, size)).all()), len(computed)]
            del found
        elif act == "writes":
            told = any(" rw-s " in line and line.endswith(".ring\\n") for line in open("/proc/self/maps"))
        elif act == "invalidate":
            ns = tensord.Namespace(model="m", revision="1", dtype="float32", processor="none")
            told = client.invalidate(ns).model
        elif act == "status":
            told = client.status()["protocol"]
        elif act == "epoch":
            told = client.status()["epoch"]
        elif act == "version":
            told = [tensord.__file__, tensord.__version__]
    except tensord.TensordError as error:
        told = f"{type(error).__name__}: {error}"
    print(json.dumps(told), flush=True)
"""


class Program:
    """A process with a client of one release."""

    def __init__(self, daemon: Daemon, release: Path) -> None:
        with (daemon.folder / "program").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CLIENT, str(daemon.socket)],
                cwd=daemon.folder,
                env={"PYTHONPATH": str(release)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._told = daemon.folder / "program"

    def does(self, act: str, name: str = "", size: int = 0) -> Any:
        """What it says of one act."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([act, name, size]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._told.read_text()
        return json.loads(line)

    def attached_to(self, epoch: int) -> None:
        """Waits until it is attached to the daemon of that incarnation."""
        until(lambda: self.does("epoch") == epoch, f"it to attach to epoch {epoch}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def program(daemon: Daemon, release: Path) -> Iterator[Program]:
    made = Program(daemon, release)
    try:
        yield made
    finally:
        made.close()


def runs(daemon: Daemon, folder: Path | None) -> None:
    """From its next start on the daemon is the one of the release in `folder`; None: of this release."""
    daemon.prefix = [] if folder is None else ["env", f"--chdir={daemon.folder}", f"PYTHONPATH={folder}"]


@pytest.fixture(params=RELEASES, ids=lambda release: release.name)
def former(request: pytest.FixtureRequest) -> Release:
    release = request.param
    assert isinstance(release, Release)
    assert release.folder.is_dir()
    return release


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(ring_bytes=128 * MIB) as daemon:
        yield daemon


def shares(one: Program, other: Program) -> None:
    """Each of two programs reads what the other has stored, and only one computes."""
    for writer, reader, name in ((one, other, "first"), (other, one, "second")):
        for kind, size in SIZES.items():
            assert writer.does("put", f"{name} {kind}", size) == "stored", kind
            assert reader.does("get", f"{name} {kind}", size) is True, kind
        assert writer.does("compute", f"{name} once", 5000) == [True, 1]
        assert reader.does("compute", f"{name} once", 5000) == [True, 0]


def stores(program: Program, name: str, size: int) -> None:
    """After a restart: a put that met the end of the daemon before is lost, and repeated."""
    until(lambda: program.does("put", name, size) in ("stored", "existed"), f"{name} to be stored")


def test_clients_of_the_release_before_work_with_this_daemon(daemon: Daemon, former: Release) -> None:
    daemon.start()
    with program(daemon, former.folder) as old, program(daemon, ROOT) as new:
        assert old.does("version")[0].startswith(str(former.folder))
        assert (old.does("attach"), new.does("attach")) == (True, True)
        assert old.does("status") == PROTOCOL_VERSION
        shares(old, new)
    assert "protocol error" not in daemon.log


def test_clients_work_with_a_daemon_of_the_release_before(daemon: Daemon, former: Release) -> None:
    runs(daemon, former.folder)
    daemon.start()
    with program(daemon, former.folder) as old, program(daemon, ROOT) as new:
        assert (old.does("attach"), new.does("attach")) == (True, True)
        if former.protocol is not None:
            assert new.does("status") == former.protocol
        shares(old, new)


def test_entries_views_and_clients_of_both_releases_outlive_an_upgrade_and_its_undoing(
    daemon: Daemon, former: Release
) -> None:
    runs(daemon, former.folder)
    daemon.start()
    with program(daemon, former.folder) as old, program(daemon, ROOT) as new:
        for each, name in ((old, "of the old"), (new, "of the new")):
            assert each.does("put", name, SIZES["large"]) == "stored"
        assert old.does("hold", "of the new") and new.does("hold", "of the old")
        for epoch, folder in enumerate((None, former.folder), 2):
            daemon.terminate()
            runs(daemon, folder)
            daemon.start()
            for each in (old, new):
                each.attached_to(epoch)
                for name in ("of the old", "of the new"):
                    assert each.does("get", name, SIZES["large"]) is True
                stores(each, f"more {epoch} {each is old}", SIZES["large"])
            assert old.does("held", "of the new", SIZES["large"]) and new.does("held", "of the old", SIZES["large"])


def test_tensorctl_orders_a_daemon_of_the_release_before(daemon: Daemon, former: Release) -> None:
    runs(daemon, former.folder)
    client = daemon.start().client()
    assert client.put(b"k" * 32, 1, wait=True).state == "stored"
    words = [sys.executable, "-m", "tensord.client.ctl", "--socket", str(daemon.socket)]
    for command, said in ((["status"], "entries +1 of"), (["evict", "6b" * 32], ""), (["doctor"], "both|protocols")):
        told = subprocess.run([*words, *command], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
        assert re.search(said, told.stdout), told.stdout + told.stderr
        assert "FAIL" not in "".join(line for line in told.stdout.splitlines() if "versions" in line)
    assert not client.contains(b"k" * 32)


def test_a_process_that_wrote_in_place_before_an_upgrade_is_told_to_upgrade_too(daemon: Daemon) -> None:
    """A client of protocol version 3 keeps its writable mapping: a put in place says why it is refused."""
    numbers = count()
    runs(daemon, FORMER_PROTOCOL.folder)
    daemon.start()
    with program(daemon, FORMER_PROTOCOL.folder) as old:

        def writes() -> bool:
            """A put that gets no span in time goes through the inbox, as on a busy machine."""
            assert old.does("put", f"in place {next(numbers)}", SIZES["huge"]) == "stored"
            return bool(old.does("writes"))

        until(writes, "a put in place")
        daemon.terminate()
        runs(daemon, None)
        daemon.start()
        old.attached_to(2)
        refused = re.compile(r"LimitReached: .*version 3.*version 4.*same release")
        # For a second after a put that got no span in time it writes nothing in place.
        until(lambda: refused.match(old.does("put", f"again {next(numbers)}", SIZES["huge"])), "a put in place")
        assert old.does("put", "small", SIZES["small"]) == "stored"


def test_a_ring_of_another_layout_is_set_aside_with_both_versions_named(daemon: Daemon) -> None:
    runs(daemon, FORMER_LAYOUT.folder)
    daemon.start()
    with program(daemon, FORMER_LAYOUT.folder) as old:
        assert old.does("put", "of the old", SIZES["large"]) == "stored"
        assert old.does("hold", "of the old")
        with tensord.Client(daemon.socket, required=False, timeout_s=PATIENCE_S) as client:
            assert not client.wait_connected(0.5)
            with pytest.raises(LayoutMismatch, match=f"version 4, this tensord reads {LAYOUT_VERSION}.*same release"):
                client.invalidate(tensord.Namespace(model="m", revision="1", dtype="float32", processor="none"))
        daemon.terminate()
        runs(daemon, None)
        new = daemon.start().client()
        assert f"layout version 4, this release reads {LAYOUT_VERSION}" in daemon.log
        assert daemon.store("entries") == 0
        assert new.put(b"k" * 32, 1, wait=True).state == "stored"
        assert old.does("held", "of the old", SIZES["large"])
        why = f"LayoutMismatch.*version {LAYOUT_VERSION}\\b.* 4\\b"
        until(lambda: re.search(why, str(old.does("invalidate"))), "it to say why it cannot attach")
        assert old.does("get", "of the old", SIZES["large"]) is True


def test_a_client_of_the_release_before_times_no_hits_and_one_of_this_release_beside_it_does(
    daemon: Daemon, former: Release
) -> None:
    runs(daemon, None)
    daemon.start()

    def timed() -> int:
        return sum(daemon.ask(LatencyQuery)["hits"]["counts"])

    with program(daemon, former.folder) as old, program(daemon, ROOT) as new:
        assert old.does("put", "x", SIZES["small"]) == "stored"
        for _ in range(200):
            assert old.does("get", "x", SIZES["small"]) is True
        until(lambda: daemon.store("hits") == 200, "its hits to be counted")
        assert timed() == 0
        until(lambda: new.does("get", "x", SIZES["small"]) is True and timed() > 0, "a hit to be timed")
