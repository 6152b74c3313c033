"""The daemon's sockets, made by it or passed by a service manager, and what the manager is told."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensord.daemon.config.config import Config
from tensord.daemon.connections.sockets import Sockets
from tensord.daemon.process import notify
from tensord.daemon.process.notify import Notifier, listen_sockets
from tensord.errors import BadConfiguration, InstanceBusy, SocketForbidden


def configured(folder: Path, *flags: str) -> Config:
    at = [f"--socket={folder}/control.sock", f"--status-socket={folder}/status.sock"]
    return Config.load([*at, *flags], {"RUNTIME_DIRECTORY": str(folder / "elsewhere")})


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


TCP = [("--metrics-listen", "127.0.0.1"), ("--metrics-listen", "localhost"), ("--http", "127.0.0.1")]
IPV6 = [("--metrics-listen", "[::1]"), ("--http", "[::1]")]


@pytest.mark.parametrize(("flag", "host"), TCP + IPV6 * has_ipv6())
def test_tcp_is_listened_on_where_it_is_asked_for(tmp_path: Path, flag: str, host: str) -> None:
    with Sockets(configured(tmp_path, f"{flag}={host}:0"), {}) as sockets:
        made = [each.socket for each in (*sockets.metrics, *sockets.page)]
        tcp = [each for each in made if each.family != socket.AF_UNIX]
        assert tcp and len(made) == len(tcp) + 1
        for each in tcp:
            assert not each.getblocking()
            assert host == "localhost" or each.getsockname()[0] == host.strip("[]")
            socket.create_connection(each.getsockname()[:2]).close()


def test_the_page_is_listened_on_where_it_is_asked_for_and_nowhere_else(tmp_path: Path) -> None:
    with Sockets(configured(tmp_path), {}) as sockets:
        assert sockets.page == []
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


# ---- a service manager

PID = os.getpid()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reader:
        reader.bind(str(tmp_path / "notify"))
        reader.settimeout(10)
        yield reader


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/notify", "/" + "x" * 200])
def test_no_manager_is_no_error(address: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address} if address else {})
    assert not notifier.send(notify.READY)
    assert notifier.watchdog_s is None
    notifier.close()


def test_variables_for_this_process_are_not_inherited(manager: socket.socket) -> None:
    environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}
    Notifier(environ).close()
    assert environ == {}
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "control"}
    assert listen_sockets(environ) == {}
    assert environ == {}


def test_the_watchdog_is_fed_twice_as_often_as_it_kills() -> None:
    assert Notifier({"WATCHDOG_USEC": "10000000"}).watchdog_s == 5
    assert Notifier({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(PID)}).watchdog_s == 5
    assert Notifier({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(PID + 1)}).watchdog_s is None
    assert Notifier({"WATCHDOG_USEC": "0"}).watchdog_s is None
    assert Notifier({"WATCHDOG_USEC": "soon"}).watchdog_s is None


FIRST_FD = 500


@pytest.fixture
def handed_in(tmp_path: Path) -> Iterator[int]:
    """The first of two listening sockets at neighbouring descriptors, as a manager passes them."""
    for fd, name in ((FIRST_FD, "a.sock"), (FIRST_FD + 1, "b.sock")):
        with listening(tmp_path / name) as listener:
            os.dup2(listener.fileno(), fd, inheritable=True)
    yield FIRST_FD
    os.close(FIRST_FD)
    os.close(FIRST_FD + 1)


def handed(names: str, count: int = 2, pid: int = PID) -> dict[str, str]:
    return {"LISTEN_PID": str(pid), "LISTEN_FDS": str(count), "LISTEN_FDNAMES": names}


def test_sockets_come_by_name_non_blocking_and_closed_on_exec(handed_in: int, tmp_path: Path) -> None:
    found = listen_sockets(handed("status:control"), first_fd=handed_in)
    assert list(found) == ["status", "control"]
    assert found["control"].getsockname() == str(tmp_path / "b.sock")
    for listener in found.values():
        assert not listener.get_inheritable()
        assert not listener.getblocking()
        listener.detach()


def test_what_is_no_listening_socket_of_a_name_of_its_own_is_refused(handed_in: int) -> None:
    with pytest.raises(BadConfiguration, match=r"two activated sockets are named 'control'.*FileDescriptorName="):
        listen_sockets(handed("control:control"), first_fd=handed_in)
    with socket.socket(socket.AF_UNIX) as silent, pytest.raises(BadConfiguration, match="Accept=no"):
        listen_sockets(handed("control", 1), first_fd=silent.fileno())
    with (
        open("/dev/null") as file,
        pytest.raises(BadConfiguration, match=rf"descriptor {file.fileno()} \(control\) is not a socket"),
    ):
        listen_sockets(handed("control", 1), first_fd=file.fileno())


def test_metrics_may_be_listened_for_by_tcp_and_nothing_else_may() -> None:
    with socket.create_server(("127.0.0.1", 0)) as given:
        found = listen_sockets(handed("metrics", 1), first_fd=os.dup(given.fileno()))
        assert found["metrics"].getsockname() == given.getsockname()
        found["metrics"].close()
        with pytest.raises(BadConfiguration, match="not a listening Unix"):
            listen_sockets(handed("control", 1), first_fd=given.fileno())
