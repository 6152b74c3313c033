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

from tensord.ipc.messages import control as messages

from ..daemon_process import Daemon, until

NAMES = ("control.sock", "status.sock", "metrics.sock", "page.sock")
OFTEN = {"tensord.daemon.connections.sockets.LOOK_EVERY_S": 0.02}
KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon with all four sockets in a folder of their own, which look unlike those of any other settings."""
    with Daemon(socket_mode="0660", status_mode="0640") as daemon:
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
        **dict.fromkeys(("status.sock", "page.sock", "metrics.sock"), 0o640),
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
