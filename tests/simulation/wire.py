"""One simulated connection: messages and descriptors on their way in both directions, until either side is gone.

As with a Unix socket, order is kept, what was sent before an end may still be read, what nobody reads any more is lost.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any


class Wire:
    """The connection of client `number`. A side that has read all learns of the other's end."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.up: deque[tuple[Any, list[int]]] = deque()
        self.down: deque[Any] = deque()
        self.client_open = True
        self.daemon_open = True

    @property
    def news(self) -> bool:
        """Whether the client would find something if it read: an answer, or the end."""
        return bool(self.down) or not self.daemon_open or not self.client_open

    def say(self, messages: Sequence[Any], fds: Sequence[int] = ()) -> None:
        """From the client; descriptors go with the last message, and stay the sender's. Lost if the daemon is gone."""
        if self.daemon_open:
            *others, last = messages
            self.up += [(message, []) for message in others]
            self.up.append((last, [os.dup(fd) for fd in fds]))

    def answer(self, message: Any) -> None:
        """From the daemon. Lost if the client is gone."""
        if self.client_open:
            self.down.append(message)

    def close_client(self) -> None:
        """The client reads no more. What it has said is still to be heard."""
        self.client_open = False
        self.down.clear()

    def close_daemon(self) -> None:
        """The daemon reads no more. What it has answered is still to be heard."""
        self.daemon_open = False
        for _, fds in self.up:
            for fd in fds:
                os.close(fd)
        self.up.clear()
