"""The client's side of a socket: threads share it, every wait has an end, nothing leaks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tensord.errors import BadMessage, DaemonUnavailable, LimitReached, TimedOut
from tensord.ipc.messages import control as m
from tensord.ipc.messages.schema import Message
from tensord.ipc.wire.blocking import BlockingChannel
from tensord.ipc.wire.connection import CONTROL_REQUESTS, Connection
from tensord.ipc.wire.frames import FrameReader, decode, pack

from .examples import ATTACHED, HELLO, Pair

Sockets = tuple[socket.socket, socket.socket]


@pytest.fixture
def channel(sockets: Sockets) -> Iterator[BlockingChannel]:
    channel = BlockingChannel(sockets[0], Pair.at("attached").client)
    yield channel
    channel.close()


def test_messages_of_many_threads_are_never_mixed(channel: BlockingChannel, sockets: Sockets) -> None:
    """Each message is cut by a buffer that is smaller than it."""
    sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)

    def send(first: int) -> None:
        for number in range(first, first + 100):
            channel.send(m.Renew([number + 1] * 1500), timeout_s=60)

    threads = [threading.Thread(target=send, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    reader = FrameReader()
    found: list[int] = []
    while len(found) < 400:
        for frame in reader.feed(sockets[1].recv(1 << 16)):
            renew = decode(frame, CONTROL_REQUESTS)
            assert isinstance(renew, m.Renew)
            tokens = renew.tokens
            assert len(set(tokens)) == 1
            found.append(tokens[0])
    for thread in threads:
        thread.join()
    assert sorted(found) == [1000 * n + k + 1 for n in range(4) for k in range(100)]


@pytest.mark.parametrize(
    ("connection", "first"),
    [(Connection.status_client(), m.StatusQuery(1)), (Connection.control_client(), HELLO)],
    ids=["status", "control"],
)
def test_the_refusal_of_a_new_connection_is_told_although_it_is_closed_already(
    sockets: Sockets, connection: Connection, first: Message
) -> None:
    channel = BlockingChannel(sockets[0], connection)
    sockets[1].sendall(pack(m.Error.of(LimitReached("that many connections are open"))))
    sockets[1].close()
    with pytest.raises(LimitReached, match="that many connections are open"):
        channel.send(first, timeout_s=60)
    channel.close()


def test_a_socket_of_another_program_is_told_from_a_daemon_s(sockets: Sockets) -> None:
    channel = BlockingChannel(sockets[0], Connection.control_client(), "the daemon at /x.sock")
    channel.send(HELLO, timeout_s=60)
    sockets[1].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(BadMessage, match=r"the daemon at /x\.sock does not speak tensord's protocol.*speak HTTP"):
        channel.receive(60)
    channel.close()


def fill(sock: socket.socket) -> int:
    """Leaves no room in the socket's buffer; how many bytes that took."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    sock.setblocking(False)
    filled = 0
    for size in (2048, 256, 16, 1):
        try:
            while True:
                filled += sock.send(b"\xc0" * size)
        except BlockingIOError:
            pass
    return filled


def test_a_daemon_that_does_not_read_costs_no_more_than_the_time_limit(
    channel: BlockingChannel, sockets: Sockets
) -> None:
    filled = fill(sockets[0])
    both = (m.AskForGrants(3, [100]), m.Doorbell())
    with pytest.raises(TimedOut, match="does not read"):
        channel.send(*both, timeout_s=0.01)
    # Nothing of it was sent: the channel goes on, and the same may be sent.
    while filled:
        filled -= len(sockets[1].recv(filled))
    channel.send(*both, timeout_s=60)
    assert sockets[1].recv(1 << 16) == pack(both[0]) + pack(both[1])


def test_a_message_that_was_cut_in_two_ends_the_channel(channel: BlockingChannel, sockets: Sockets) -> None:
    sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    with pytest.raises(TimedOut):
        channel.send(m.Renew([2**40] * 4000), timeout_s=0.01)
    with pytest.raises(DaemonUnavailable, match="closed: connect anew"):
        channel.send(m.Renew([1]), timeout_s=60)


def test_a_daemon_that_goes_away_is_noticed_after_its_last_word(channel: BlockingChannel, sockets: Sockets) -> None:
    channel.send(m.Clear(5), timeout_s=60)
    sockets[1].recv(1 << 16)
    sockets[1].sendall(pack(m.Counted(5, 3)))
    sockets[1].close()
    assert channel.receive(60)[0] == m.Counted(5, 3)
    for _ in range(2):
        with pytest.raises(DaemonUnavailable, match="is gone"):
            channel.receive(60)
    with pytest.raises(DaemonUnavailable, match="is gone"):
        channel.send(m.Clear(6), timeout_s=60)


def test_close_wakes_those_who_wait(channel: BlockingChannel, sockets: Sockets) -> None:
    fill(sockets[0])
    outcomes: list[str] = []

    def receive() -> None:
        with pytest.raises(DaemonUnavailable):
            channel.receive(3600)
        outcomes.append("receiver")

    def send() -> None:
        with pytest.raises(DaemonUnavailable):
            channel.send(m.Clear(5), timeout_s=3600)
        outcomes.append("sender")

    threads = [threading.Thread(target=receive), threading.Thread(target=send)]
    for thread in threads:
        thread.start()
    channel.close()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["receiver", "sender"]
    channel.close()


def test_close_closes_descriptors_that_nobody_took(no_descriptor_leaks: None) -> None:
    ours, theirs = socket.socketpair()
    channel = BlockingChannel(ours, Pair.at("attaching").client)
    socket.send_fds(theirs, [pack(m.PutRefused(1)) + pack(ATTACHED)], [0, 1, 2])
    channel.receive(60)
    channel.close()
    theirs.close()


def test_the_descriptor_of_a_channel_that_is_closed_while_a_thread_sends_is_closed_by_that_thread(
    sockets: Sockets,
) -> None:
    channel, held, go_on = BlockingChannel(sockets[0], Pair.at("attached").client), threading.Event(), threading.Event()
    write = channel._write

    def waits(*args: object) -> int:
        held.set()
        go_on.wait(60)
        return write(*args)  # type: ignore[arg-type]

    channel._write = waits  # type: ignore[method-assign,assignment]

    def sends() -> None:
        with pytest.raises(DaemonUnavailable):
            channel.send(m.Renew([1]), timeout_s=60)

    sender = threading.Thread(target=sends)
    sender.start()
    assert held.wait(60)
    channel.close()
    assert sockets[0].fileno() >= 0, "its number may not be reused yet"
    go_on.set()
    sender.join(60)
    assert sockets[0].fileno() < 0


def test_a_send_within_a_send_of_the_same_thread_is_not_written_into_its_middle(
    channel: BlockingChannel, sockets: Sockets
) -> None:
    write, tried = channel._write, []

    def handled(*args: object) -> int:
        channel._write = write  # type: ignore[method-assign]
        with pytest.raises(TimedOut, match="interrupted a send"):
            channel.send(m.Renew([2]), timeout_s=60)
        tried.append(True)
        return write(*args)  # type: ignore[arg-type]

    channel._write = handled  # type: ignore[method-assign,assignment]
    channel.send(m.Renew([1]), timeout_s=60)
    channel.send(m.Renew([3]), timeout_s=60)
    assert tried
    assert sockets[1].recv(1 << 16) == pack(m.Renew([1])) + pack(m.Renew([3]))
