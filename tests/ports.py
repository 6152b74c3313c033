"""Ports of the loopback for servers that take a port's number, and do not say which one they got.

Owns: which test has a port. No server of a test is taken for another's, though tests run at the same time.
"""

from __future__ import annotations

import random
import socket
from typing import Final, Self

HOST: Final = "127.0.0.1"
BUS: Final = 10_000
"""A server of a Redis cluster also listens on its port plus this."""


class Port:
    """A port that nobody uses, and that no other test takes until `free`: not before the server listens either, nor
    while it is restarted. It is below those that the system gives to clients."""

    def __init__(self) -> None:
        for self.number in random.Random().sample(range(20_000, 22_700), 100):
            # A name among the abstract sockets ends with its process.
            self._claim = socket.socket(socket.AF_UNIX)
            try:
                self._claim.bind(f"\0tensord-test-port-{self.number}")
                with socket.socket() as first, socket.socket() as second:
                    first.bind((HOST, self.number))
                    second.bind((HOST, self.number + BUS))
            except OSError:
                self._claim.close()
                continue
            return
        raise AssertionError("no port is free")

    def free(self) -> None:
        self._claim.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
