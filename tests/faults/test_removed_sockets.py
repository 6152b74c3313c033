"""Somebody removes the sockets of a daemon that runs, as a cleaner of /tmp does, or puts something else there."""

from __future__ import annotations

import grp
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensord.ipc import messages

from ..daemon_process import MIB, PATIENCE_S, Daemon, until

NAMES = ("control.sock", "status.sock", "metrics.sock", "page.sock")
OFTEN = {"tensord.daemon.sockets.LOOK_EVERY_S": 0.02}
NEVER = {"tensord.daemon.sockets.LOOK_EVERY_S": 3600.0}
KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon with all four sockets in a folder of their own, which look unlike those of any other settings."""
    with Daemon(socket_mode="0660", status_mode="0666", metrics_mode="0640") as daemon:
        folder = daemon.folder / "run"
        folder.mkdir(0o751)
        folder.chmod(0o751)
        daemon.socket, daemon.status_socket = folder / "control.sock", folder / "status.sock"
        daemon.flags["http"] = folder / "page.sock"
        if os.geteuid() == 0:
            daemon.flags["socket_group"] = next(group.gr_name for group in grp.getgrall() if group.gr_gid)
        daemon.constants = OFTEN
        yield daemon


def looks(folder: Path) -> dict[str, tuple[int, int, int]]:
    """(mode, uid, gid) of the folder and of each socket that is there."""
    found = {}
    for path in (folder, *folder.glob("*.sock")):
        there = path.lstat()
        found[path.name] = (there.st_mode, there.st_uid, there.st_gid)
    return found


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def problems(daemon: Daemon) -> str:
    return "\n".join(daemon.ask(messages.HealthQuery)["problems"])


def _sockets(folder: Path) -> None:
    for name in NAMES:
        (folder / name).unlink()


def _one_by_one(folder: Path) -> None:
    for name in NAMES:
        (folder / name).unlink()
        until((folder / name).is_socket, f"{name} to be made anew")


@pytest.mark.parametrize("remove", [_sockets, _one_by_one, shutil.rmtree])
def test_removed_sockets_are_made_anew_and_attached_clients_never_notice(
    daemon: Daemon, remove: Callable[[Path], None]
) -> None:
    daemon.start()
    folder = daemon.socket.parent
    before = looks(folder)
    modes = {name: stat.S_IMODE(look[0]) for name, look in before.items()}
    assert modes == {
        "run": 0o751,
        "control.sock": 0o660,
        **dict.fromkeys(("status.sock", "page.sock"), 0o666),
        "metrics.sock": 0o640,
    }
    assert os.geteuid() or {look[2] for name, look in before.items() if name != "run"} != {0}, "a group of their own"
    attached = daemon.client(name="attached")
    assert attached.put(KEY, [1, 2], wait=True).state == "stored"
    lease = attached.get(KEY)
    (row,) = daemon.client_rows()
    for _ in range(2):
        remove(folder)
        until(lambda: all(listens(folder / name) for name in NAMES), "the sockets to be made anew")
        assert looks(folder) == before
    assert attached.put(OTHER, [3], wait=True).state == "stored"
    newcomer = daemon.client(name="new")
    found = newcomer.get(OTHER)
    assert found is not None and found.tree == [3]
    assert lease is not None and lease.tree == [1, 2]
    told = next(each for each in daemon.client_rows() if each["name"] == "attached")
    assert (told["client"], told["lane"]) == (row["client"], row["lane"]), "the connection is the same"
    assert problems(daemon) == ""
    for name in NAMES:
        lines = [line for line in daemon.log.splitlines() if "made anew" in line and name in line]
        assert len(lines) == 2, "one line for each time"
    assert daemon.terminate() == 0
    assert list(folder.iterdir()) == [], "a stop removes what was made anew"


def _file(path: Path) -> None:
    path.write_text("mine")


def _old_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize("put", [_file, _old_socket, Path.mkdir])
def test_what_stands_at_a_sockets_path_is_left_alone_and_reported(daemon: Daemon, put: Callable[[Path], None]) -> None:
    daemon.start()
    attached = daemon.client()
    other = daemon.folder / "other"
    put(other)
    whose = other.lstat().st_ino
    if other.is_dir():
        daemon.socket.unlink()
    other.rename(daemon.socket)
    said = daemon.until(lambda _: problems(daemon), "the problem to be reported")
    assert str(daemon.socket) in said and "left alone" in said
    assert attached.put(KEY, [1], wait=True).state == "stored"
    assert daemon.socket.lstat().st_ino == whose
    until(lambda: "cannot be reached by new clients" in daemon.log, "a line of the log")
    daemon.socket.rename(other)
    daemon.until(lambda _: not problems(daemon), "the problem to be gone")
    assert daemon.client().get(KEY) is not None
    assert daemon.log.count("cannot be reached by new clients") == 1


def test_a_socket_on_which_another_process_listens_is_left_alone_also_at_the_end(daemon: Daemon) -> None:
    daemon.start()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(daemon.folder / "other"))
        other.listen()
        (daemon.folder / "other").rename(daemon.socket)
        said = daemon.until(lambda _: problems(daemon), "the problem to be reported")
        assert "another socket" in said
        assert daemon.terminate() == 0
        assert listens(daemon.socket)


def test_a_socket_that_cannot_be_made_anew_is_reported_until_it_can(daemon: Daemon) -> None:
    folder = daemon.socket.parent
    daemon.status_socket = daemon.folder / "status.sock"
    daemon.start()
    attached = daemon.client()
    moved = folder.rename(daemon.folder / "moved")
    folder.write_text("no folder")
    daemon.until(lambda _: f"{daemon.socket} was removed" in problems(daemon), "the problem to be reported")
    assert "is not a folder" in problems(daemon)
    assert attached.put(KEY, [1], wait=True).state == "stored"
    folder.unlink()
    daemon.until(lambda _: not problems(daemon), "the problem to be gone")
    assert daemon.client().get(KEY) is not None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o751
    shutil.rmtree(moved)


def test_a_daemon_that_is_refused_says_which_process_serves_the_instance(daemon: Daemon) -> None:
    daemon.constants = NEVER
    daemon.start()
    _sockets(daemon.socket.parent)
    with Daemon(instance=daemon.instance, ring_bytes=MIB) as second:
        assert f"is served by another tensord (pid {daemon.pid})" in second.refused(PATIENCE_S)
