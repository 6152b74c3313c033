"""States in which an entry is on its way from the remote store, or to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tensord.daemon.forms.events import RemoteEntry
from tensord.daemon.remote_stores.directory import DirectoryStore
from tensord.shm.payloads.copy import checksum_of
from tensord.shm.payloads.packing import pack

from ..daemon_process import until
from .payloads import expect, words
from .state import State
from .under_way import ROOM_BYTES, Putting

FOLDER = "store"
"""The store's folder in the folder of the cards."""
COST_MS = 5000.0


class Fetching(State):
    """A claim of a key that another host has computed. The fetched entry is held afterwards."""

    name = "fetch from the remote store under way"
    under_way = True

    def prepare(self) -> None:
        # Another host has computed the entry.
        key = self.party.key("mine")
        encoded = pack(words(key, self.size_bytes))
        payload = bytearray(encoded.payload_bytes)
        encoded.write(memoryview(payload), 0)
        checksum = checksum_of(np.frombuffer(payload, np.uint8))
        entry = RemoteEntry(len(payload), len(encoded.header), cost_ms=COST_MS, checksum=checksum)
        store = DirectoryStore(Path(self.party.place.card_folder) / FOLDER)
        store.put_from(key, payload, entry)
        store.close()
        self.lease: Any = None
        self.client = self.party.client

    def enter(self) -> None:
        self.claim = self.client.claim(self.party.key("mine"), within_s=30.0)

    def settle(self) -> None:
        until(lambda: self.claim.state not in ("asked", "waiting"), "the claim to be answered")
        key, client = self.party.key("mine"), self.party.client
        self.lease = client.get(key)
        if self.lease is None:
            # Lost, invalidated, or not found in time.
            self.party.outcomes["mine"] = client.put(
                key, words(key, self.size_bytes), wait=True, timeout_s=self.party.patience_s
            )
        self.claim.abandon()
        self.look()

    def check(self) -> None:
        self.look()

    def look(self) -> None:
        if self.lease is not None:
            expect(self.lease.tree, self.party.key("mine"), "the fetched entry")

    def drop(self) -> None:
        self.lease = None


class Writing(Putting):
    """A put that is worth a copy in the remote store."""

    name = "put that is written to the remote store"
    size_bytes = ROOM_BYTES
    options: ClassVar[dict[str, Any]] = {"cost_ms": COST_MS}

    def prepare(self) -> None:
        super().prepare()
        self.party.has_room(self.size_bytes)


REMOTE: list[type[State]] = [Fetching, Writing]
