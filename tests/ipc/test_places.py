from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tensord.errors import SocketForbidden
from tensord.ipc import places


def listen(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    return listener


@pytest.fixture
def tmp_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /tmp."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(places, "FALLBACK_FOLDER", folder)
    return folder


def test_a_client_takes_the_socket_of_the_environment_variable() -> None:
    environ = {"TENSORD_SOCKET": "/a/b.sock", "XDG_RUNTIME_DIR": "/nowhere"}
    assert places.control_socket(environ, 1000) == Path("/a/b.sock")
    assert places.status_socket(environ, 1000) == Path("/a/status.sock")


def test_the_status_socket_may_be_named_by_itself() -> None:
    assert places.status_socket({"TENSORD_STATUS_SOCKET": "/s"}, 1000) == Path("/s")


def test_a_client_prefers_its_users_daemon_to_the_systems(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    system = tmp_path / "system"
    assert places.control_socket(environ, 1000, system) == system / "control.sock"
    with listen(tmp_path / "tensord" / "control.sock"):
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
    with listen(tmp_folder / f"tensord-{other}" / "control.sock"):
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
