"""A connected socket on an event loop: reads and writes typed messages and descriptors.

The raw socket has one reader, on asyncio or uvloop. Transports are not used: uvloop's transports lose descriptors.

Invariants:
- Messages are delivered in the order in which they were sent. Messages that came before the peer closed the
  connection, or before it broke the protocol, are delivered too.
- A delivered descriptor belongs to the consumer of its message. All other descriptors are closed by `close`.
- Descriptors given to `send` stay the caller's, who may close them at once.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, Self

from ...errors import LimitReached, TensordError
from ..messages.schema import Message
from .connection import Connection, Delivery
from .descriptors import READ_BYTES, close_all, read, write

OUT_BYTES_MAX: Final = 1 << 20
INBOX_MESSAGES_MAX: Final = 256
LAST_READS_MAX: Final = 64
HELD_FDS_MAX: Final = 64


class AsyncChannel:
    """The connection to one peer, on the running loop. Call all methods on that loop's thread. An asynchronous iterator
    of (message, fds), which ends with the connection: `failure` is the peer's error, or None. It stops reading while
    INBOX_MESSAGES_MAX messages wait to be consumed."""

    def __init__(self, sock: socket.socket, connection: Connection, *, read_bytes: int = READ_BYTES) -> None:
        sock.setblocking(False)
        self.connection = connection
        self.closed = False
        self.failure: TensordError | None = None
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Delivery] = deque()
        self._read_bytes = read_bytes
        self.unsent_bytes = 0
        self._out: deque[tuple[bytearray, list[int]]] = deque()
        """The bytes that the socket did not take yet, in order, with duplicates of their descriptors."""
        self._flushing = False  # the loop flushes once the socket takes bytes
        self._batching = False
        self._out_broken = False  # the peer no longer reads; messages that it sent are still read
        self._reading = False
        self._reading_ended = False
        self._hang_up = select.poll()
        self._hang_up.register(self._fd, 0)
        self._consumer: asyncio.Future[None] | None = None
        self._drainer: asyncio.Future[None] | None = None
        self.resume()

    @property
    def unconsumed(self) -> int:
        """The number of messages that arrived and were not consumed."""
        return len(self._inbox)

    def pause(self) -> None:
        """Stops reading. The peer gets backpressure once the socket's buffer is full."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        if not self._reading and not self.closed and not self._reading_ended:
            self._reading = True
            self._loop.add_reader(self._fd, self._read)

    def stop_reading(self) -> None:
        """Reads the bytes that the socket has now, in LAST_READS_MAX reads at most, and never reads again."""
        for _ in range(LAST_READS_MAX):
            if not self._reading or not self._read():
                break
        self._reading_ended = True
        self.pause()

    def send(self, *messages: Message, fds: Sequence[int] = ()) -> bool:
        """Sends the messages in one call, and buffers the bytes that the socket does not take. Never blocks. Raises
        what `Connection.send` raises. Returns False if the channel is closed, or if this call closed it because the
        peer left too many bytes unread."""
        if self.closed:
            return False
        self._write(self.connection.send(*messages, fds=len(fds)), fds)
        if self.connection.closed:
            self._end(None)  # after a refused Hello
        return not self.closed

    @contextmanager
    def batched(self) -> Iterator[None]:
        """Writes the messages that are sent meanwhile in one call at its end. A message with descriptors is written at
        once if nothing waits before it."""
        self._batching = True
        try:
            yield
        finally:
            self._batching = False
            self._flush()

    async def drained(self) -> None:
        """Waits until the socket has taken all sent bytes, or the channel is closed. One task at a time may wait."""
        while self._out and not self.closed:
            self._drainer = self._loop.create_future()
            await self._drainer

    def close(self) -> None:
        """Ends the channel. Messages that were not consumed are dropped, and their descriptors are closed."""
        self._end(None)
        while self._inbox:
            close_all(self._inbox.popleft()[1])

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        while not self._inbox:
            if self.closed:
                raise StopAsyncIteration
            self._consumer = self._loop.create_future()
            await self._consumer
        delivery = self._inbox.popleft()
        if len(self._inbox) <= INBOX_MESSAGES_MAX // 2:
            self.resume()
        return delivery

    def _read(self) -> bool:
        """One read. Returns False if the socket had no bytes, or the connection has ended."""
        try:
            chunk = read(self._sock, self._read_bytes)
        except BlockingIOError:
            return False
        except OSError:
            chunk = None
        if chunk is None or not chunk.data:
            self._end(None)
            return False
        arrival = self.connection.receive_data(*chunk)
        close_all(arrival.discarded)
        self._inbox += arrival.messages
        if len(self._inbox) >= INBOX_MESSAGES_MAX:
            self.pause()
        _wake(self._consumer)
        if arrival.replies:
            self._write(arrival.replies)
        if self.connection.closed:
            self._end(arrival.failure)
        if self._reading and self._hang_up.poll(0):
            # The peer has closed its end. If the peer left answers unread, the socket reports an error, and libuv
            # stops watching the socket. The rest of the bytes, and the end of the stream, would never be read.
            self.pause()
            self.resume()
        return True

    def _write(self, data: bytes | bytearray, fds: Sequence[int] = ()) -> None:
        sent = 0
        if self.unsent_bytes + len(data) > OUT_BYTES_MAX:
            self._flush()
        if self._out_broken:
            return
        try:
            if not self._out and (fds or not self._batching):
                with suppress(BlockingIOError):
                    sent = write(self._sock, data, fds)
            if sent < len(data):
                self._keep(data[sent:], () if sent else fds)
        except LimitReached as unread:
            self._end(unread)
        except OSError:
            self._break_out()
        else:
            if self._out and not self._batching:
                self._flush()

    def _keep(self, data: bytes | bytearray, fds: Sequence[int]) -> None:
        """Keeps what the socket did not take, with duplicates of `fds`: the caller may close its own."""
        self.unsent_bytes += len(data)
        held = len(fds) + sum([len(copies) for _, copies in self._out]) if fds else 0
        if self.unsent_bytes > OUT_BYTES_MAX or held > HELD_FDS_MAX:
            raise LimitReached(
                f"the peer leaves {self.unsent_bytes} bytes and {held} descriptors unread; out_bytes_max is "
                f"{OUT_BYTES_MAX}, and {HELD_FDS_MAX} descriptors may wait: the connection is closed"
            )
        if fds or not self._out:
            self._out.append((bytearray(), []))
        waiting, copies = self._out[-1]
        waiting += data
        for fd in fds:
            copies.append(os.dup(fd))  # those made so far are closed if one fails

    def _flush(self) -> None:
        """Writes as much as the socket takes of what was kept. The loop writes the rest."""
        try:
            while self._out:
                data, fds = self._out[0]
                sent = write(self._sock, data, fds)
                self.unsent_bytes -= sent
                close_all(fds)
                fds.clear()
                del data[:sent]  # free the sent bytes now: the peer may never read the rest
                if not data:
                    self._out.popleft()
        except BlockingIOError:
            if not self._flushing:
                self._flushing = True
                self._loop.add_writer(self._fd, self._flush)
        except OSError:
            self._break_out()
        else:
            self._drained()

    def _drained(self) -> None:
        if self._flushing:
            self._flushing = False
            self._loop.remove_writer(self._fd)
        _wake(self._drainer)

    def _break_out(self) -> None:
        self._out_broken = True
        while self._out:
            close_all(self._out.popleft()[1])
        self.unsent_bytes = 0
        self._drained()

    def _end(self, failure: TensordError | None) -> None:
        if self.closed:
            return
        self.pause()
        self.closed = True
        self.failure = failure
        self._break_out()
        close_all(self.connection.close())
        self._sock.close()
        _wake(self._consumer)


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
