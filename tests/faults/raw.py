"""A client that says exactly what it is told to say, message by message: no thread, no retry, no library behind it."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import count
from mmap import mmap
from pathlib import Path
from typing import Any, Self

import numpy as np

from tensord.errors import DaemonUnavailable
from tensord.ipc import messages
from tensord.ipc.blocking import BlockingChannel
from tensord.ipc.schema import PROTOCOL_VERSION
from tensord.shm import fence
from tensord.shm.inbox import create_inbox
from tensord.shm.tree import encode

from ..daemon_process import MIB, PATIENCE_S


class RawClient:
    """Has said Hello and Attach when it is there; holds its lane, and an inbox if `inbox_bytes` are given.

    `fenced`: what it says of its registration for the fence; what is true, unless given.
    """

    def __init__(self, socket: Path, *, inbox_bytes: int = 0, attach: bool = True, fenced: bool | None = None) -> None:
        self._ids = count(1)
        self.channel = BlockingChannel.connect(socket, PATIENCE_S)
        self.fds: tuple[int, ...] = ()
        try:
            if fenced is None:
                fenced = fence.register()
            self.ask(lambda n: messages.Hello(n, PROTOCOL_VERSION, "raw", os.getpid(), fenced))
            if attach:
                self.ask(lambda n: messages.Attach(n))
        except BaseException:
            self.close()
            raise
        self.inbox: mmap | None = None
        if inbox_bytes:
            self.open_inbox(inbox_bytes)

    def ask(self, make: Any, fds: tuple[int, ...] = ()) -> Any:
        """Sends a request and gives its answer.

        Raises:
            TensordError: what the daemon answered, if that was an error.
        """
        # A daemon that hung up has said why before.
        with suppress(DaemonUnavailable):
            self.channel.send(make(next(self._ids)), fds=fds, timeout_s=PATIENCE_S)
        return self.hear()

    def hear(self) -> Any:
        """The next message; descriptors that come along are kept open until `close`."""
        message, fds = self.channel.receive(PATIENCE_S)
        self.fds += fds
        if isinstance(message, messages.Error):
            raise message.to_error()
        return message

    def open_inbox(self, inbox_bytes: int = MIB) -> None:
        """Makes an inbox and tells the daemon."""
        fd = create_inbox(inbox_bytes)
        try:
            self.inbox = mmap(fd, inbox_bytes)
            self.ask(lambda n: messages.OpenInbox(n, inbox_bytes), (fd,))
        finally:
            os.close(fd)

    def begin(self, key: bytes, tree: Any, *, parts: int, sent: int, claim: int | None = None) -> int:
        """Writes a payload into the inbox, and sends its Commit with the first `sent` of `parts` equal parts.

        Returns:
            The request's id.
        """
        payload = encode(tree)
        assert self.inbox is not None and payload.payload_bytes % parts == 0
        payload.write_into(np.frombuffer(self.inbox, np.uint8)[: payload.payload_bytes])
        number = next(self._ids)
        size = payload.payload_bytes // parts
        said: list[Any] = [messages.Commit(number, key, payload.payload_bytes, len(payload.header), claim=claim)]
        said += [messages.Part(number, at * size, size, at == parts - 1) for at in range(sent)]
        self.channel.send(*said, timeout_s=PATIENCE_S)
        return number

    def close(self) -> None:
        self.channel.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
