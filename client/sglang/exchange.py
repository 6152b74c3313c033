"""Pages in and out of the ring: lookups, copies and puts, each within a limited time.

Owns: the client, and the rule when the daemon is not asked again. Does not own: names of pages, and SGLang's memory.

Invariants
- A stored page is pinned while it is copied, and its checksum is compared before.
- Lookups and loads never wait for the daemon, except to evict a damaged page, and for its remote store.
- After a lookup that waited in vain, the remote store is not asked again until the daemon has answered.
- A store waits at most STALL_S for each step of the daemon. After one that took longer, no store is tried until the
  daemon has answered.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Final

from ...errors import Corrupt, TensordError, TimedOut
from ..computing.remote_run import RemoteRuns
from ..core.client import Client
from ..writing.outcomes import Put
from .pages import Part, copy_into

STALL_S: Final = 1.0
STORE_S_MAX: Final = 10.0
"""The most seconds for one batch of stores, also if the daemon is slow but answers."""
ATTACH_S: Final = 0.4
"""Seconds that making the client may delay the engine's start. After that it attaches in the background."""
_log = logging.getLogger("tensord")


class PageExchange:
    """The connection of one rank to the daemon. The arguments are those of `Client`."""

    def __init__(self, socket: str | None, name: str) -> None:
        self.client = Client(socket, name=name, timeout_s=STALL_S, attach_s=ATTACH_S)
        self._unanswered: tuple[Put, float] | None = None
        """A put, and when it began."""
        self._runs = RemoteRuns()

    def available(self, keys: list[bytes]) -> int:
        """The number of pages, from the first on, that are in the ring, after the daemon has looked for missing ones in
        its remote store."""
        count = sum(1 for _ in takewhile(self.client.contains, keys))
        if count < len(keys) and self._answers():
            run = self._runs.new(self.client.link, keys[count:])
            run.begin(self.client.link)
            run.wait(math.inf)
            count += run.count
        return count

    def load(self, keys: Sequence[bytes], pages: Sequence[Sequence[Part]]) -> list[bool]:
        """Copies stored pages into `pages`, up to the first that is missing, damaged or of other sizes. Returns for
        each page whether it was copied; a page that was not is unchanged."""
        done = sum(1 for _ in takewhile(lambda page: self._load(*page), zip(keys, pages, strict=True)))
        return [True] * done + [False] * (len(keys) - done)

    def _load(self, key: bytes, parts: Sequence[Part]) -> bool:
        try:
            lease = self.client.get(key, verify=True)
            if lease is None:
                return False
            with lease:
                if copy_into(parts, lease.tree):
                    return True
            _log.warning("tensord: page %s has other sizes than this engine's pages; it is removed", key.hex())
        except Corrupt as error:
            _log.warning("tensord: a page is damaged, and is removed: %s", error)
        # The page must not be found again, and the next store of it must not be taken for stored.
        with suppress(TensordError):
            self.client.evict(key)
        return False

    def store(
        self, keys: Sequence[bytes], pages: Sequence[Sequence[Part]], *, parents: Sequence[bytes | None]
    ) -> list[bool]:
        """Stores pages. Returns when the daemon has answered for all of them, or does not answer in time.

        Args:
            parents: for each page the key of the page before it in its sequence, None if unknown. A page is evicted
                before its parent, and ends with it.

        Returns:
            For each page whether it is stored. The memory of `pages` may change from then on.
        """
        deadline = time.monotonic() + STORE_S_MAX
        puts: dict[bytes, Put] = {}
        for key, parts, parent in zip(keys, pages, parents, strict=True) if self._answers() else ():
            if self.client.contains(key):
                continue
            # A page whose parent has left the ring begins a chain of its own. SGLang would not store the parent again.
            known = parent is not None and (parent in puts or self.client.contains(parent))
            began = time.monotonic()
            puts[key] = put = self.client.put(key, list(parts), parent=parent if known else None, timeout_s=STALL_S)
            if isinstance(put.error, TimedOut):
                self._is_late(put, began)
            if put.state == "lost" or time.monotonic() > deadline:
                break
        for put in puts.values():
            self._wait(put, deadline)
        return [puts[key].state in ("stored", "existed") if key in puts else self.client.contains(key) for key in keys]

    def _wait(self, put: Put, deadline: float) -> None:
        """Waits for a put. After one without an answer in time, the others are not waited for."""
        if put.state == "sent" and self._unanswered is None:
            began = time.monotonic()
            with suppress(TensordError):
                put.wait(max(0.0, min(STALL_S, deadline - began)))
            if put.state == "sent":
                self._is_late(put, began)

    def _is_late(self, put: Put, began: float) -> None:
        self._unanswered = put, began
        _log.warning("tensord: the daemon does not answer; no page is stored until it does")

    def _answers(self) -> bool:
        """Whether the daemon is there and has answered for every put of earlier batches."""
        if self._unanswered is not None and not self.client.link.puts.owed(*self._unanswered):
            self._unanswered = None
        return self._unanswered is None and self.client.connected
