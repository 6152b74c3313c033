from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from tensord.daemon.config.config import Config
from tensord.daemon.connections.sockets import Sockets
from tensord.errors import BadConfiguration, InstanceBusy, SocketForbidden


def configured(folder: Path, *flags: str) -> Config:
    at = [f"--socket={folder}/control.sock", f"--status-socket={folder}/status.sock"]
    return Config.load([*at, *flags], {"RUNTIME_DIRECTORY": str(folder / "elsewhere")}, available_bytes=1 << 30)


def listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def test_metrics_have_a_socket_beside_the_others_with_the_mode_of_those_that_are_read_only(tmp_path: Path) -> None:
    with Sockets(configured(tmp_path, "--status-mode", "0666"), {}) as sockets:
        (made,) = (each.socket for each in sockets.metrics)
        path = tmp_path / "metrics.sock"
        assert made.getsockname() == str(path)
        assert not made.getblocking()
        assert connects(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert not os.listdir(tmp_path)


def test_a_socket_that_a_killed_daemon_left_is_replaced_and_one_that_is_served_is_not(tmp_path: Path) -> None:
    listening(tmp_path / "metrics.sock").close()
    with Sockets(configured(tmp_path), {}):
        assert connects(tmp_path / "metrics.sock")
        other = tmp_path / "other"
        other.mkdir()
        with pytest.raises(InstanceBusy):
            Sockets(configured(other, f"--http={tmp_path}/metrics.sock"), {})
        assert not os.listdir(other)
        assert connects(tmp_path / "metrics.sock")
    (tmp_path / "metrics.sock").write_text("mine")
    with pytest.raises(SocketForbidden, match="not a socket"):
        Sockets(configured(tmp_path), {})


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


IPV6 = pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", IPV6])
def test_tcp_is_listened_on_where_it_is_asked_for(tmp_path: Path, host: str) -> None:
    with Sockets(configured(tmp_path, f"--metrics-listen={host}:0"), {}) as sockets:
        unix, *tcp = (each.socket for each in sockets.metrics)
        assert unix.family == socket.AF_UNIX
        assert tcp
        for each in tcp:
            assert not each.getblocking()
            socket.create_connection(each.getsockname()[:2]).close()


@pytest.mark.parametrize("host", ["127.0.0.1", IPV6])
def test_the_page_is_listened_on_where_it_is_asked_for_and_nowhere_else(tmp_path: Path, host: str) -> None:
    with Sockets(configured(tmp_path), {}) as sockets:
        assert sockets.page == []
    with Sockets(configured(tmp_path, f"--http={host}:0"), {}) as sockets:
        (made,) = (each.socket for each in sockets.page)
        assert made.getsockname()[0] == host.strip("[]")
        assert not made.getblocking()
        socket.create_connection(made.getsockname()[:2]).close()
    path = tmp_path / "page.sock"
    (tmp_path / "other").mkdir()
    with Sockets(configured(tmp_path, f"--http={path}", "--status-mode=0600"), {}) as sockets:
        (made,) = (each.socket for each in sockets.page)
        assert made.getsockname() == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(InstanceBusy, match="stop it, or set another path for this socket"):
            Sockets(configured(tmp_path / "other", f"--http={path}"), {})
    assert os.listdir(tmp_path) == ["other"]


def test_an_address_that_cannot_be_had_is_refused_by_name_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InstanceBusy, match=rf"metrics\.listen = '{address}': another process listens there"):
            Sockets(configured(tmp_path, f"--metrics-listen={address}"), {})
    with pytest.raises(BadConfiguration, match=r"metrics\.listen"):
        Sockets(configured(tmp_path, "--metrics-listen=no.such.name.invalid:1"), {})
    assert not os.listdir(tmp_path)
    with pytest.raises(BadConfiguration, match=r"metrics\.listen = '9477' .*HOST:PORT"):
        configured(tmp_path, "--metrics-listen=9477")


def test_sockets_from_a_service_manager_replace_the_configured_ones(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    given = {"control": listening(tmp_path / "run" / "control.sock"), "metrics": socket.create_server(("127.0.0.1", 0))}
    # Nothing was said of where metrics shall be: beside the control socket, wherever the manager has that.
    config = Config.load(
        ["--metrics-listen=127.0.0.1:0", f"--status-socket={tmp_path}/status.sock"],
        {"RUNTIME_DIRECTORY": str(tmp_path / "elsewhere")},
        available_bytes=1 << 30,
    )
    with Sockets(config, given) as sockets:
        assert [each.socket.getsockname() for each in sockets.metrics] == [
            given["metrics"].getsockname(),
            str(tmp_path / "run" / "metrics.sock"),
        ]
    # The manager's own stay, for the next daemon.
    assert sorted(os.listdir(tmp_path / "run")) == ["control.sock"]
    unix = listening(tmp_path / "m.sock")
    with Sockets(configured(tmp_path), {"metrics": unix}) as sockets:
        assert [each.socket for each in sockets.metrics] == [unix]
