"""A simulated connection: messages in transit in both directions, until one side closes it.

As with a Unix socket, messages stay in order. Messages sent before an end stay readable. Messages to a closed end are
lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any


class Wire:
    """The connection of client `number`. A side learns of the other's end once it has read all messages."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.up: deque[Any] = deque()
        self.down: deque[Any] = deque()
        self.client_open = True
        self.daemon_open = True

    @property
    def news(self) -> bool:
        """Whether a read by the client would return a message or the end of the connection."""
        return bool(self.down) or not self.daemon_open or not self.client_open

    def say(self, messages: Sequence[Any]) -> None:
        """Sends messages from the client. They are lost if the daemon has closed."""
        if self.daemon_open:
            self.up += messages

    def answer(self, message: Any) -> None:
        """Sends a message from the daemon. It is lost if the client has closed."""
        if self.client_open:
            self.down.append(message)

    def close_client(self) -> None:
        """Closes the client's end. The daemon can still read the messages in transit to it."""
        self.client_open = False
        self.down.clear()

    def close_daemon(self) -> None:
        """Closes the daemon's end. The client can still read the messages in transit to it."""
        self.daemon_open = False
        self.up.clear()
