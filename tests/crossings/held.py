"""States in which a process holds views: each view is right as long as it lives."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

import tensord
from tensord.shm.ring.layout import LANE_WORDS

from .payloads import expect
from .state import State

BLOCK_TOKENS = 16


class Viewed(State):
    def __init__(self, party: Any) -> None:
        super().__init__(party)
        self.views: dict[str, Any] = {}

    def check(self) -> None:
        for name, tree in self.views.items():
            expect(tree, self.party.key(name), f"the view of {name!r}")

    def drop(self) -> None:
        self.views.clear()


class Lease(Viewed):
    name = "lease"

    def enter(self) -> None:
        self.views["kept"] = self.party.got("kept").tree


class ViewOfClosed(Lease):
    name = "view whose client is closed"

    def enter(self) -> None:
        super().enter()
        self.party.close_client()
        self.party.attached()


class ViewOfCollected(Lease):
    name = "view whose client is collected"

    def enter(self) -> None:
        super().enter()
        self.party.collect_client()
        self.party.attached()


class Batch(Viewed):
    """One view exists before the disturbance; the other is made after it."""

    name = "batch"

    def enter(self) -> None:
        self.batch: tensord.Batch | None = self.party.client.get_many([self.party.key(n) for n in ("kept", "beside")])
        first = self.batch[0]
        assert first is not None
        self.views["kept"] = first.tree

    def check(self) -> None:
        super().check()
        if self.batch is not None:
            second = self.batch[1]
            assert second is not None
            expect(second.tree, self.party.key("beside"), "the batch's second view")

    def drop(self) -> None:
        super().drop()
        self.batch = None


class Borrowed(Viewed):
    """The lender is another client of the same process, so that a fork meets both."""

    name = "borrowed handle"

    def enter(self) -> None:
        self.lender = self.party.connect()
        self.lent: tensord.Lease | None = self.party.got("kept", self.lender)
        handle, ring = self.lent.handle(), self.party.client.ring()
        assert handle is not None and ring is not None
        borrowed = ring.borrow(handle)
        assert borrowed is not None
        self.views["kept"] = borrowed.tree

    def drop(self) -> None:
        super().drop()
        self.lent = None


class CopiedOut(Viewed):
    """All words of the lane are taken, so that the next lease is a copy."""

    name = "copied-out lease of a full lane"

    def enter(self) -> None:
        client, kept = self.party.client, self.party.key("kept")
        self.batch: tensord.Batch | None = client.get_many(kept * LANE_WORDS)
        last = self.batch[LANE_WORDS - 1]
        assert last is not None
        self.views["kept"] = last.tree
        copied = self.party.got("beside")
        assert copied.handle() is None, "this lane is not full"
        self.views["beside"] = copied.tree

    def drop(self) -> None:
        super().drop()
        self.batch = None


def tokens_of(count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.arange(1, count + 1, dtype=np.uint32)


def layer_of(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A layer (1, tokens, 64) uint64; every word is a function of its token and its place."""
    places = np.arange(len(tokens) * 64, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (places + np.repeat(tokens, 64).astype(np.uint64)).reshape(1, len(tokens), 64)


def right_layer(match: tensord.PrefixMatch) -> None:
    """Asserts that the layer of a cached sequence of `tokens_of` is right, as far as it is cached."""
    assert np.array_equal(match.joined(0), layer_of(tokens_of(match.offset))), "the sequence's layer is wrong"


class PrefixMatch(State):
    name = "prefix match held"
    count = 5 * BLOCK_TOKENS

    def prepare(self) -> None:
        cache = tensord.PrefixCache(self.party.client, self.party.namespace, block_tokens=BLOCK_TOKENS)
        tokens = tokens_of(self.count)
        put = cache.put(tokens, [tensord.NormalLayer(layer_of(tokens))], wait=True, timeout_s=self.party.patience_s)
        assert put.state == "stored", put
        self.cache = cache

    def enter(self) -> None:
        self.match = self.cache.match(tokens_of(self.count), timeout_s=self.party.patience_s)
        assert self.match is not None and self.match.offset == self.count - 1

    def check(self) -> None:
        if self.match is not None:
            right_layer(self.match)

    def drop(self) -> None:
        self.match = None
        gc.collect()


HELD: list[type[State]] = [Lease, ViewOfClosed, ViewOfCollected, Batch, Borrowed, CopiedOut, PrefixMatch]
