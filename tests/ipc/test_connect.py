"""Where the sockets are; who cannot reach a daemon is told which socket, and what to do."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tensord.errors import BadConfiguration, DaemonUnavailable, SocketForbidden, TimedOut
from tensord.ipc import places
from tensord.ipc.wire.blocking import connect

NOBODY = 65534
NO_NAME_GID = 54_321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a socket to a group that it is not in")


def listening(path: Path, backlog: int = 8) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(os.fspath(path))
    sock.listen(backlog)
    return sock


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none", r"no daemon at {path} \(No such file.*systemctl start tensord"),
        ("file", r"{path} is a file, not a socket.* {folder}/control\.sock"),
        (".", r"{folder} is a folder, not a socket.* {folder}/control\.sock"),
        ("x" * 200, r"bytes; .* at most 107"),
    ],
)
def test_a_path_without_a_socket_is_named_with_what_to_do(
    tmp_path: Path, no_descriptor_leaks: None, name: str, says: str
) -> None:
    (tmp_path / "file").touch()
    kind = BadConfiguration if len(name) > 99 else DaemonUnavailable
    with pytest.raises(kind, match=says.format(path=tmp_path / name, folder=tmp_path)):
        connect(tmp_path / name, 60)


def test_without_a_free_descriptor_the_daemon_is_said_to_be_out_of_reach(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    with listening(tmp_path / "s"):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
            with pytest.raises(DaemonUnavailable, match="ulimit"):
                connect(tmp_path / "s", 60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_daemon_that_accepts_nobody_costs_the_time_limit(tmp_path: Path, no_descriptor_leaks: None) -> None:
    waiting: list[socket.socket] = []

    def fill_backlog() -> None:
        while len(waiting) < 100:
            waiting.append(connect(tmp_path / "s", 0.01))

    with listening(tmp_path / "s", backlog=0), pytest.raises(TimedOut, match=r"did not accept within 0\.01 s"):
        fill_backlog()
    for sock in waiting:
        sock.close()


@contextmanager
def without_rights() -> Iterator[int]:
    """Nobody refuses root: as root, be nobody for a while. Gives the uid that is refused."""
    if os.geteuid() != 0:
        yield os.geteuid()
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield NOBODY
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@pytest.fixture
def open_path() -> Iterator[Path]:
    # pytest's own folders are closed to others.
    with tempfile.TemporaryDirectory(prefix="tensord-") as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


@as_root
@pytest.mark.parametrize(
    ("gid", "mode", "joins"),
    [(NO_NAME_GID, 0o660, True), (0, 0o660, False), (0, 0o600, False), (NO_NAME_GID, 0o640, False)],
)
def test_a_socket_one_may_not_use_names_uid_group_and_remedy_which_is_never_to_join_root_or_a_group_without_access(
    open_path: Path, gid: int, mode: int, joins: bool
) -> None:
    path = open_path / "s"
    with listening(path):
        os.chown(path, -1, gid)
        path.chmod(mode)
        with without_rights() as uid, pytest.raises(SocketForbidden) as caught:
            connect(path, 60)
    said = str(caught.value)
    assert f"uid {uid} may not use the socket {path}" in said
    assert ("usermod -aG" in said and f"group {gid} with mode 0660" in said) is joins
    assert ("set socket_group in the daemon's configuration" in said) is not joins


def test_a_folder_one_may_not_look_into_is_named(open_path: Path) -> None:
    inner = open_path / "inner"
    inner.mkdir()
    with listening(inner / "s"):
        inner.chmod(0o000)
        with without_rights(), pytest.raises(SocketForbidden, match=f"look into {inner}"):
            connect(inner / "s", 60)
        inner.chmod(0o755)


# ---- places


@pytest.fixture
def tmp_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /tmp."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(places, "FALLBACK_FOLDER", folder)
    return folder


def test_a_client_takes_the_socket_of_the_environment_variable_and_that_of_the_status_may_be_named_too() -> None:
    environ = {"TENSORD_SOCKET": "/a/b.sock", "XDG_RUNTIME_DIR": "/nowhere"}
    assert places.control_socket(environ, 1000) == Path("/a/b.sock")
    assert places.status_socket(environ, 1000) == Path("/a/status.sock")
    assert places.status_socket({"TENSORD_STATUS_SOCKET": "/s"}, 1000) == Path("/s")


def test_a_client_prefers_its_users_daemon_to_the_systems(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    system = tmp_path / "system"
    assert places.control_socket(environ, 1000, system) == system / "control.sock"
    with listening(tmp_path / "tensord" / "control.sock"):
        assert places.control_socket(environ, 1000, system) == tmp_path / "tensord/control.sock"
        assert places.status_socket(environ, 1000, system) == tmp_path / "tensord/status.sock"


def test_a_folder_in_tmp_is_made_for_its_user_alone(tmp_folder: Path) -> None:
    folder = tmp_folder / f"tensord-{os.geteuid()}"
    for made in (folder, folder / "second"):
        places.make_folder(made, environ={})
        assert made.stat().st_mode & 0o777 == 0o700
        places.make_folder(made, environ={})  # and again, as it now is there


def test_only_the_last_folder_of_a_usual_place_is_made(tmp_path: Path) -> None:
    runtime = tmp_path / "no" / "runtime"
    for folder, environ in (
        (tmp_path / "elsewhere", {}),
        (tmp_path / "else" / "where", {}),
        (runtime / "tensord", {"XDG_RUNTIME_DIR": str(runtime)}),
        (runtime / "tensord" / "second", {"RUNTIME_DIRECTORY": str(runtime / "tensord")}),
    ):
        with pytest.raises(SocketForbidden, match=f"{folder}|{folder.parent}.*set another socket"):
            places.make_folder(folder, 1000, environ)
    assert list(tmp_path.iterdir()) == []
    runtime.mkdir(parents=True)
    places.make_folder(runtime / "tensord" / "second", 1000, {"XDG_RUNTIME_DIR": str(runtime)})
    (tmp_path / "elsewhere").mkdir()
    places.make_folder(tmp_path / "elsewhere", 1000, {})


@pytest.mark.parametrize("below", ["", "second"])
def test_a_folder_that_others_may_write_is_refused_and_so_is_one_in_it(tmp_folder: Path, below: str) -> None:
    usual = tmp_folder / f"tensord-{os.geteuid()}"
    usual.mkdir()
    usual.chmod(0o777)
    with pytest.raises(SocketForbidden, match="mode 0777, so that other users may write"):
        places.make_folder(usual / below, environ={})


def test_a_folder_of_somebody_else_is_refused_to_daemon_and_client(tmp_folder: Path) -> None:
    other = os.geteuid() + 1
    with listening(tmp_folder / f"tensord-{other}" / "control.sock"):
        with pytest.raises(SocketForbidden, match=f"belongs to uid {other - 1}, not to {other}"):
            places.make_folder(tmp_folder / f"tensord-{other}", other)
        for environ in ({}, {"XDG_RUNTIME_DIR": ""}):
            with pytest.raises(SocketForbidden, match="belongs to uid"):
                places.control_socket(environ, other, tmp_folder / "system")


def test_a_link_in_the_folders_place_is_refused(tmp_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_folder / "tensord-7").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SocketForbidden, match="a link or a file"):
        places.make_folder(tmp_folder / "tensord-7")
