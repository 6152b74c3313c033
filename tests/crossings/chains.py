"""States of chains: entries that were put with a parent. No entry of a chain is found without its parent."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar, Final

import tensord
from tensord.errors import ParentGone

from .held import Viewed
from .payloads import KIB, words
from .state import State

LINKS: Final = ("link-0", "link-1", "link-2", "link-3")


class Chained(State):
    """Keeps the client, so that a chain can be looked up in a forked process too."""

    size_bytes: ClassVar[int] = 8 * KIB

    def put_chain(self) -> dict[str, tensord.Put]:
        """Puts the chain in order, without waiting."""
        puts: dict[str, tensord.Put] = {}
        parent: bytes | None = None
        for name in LINKS:
            key = self.party.key(name)
            payload = words(key, self.size_bytes)
            puts[name] = self.party.client.put(key, payload, parent=parent, timeout_s=self.party.patience_s)
            parent = key
        return puts

    def whole(self) -> None:
        """An entry that is found before and after its parent is missed is there without it."""
        client = self.party.client
        if client is None:
            return
        for parent, child in pairwise(map(self.party.key, LINKS)):
            found = client.contains(child) and not client.contains(parent) and client.contains(child)
            assert not found, f"the entry {child.hex()} is found, and its parent is not"


class ChainPut(Chained):
    name = "chain put under way"
    under_way = True

    def prepare(self) -> None:
        self.party.has_room(len(LINKS) * (self.size_bytes + KIB))

    def enter(self) -> None:
        self.puts = self.put_chain()

    def settle(self) -> None:
        for parent, (name, put) in zip((None, *LINKS), self.puts.items(), strict=False):
            put.wait(self.party.patience_s)
            if isinstance(put.error, ParentGone):
                # The parent was lost on its way, or with its memory, or has ended.
                assert parent is not None and not self.party.client.contains(self.party.key(parent)), put
            else:
                self.party.outcomes[name] = put
        self.whole()

    def check(self) -> None:
        self.whole()

    def drop(self) -> None:
        pass


class ChainPutTogether(ChainPut):
    """The chain is put in one call, and its Commits are sent together."""

    name = "chain put_many under way"

    def put_chain(self) -> dict[str, tensord.Put]:
        keys = [self.party.key(name) for name in LINKS]
        puts = self.party.client.put_many(
            [(key, words(key, self.size_bytes)) for key in keys],
            parents=[None, *keys[:-1]],
            timeout_s=self.party.patience_s,
        )
        return dict(zip(LINKS, puts, strict=True))


class ChainHeld(Viewed, Chained):
    """The view of the last entry keeps the entries before it from being evicted."""

    name = "chain held"

    def prepare(self) -> None:
        for name, put in self.put_chain().items():
            assert put.wait(self.party.patience_s).state == "stored", (name, put)

    def enter(self) -> None:
        self.views: dict[str, Any] = {LINKS[-1]: self.party.got(LINKS[-1]).tree}

    def check(self) -> None:
        super().check()
        self.whole()


CHAINS: Final[list[type[State]]] = [ChainPut, ChainPutTogether, ChainHeld]
