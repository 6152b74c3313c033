"""The remote store of a simulated host: a dictionary that fails, loses and damages what it has, by the world's chance.

Owns: the objects and the generations. They outlive the daemon.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from tensord.daemon.forms.events import RemoteEntry
from tensord.daemon.remote_stores.form import OBJECT_HEADER_BYTES, Buffer, object_header
from tensord.daemon.remote_stores.store import HostClaim, RemoteStore
from tensord.errors import TierUnavailable
from tensord.shm.ring.layout import NAMESPACE_TAG_BYTES


class SimulatedStore(RemoteStore):
    def __init__(self, chance: random.Random) -> None:
        super().__init__("simulated://", 1.0)
        self._chance = chance
        self.objects: dict[bytes, bytes] = {}
        self.given_out: dict[bytes, int] = {}
        self.fails = 0.0
        """The share of calls that fail."""

    def change(self, tags: Sequence[bytes]) -> None:
        """Something happens to the store: it fails from now on or serves again, an object is damaged or lost, another
        host invalidates."""
        chance = self._chance
        match chance.choice(["fails", "serves", "serves", "damages", "loses", "invalidates"]):
            case "fails":
                self.fails = chance.choice([0.3, 1.0])
            case "serves":
                self.fails = 0.0
            case "damages" if self.objects:
                key = chance.choice(sorted(self.objects))
                raw = bytearray(self.objects[key])
                raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
                self.objects[key] = bytes(raw)
            case "loses" if self.objects:
                del self.objects[chance.choice(sorted(self.objects))]
            case "invalidates":
                self._raise(chance.choice(tags), 1)

    def look(self, keys: Sequence[bytes]) -> tuple[int, list[RemoteEntry | None]]:
        self._may_fail()
        found = {key: self.objects[key] for key in keys if key in self.objects}
        heads = [self._checked(key, memoryview(found[key]), header=True) if key in found else None for key in keys]
        return self.given_out.get(keys[0][:NAMESPACE_TAG_BYTES], 0), heads

    def get_into(self, key: bytes, buffer: memoryview) -> RemoteEntry | None:
        raw = self.objects.get(key)
        if raw is not None and len(raw) <= len(buffer):
            # A call that fails may have written a part.
            buffer[: len(raw) // 2] = raw[: len(raw) // 2]
        self._may_fail()
        if raw is None or len(raw) > len(buffer):
            return None
        buffer[: len(raw)] = raw
        return self._checked(key, buffer[: len(raw)])

    def put_from(self, key: bytes, payload: Buffer, entry: RemoteEntry) -> None:
        self._may_fail()
        self.objects[key] = object_header(key, entry, time.time()) + bytes(payload)
        assert len(self.objects[key]) == OBJECT_HEADER_BYTES + len(payload)

    def remove(self, keys: Sequence[bytes]) -> None:
        self._may_fail()
        for key in keys:
            self.objects.pop(key, None)

    def generations(self, tags: Sequence[bytes]) -> list[int]:
        self._may_fail()
        return [self.given_out.get(tag, 0) for tag in tags]

    def raise_generation(self, tag: bytes, least: int) -> int:
        self._may_fail()
        return self._raise(tag, least)

    def claim(self, key: bytes, owner: bytes, seconds: float) -> HostClaim | None:
        self._may_fail()
        if self._chance.random() < 0.3:
            return HostClaim(False, self._chance.choice([0.0, self._chance.random(), 100.0]))
        return HostClaim(True)

    def unclaim(self, key: bytes, owner: bytes) -> bool | None:
        self._may_fail()
        return True

    def close(self) -> None:
        pass

    def _raise(self, tag: bytes, least: int) -> int:
        self.given_out[tag] = max(self.given_out.get(tag, 0) + 1, least)
        return self.given_out[tag]

    def _may_fail(self) -> None:
        if self._chance.random() < self.fails:
            raise TierUnavailable("simulated: out of order")
