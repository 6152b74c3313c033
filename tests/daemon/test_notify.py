from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensord.daemon.process import notify
from tensord.daemon.process.notify import Notifier, listen_sockets
from tensord.errors import BadConfiguration

PID = os.getpid()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """What a service manager reads."""
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


def test_a_manager_that_does_not_read_makes_nobody_wait(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname()})
    told = [notifier.send("X=" + "x" * 10_000) for _ in range(5_000)]
    assert told[0]
    assert not told[-1]
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


@pytest.fixture
def handed_in(tmp_path: Path) -> Iterator[int]:
    """The first of two listening sockets at neighbouring descriptors, as a manager passes them."""
    spare = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]
    first = next(fd for fd in spare if fd + 1 in spare)
    for fd in spare:
        if fd not in (first, first + 1):
            os.close(fd)
    for fd, name in ((first, "a.sock"), (first + 1, "b.sock")):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / name))
            listener.listen()
            os.dup2(listener.fileno(), fd, inheritable=True)
    yield first
    os.close(first)
    os.close(first + 1)


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


def test_another_process_sockets_are_left_alone(handed_in: int) -> None:
    assert listen_sockets(handed("a:b", pid=PID + 1), first_fd=handed_in) == {}
    assert os.get_inheritable(handed_in)


def test_two_sockets_of_one_name_are_refused(handed_in: int) -> None:
    with pytest.raises(BadConfiguration, match=r"two activated sockets are named 'control'.*FileDescriptorName="):
        listen_sockets(handed("control:control"), first_fd=handed_in)


def test_a_socket_that_does_not_listen_is_refused() -> None:
    with (
        socket.socket(socket.AF_UNIX) as silent,
        pytest.raises(BadConfiguration, match="Accept=no"),
    ):
        listen_sockets(handed("control", 1), first_fd=silent.fileno())


def test_a_path_that_is_not_a_socket_is_refused() -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(BadConfiguration, match=rf"descriptor {fd} \(control\) is not a socket"):
        listen_sockets(handed("control", 1), first_fd=fd)
    os.close(fd)


def test_metrics_may_be_listened_for_by_tcp_and_nothing_else_may() -> None:
    environ = {"LISTEN_PID": str(PID), "LISTEN_FDS": "1"}
    with socket.create_server(("127.0.0.1", 0)) as given:
        handed = socket.fromfd(given.fileno(), given.family, given.type)
        found = listen_sockets(environ | {"LISTEN_FDNAMES": "metrics"}, first_fd=handed.detach())
        assert found["metrics"].getsockname() == given.getsockname()
        found["metrics"].close()
        with pytest.raises(BadConfiguration, match="not a listening Unix"):
            listen_sockets(environ | {"LISTEN_FDNAMES": "control"}, first_fd=given.fileno())
