"""The blocks of one request that the daemon fetches from its remote store.

Owns: which keys are asked for, and for how long a request waits. Does not own: pins, and what the daemon is asked for
otherwise (scheduler.py).
Invariant: once a run has ended, it stays so.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

from ....errors import TensordError
from ...core import requests
from ...core.cache import Client
from ...core.link import Link

FETCH_S: Final = 1.0
"""The most seconds that a request waits for blocks from the remote store. After that it computes them."""


class RemoteRun:
    """Fetches blocks, in the order of a chain, until one is missing.

    Args:
        keys: from the first block that is not in the ring on.
    """

    def __init__(self, keys: list[bytes]) -> None:
        self._keys = keys
        self._until_s = time.monotonic() + FETCH_S
        self.ended = not keys
        """Whether all is there that the daemon can fetch."""

    @property
    def pending(self) -> bool:
        """Whether the request is to wait."""
        return not self.ended and time.monotonic() < self._until_s

    def begin(self, client: Client) -> None:
        """Asks the daemon. Does not wait for the answer."""
        self._ask(client.link)

    def _ask(self, link: Link) -> None:
        wanted = self._keys[: link.limits.keys_per_request_max]
        requests.ask_fetch(link, wanted, FETCH_S, lambda answer: self._answered(link, answer))

    def _answered(self, link: Link, answer: Future[Any]) -> None:
        count = 0
        with suppress(TensordError):
            count = answer.result(0).count
        del self._keys[:count]
        if count and self._keys and self.pending:
            self._ask(link)
        else:
            self.ended = True
