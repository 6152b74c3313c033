"""The daemon's side of a socket loses no message and no descriptor, and waits for nobody."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import pytest
import uvloop

from tensord.errors import BadMessage, LimitReached, ProtocolError, TimedOut
from tensord.ipc.messages import control as m
from tensord.ipc.wire.blocking import BlockingChannel
from tensord.ipc.wire.channel import OUT_BYTES_MAX, AsyncChannel
from tensord.ipc.wire.connection import FDS_MAX, Connection
from tensord.ipc.wire.descriptors import close_all
from tensord.ipc.wire.frames import pack, unpack

from .examples import ATTACHED, LIMITS, Pair

Sockets = tuple[socket.socket, socket.socket]
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.fixture(autouse=True, params=LOOPS)
def loop_factory(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """Each test runs on loops of both kinds."""
    return LOOPS[request.param]


def numbered(number: int) -> int:
    """A descriptor that can be told from others: of a file that holds `number`."""
    with tempfile.TemporaryFile() as file:
        file.write(str(number).encode())
        file.flush()
        return os.dup(file.fileno())


def number_of(fd: int) -> int:
    return int(os.pread(fd, 20, 0))


def drain(sock: socket.socket) -> bytes:
    sock.setblocking(True)
    found = b""
    while data := sock.recv(1 << 16):
        found += data
    return found


async def test_all_messages_of_a_peer_that_leaves_answers_unread_are_read(sockets: Sockets) -> None:
    """Its end is an error of the socket then, after which libuv calls once and never again. So it is when answering
    fails: a request that was received is carried out."""
    ours, theirs = sockets
    server, client = Pair.at("attached")
    theirs.send(client.send(*[m.Renew([number + 1]) for number in range(40)]))
    ours.send(b"never read")
    theirs.close()
    channel = AsyncChannel(ours, server, read_bytes=64)
    channel.send(m.Error(None, "TensordError", "nobody reads this"))
    assert [message.tokens[0] async for message, _ in channel] == [number + 1 for number in range(40)]


async def test_no_descriptor_is_lost_in_a_burst(sockets: Sockets) -> None:
    """Also read while other messages without descriptors surround them, over a small buffer."""
    ours, theirs = sockets
    count, opened = 3000, 0
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    server, client = Pair.at("attached")

    def send() -> None:
        channel = BlockingChannel(theirs, client)
        for number in range(count):
            fd = numbered(number)
            # Some of it is larger than the buffer, so that calls are cut.
            chatter = [m.Renew([number + 1] * (1 + 3000 * (number % 50 == 1)))] * (number % 3)
            if chatter:
                channel.send(*chatter, timeout_s=60)
            channel.send(m.OpenInbox(number, 4096), *chatter, fds=[fd], timeout_s=60)
            os.close(fd)
        channel.close()

    sender = asyncio.ensure_future(asyncio.to_thread(send))
    async for message, fds in AsyncChannel(ours, server):
        if isinstance(message, m.OpenInbox):
            assert [number_of(fd) for fd in fds] == [message.id] == [opened]
            assert fcntl.fcntl(fds[0], fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            opened += 1
        else:
            assert fds == ()
        close_all(fds)
    await sender
    assert opened == count


@pytest.mark.parametrize("full", [False, True], ids=["cut at once", "cut when flushed"])
async def test_a_cut_call_sends_its_descriptors_once(sockets: Sockets, full: bool) -> None:
    ours, theirs = sockets
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    server, client = Pair.at("attaching")
    filler = [m.Error(None, "TensordError", f"{n} " + "x" * 1500) for n in range(40)]
    channel = AsyncChannel(ours, server)
    if full:
        channel.send(*filler)
    given = [numbered(n) for n in (7, 8, 9)]
    before = channel.unsent_bytes
    channel.send(ATTACHED, *filler, fds=given)
    added = channel.unsent_bytes - before
    whole = sum(len(pack(message)) for message in [ATTACHED, *filler])
    assert added == whole if full else 0 < added < whole
    close_all(given)

    def receive() -> None:
        blocking = BlockingChannel(theirs, client)
        for expected in [*(filler if full else []), ATTACHED, *filler]:
            message, fds = blocking.receive(60)
            assert message == expected
            assert [number_of(fd) for fd in fds] == ([7, 8, 9] if fds else [])
            assert bool(fds) == (expected is ATTACHED)
            close_all(fds)
        with pytest.raises(TimedOut):  # and not that descriptors are left over
            blocking.receive(0)
        blocking.close()

    await asyncio.to_thread(receive)
    await channel.drained()
    assert channel.unsent_bytes == 0
    channel.close()


@pytest.mark.parametrize("descriptors", [False, True])
async def test_a_peer_that_never_reads_is_dropped_with_bounded_memory_and_few_descriptors(
    sockets: Sockets, descriptors: bool
) -> None:
    ours, _ = sockets
    message = m.WritableRing(1) if descriptors else m.Error(None, "TensordError", "z" * 1500)
    given = [numbered(1)] if descriptors else []
    channel = AsyncChannel(ours, Connection.control_server(LIMITS))
    most = 0
    while channel.send(message, fds=given):
        most = max(most, channel.unsent_bytes)
    assert descriptors or OUT_BYTES_MAX - 10_000 < most <= OUT_BYTES_MAX
    assert not channel.send(message, fds=given)
    assert channel.unsent_bytes == 0
    assert isinstance(channel.failure, LimitReached)
    assert f"out_bytes_max is {OUT_BYTES_MAX}, and 64 descriptors may wait" in str(channel.failure)
    close_all(given)


@pytest.mark.parametrize(
    ("data", "given", "delivered"),
    [
        (pack(m.Renew([1])), FDS_MAX + 1, 0),
        (pack(m.Renew([1])), 60, 0),
        (pack(m.Renew([1])), 2, 1),
        (msgpack.packb({"type": "Frobnicate", "fds": 2}), 2, 0),
        (pack(m.OpenInbox(1, 0)), 2, 0),
        (pack(m.OpenInbox(1, 4096))[:-1], 2, 0),
    ],
    ids=["too many", "far too many", "undeclared", "unknown", "bad", "half"],
)
async def test_descriptors_of_what_is_refused_are_closed(
    sockets: Sockets, data: bytes, given: int, delivered: int
) -> None:
    ours, theirs = sockets
    server, _ = Pair.at("attached")
    fd = numbered(1)
    socket.send_fds(theirs, [data], [fd] * given)
    os.close(fd)
    theirs.shutdown(socket.SHUT_WR)
    channel = AsyncChannel(ours, server)
    assert [fds async for _, fds in channel] == [()] * delivered
    assert given <= 2 or type(channel.failure) is ProtocolError


async def test_after_a_protocol_error_earlier_messages_are_delivered_and_the_peer_gets_the_error(
    sockets: Sockets,
) -> None:
    ours, theirs = sockets
    server, _ = Pair.at("attached")
    channel = AsyncChannel(ours, server)
    theirs.sendall(pack(m.Renew([1])) + pack(m.Abandon(2)) + b"\xc1" + pack(m.Abandon(3)))
    assert [message async for message, _ in channel] == [m.Renew([1]), m.Abandon(2)]
    assert isinstance(channel.failure, BadMessage)
    told: Any = unpack(await asyncio.to_thread(drain, theirs))
    assert told["code"] == "BadMessage"


async def test_close_closes_the_descriptors_of_what_nobody_took(sockets: Sockets) -> None:
    ours, theirs = sockets
    server, client = Pair.at("attached")
    channel = AsyncChannel(ours, server)
    fd = numbered(1)
    for number in range(5):
        socket.send_fds(theirs, [client.send(m.OpenInbox(number, 4096), fds=1)], [fd])
    os.close(fd)
    _, fds = await anext(channel)
    theirs.shutdown(socket.SHUT_WR)
    while not channel.closed:
        await asyncio.sleep(0)
    channel.close()
    close_all(fds)
    with pytest.raises(StopAsyncIteration):
        await anext(channel)


async def test_a_channel_that_stops_reading_has_taken_all_that_had_come_and_takes_nothing_after_it(
    sockets: Sockets,
) -> None:
    ours, theirs = sockets
    server, client = Pair.at("attached")
    channel = AsyncChannel(ours, server, read_bytes=64)
    for number in range(10, 20):
        theirs.sendall(client.send(m.Clear(number)))
    channel.stop_reading()
    theirs.sendall(client.send(m.Clear(20)))
    assert [(await anext(channel))[0].id for _ in range(10)] == list(range(10, 20))
    assert channel.send(m.Counted(10, 0)), "it still answers"
    for _ in range(5):
        await asyncio.sleep(0)
    assert not channel.unconsumed


async def test_a_channel_stops_reading_while_nobody_takes(sockets: Sockets) -> None:
    ours, theirs = sockets
    server, _ = Pair.at("attached")
    count = 20_000
    stream = memoryview(b"".join(pack(m.Renew([n + 1] * 20)) for n in range(count)))

    async def pump(at: int) -> int:
        """Sends from `at` until the socket has refused a hundred times; how far that went."""
        for _ in range(100):
            with suppress(BlockingIOError):
                while at < len(stream):
                    at += theirs.send(stream[at : at + 30_000])
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
        return at

    theirs.setblocking(False)
    channel = AsyncChannel(ours, server)
    at = await pump(0)
    assert at < len(stream) / 2
    taken = 0
    async for message, _ in channel:
        taken += 1
        assert message.tokens[0] == taken
        if taken % 1000 == 0:
            at = await pump(at)
        if taken == count:
            break
    channel.close()
