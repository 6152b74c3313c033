"""States in which a call of a process is not finished yet."""

from __future__ import annotations

import os
import threading
from typing import Any, ClassVar

import tensord
from tensord.testing.fake_vram import FakeCard, FakeVram

from ..daemon_process import MIB, until
from .held import BLOCK_TOKENS, layer_of, right_layer, tokens_of
from .payloads import KIB, ROW, expect, words
from .state import State

# Larger than the grants that earlier puts have asked for.
LONG_BYTES = MIB
# A client has a place for so many ahead of need.
ROOM_BYTES = 48 * KIB


class Putting(State):
    """One put of "mine", in its own thread, because it may wait. `returns`: the call returns without the daemon.

    The state also holds a view, so that a fork takes lane and connection away.
    """

    under_way = True
    returns: ClassVar[bool] = True
    options: ClassVar[dict[str, Any]] = {}
    """Of the put."""
    thread: threading.Thread | None

    def prepare(self) -> None:
        # The ring is open for writing.
        self.party.put("first", wait=True)
        self.view: Any = self.party.got("kept").tree
        self.put: tensord.Put | None = None
        self.raised: BaseException | None = None

    def enter(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        puts = self.party.client.link.puts
        begun = (lambda: self.put) if self.returns else (lambda: self.put or puts.waiting)
        until(lambda: begun() or self.raised, "the put to begin")

    def settle(self) -> None:
        assert self.thread is not None
        self.thread.join(self.party.patience_s)
        assert not self.thread.is_alive(), "the put has not returned"
        if self.raised is not None:
            raise self.raised
        assert self.put is not None
        self.party.outcomes["mine"] = self.put.wait(self.party.patience_s)

    def check(self) -> None:
        if self.view is not None:
            expect(self.view, self.party.key("kept"), "the view of 'kept'")

    def in_child(self) -> None:
        if self.put is not None:
            self.put.wait(self.party.patience_s)
        self.check()

    def drop(self) -> None:
        self.view = None

    def _run(self) -> None:
        try:
            self.put = self.begin()
        except BaseException as error:
            self.raised = error

    def begin(self) -> tensord.Put:
        key = self.party.key("mine")
        client: tensord.Client = self.party.client
        return client.put(key, words(key, self.size_bytes), timeout_s=self.party.patience_s, **self.options)


class WholePut(Putting):
    name = "put under way"
    returns = False


class LongPut(Putting):
    name = "put of a large payload under way"
    size_bytes = LONG_BYTES
    returns = False


class WaitingPut(Putting):
    name = "put with wait"
    returns = False
    options: ClassVar[dict[str, Any]] = {"wait": True}


class ManyPuts(Putting):
    returns = False

    name = "put_many under way"
    sizes: ClassVar[dict[str, int]] = {"mine": 64 * KIB, "many-1": 64 * KIB, "many-2": 256 * KIB, "many-3": 64 * KIB}

    def settle(self) -> None:
        super().settle()
        for name, put in zip(self.sizes, self.puts, strict=True):
            put.wait(self.party.patience_s)
            self.party.outcomes[name] = put

    def begin(self) -> tensord.Put:
        client: tensord.Client = self.party.client
        items = [(self.party.key(name), words(self.party.key(name), size)) for name, size in self.sizes.items()]
        self.puts = client.put_many(items, timeout_s=self.party.patience_s)
        return self.puts[0]


class Reserved(State):
    """A filled reservation; committed at the end. The child of a fork goes on writing to its copy."""

    name = "reserve open"

    def prepare(self) -> None:
        self.pid = os.getpid()
        self.array: Any = None
        self.dropped = threading.Event()

    def enter(self) -> None:
        self.reserve()

    def reserve(self) -> None:
        spec = tensord.Spec((self.size_bytes // 8 // ROW, ROW), "uint64")
        self.reservation = self.party.client.reserve(spec)
        self.array = self.reservation.tree
        self.array[:] = words(self.party.key("mine"), self.size_bytes)

    def settle(self) -> None:
        self.party.outcomes["mine"] = self.reservation.commit(
            self.party.key("mine"), wait=True, timeout_s=self.party.patience_s
        )

    def check(self) -> None:
        # The content in the child of a fork is undefined.
        if self.array is not None and os.getpid() == self.pid:
            expect(self.array, self.party.key("mine"), "the reserved array")

    def in_child(self) -> None:
        array = self.array

        def scribble() -> None:
            while not self.dropped.is_set():
                array[:] = 0xBAD

        threading.Thread(target=scribble, daemon=True).start()

    def drop(self) -> None:
        self.dropped.set()
        self.array = None


class ReservedAndCommitted(Reserved):
    name = "reserve committed"
    under_way = True
    size_bytes = ROOM_BYTES

    def prepare(self) -> None:
        super().prepare()
        self.party.has_room(self.size_bytes)
        self.reserve()

    def enter(self) -> None:
        self.put = self.reservation.commit(self.party.key("mine"))

    def settle(self) -> None:
        self.party.outcomes["mine"] = self.put.wait(self.party.patience_s)


class ReservedAndWrittenTo(ReservedAndCommitted):
    """After the end of the put its owner writes other words there, whatever the outcome."""

    name = "reserve committed, written to after its end"

    def enter(self) -> None:
        super().enter()
        array, put = self.array, self.put

        def scribble() -> None:
            put.wait()
            while not self.dropped.is_set():
                array[:] = 0xBAD

        threading.Thread(target=scribble, daemon=True).start()

    def check(self) -> None:
        """The content there is undefined: others must find the committed payload."""


class Claimed(State):
    """One client computes the key; another waits for it."""

    name = "claim held and waited for"

    def enter(self) -> None:
        key = self.party.key("mine")
        self.waiting_client = self.party.connect()
        self.held = self.party.client.claim(key)
        until(lambda: self.held.state == "compute", "the claim to be granted")
        self.waiting = self.waiting_client.claim(key)
        until(lambda: self.waiting.state == "waiting", "the second claim to wait")

    def settle(self) -> None:
        client = self.party.client if self.held.state == "compute" else self.waiting_client
        self.party.answered(self.waiting_client)
        key = self.party.key("mine")
        put = client.put(key, words(key), wait=True, timeout_s=self.party.patience_s)
        self.party.outcomes["mine"] = put
        if put.state in ("stored", "existed"):
            self.held.stored()
        else:
            self.held.abandon()
        until(lambda: self.waiting.state not in ("asked", "waiting"), "the waiting claim to be answered")
        if self.waiting.state == "compute":
            self.waiting.abandon()

    def drop(self) -> None:
        del self.held, self.waiting
        self.waiting_client.close()


class SequencePut(State):
    name = "sequence put under way"
    under_way = True
    count = 5 * BLOCK_TOKENS

    def prepare(self) -> None:
        self.party.has_room(ROOM_BYTES)
        self.cache = tensord.PrefixCache(self.party.client, self.party.namespace, block_tokens=BLOCK_TOKENS)
        self.puts: list[tensord.PrefixPut] = []

    def enter(self) -> None:
        tokens = tokens_of(self.count)
        layers = [tensord.NormalLayer(layer_of(tokens))]
        self.put = self.cache.put(tokens, layers, timeout_s=self.party.patience_s)

    def settle(self) -> None:
        self.put.wait(self.party.patience_s)
        self.matched()

    def check(self) -> None:
        self.matched()

    def matched(self) -> None:
        match = self.cache.match(tokens_of(self.count), timeout_s=self.party.patience_s)
        if match is not None:
            right_layer(match)

    def drop(self) -> None:
        pass


class Vram(FakeVram):
    """Counts the entries that are copied away."""

    copied = 0

    def outgoing(self, tree: Any, mark: Any) -> Any:
        self.copied += 1
        return super().outgoing(tree, mark)


class OnDevice(State):
    """Tensors that stay in this process."""

    name = "device entry"

    def prepare(self) -> None:
        self.pid = os.getpid()
        self.vram = Vram(FakeCard(self.party.place.card_folder, "card"))
        self.cache = tensord.DeviceCache(self.party.client, self.vram)
        key = self.party.key("mine")
        tensor = self.vram.upload(words(key))
        put = self.cache.put(key, {"a": tensor}, wait=True, timeout_s=self.party.patience_s)
        assert put.state == "registered", put

    def enter(self) -> None:
        self.lease = self.cache.get(self.party.key("mine"))
        assert self.lease is not None and self.lease.tier == "device"

    def settle(self) -> None:
        self.lease = None
        self.look()

    def check(self) -> None:
        self.look()

    def look(self) -> None:
        """The entry is on one of the tiers. When only the host has it, it may be evicted there."""
        if self.cache.closed:
            return
        lease = self.cache.get(self.party.key("mine"))
        assert lease is not None or self.vram.copied, "the entry is on no tier and was never copied to the host"
        if lease is not None:
            expect(lease.tree, self.party.key("mine"), f"the entry on {lease.tier}")

    def drop(self) -> None:
        self.lease = None
        self.cache.close()
        if os.getpid() == self.pid:
            self.vram.give_back()
            self.vram.card.close()


class Offloading(OnDevice):
    name = "offload under way"
    under_way = True

    def enter(self) -> None:
        self.lease = None
        assert self.cache.offload(self.party.key("mine")) == 1


class Subscribed(State):
    name = "subscription"

    def prepare(self) -> None:
        self.pid = os.getpid()
        self.card = FakeCard(self.party.place.card_folder, "card")

    def enter(self) -> None:
        self.heard: list[str] = []
        self.client = self.party.client
        self.subscription = self.client.on_mode(lambda change: self.heard.append(change.mode), "card")
        until(lambda: "card" in self.subscription.states, "the gauge to be known")

    def check(self) -> None:
        if self.subscription.closed or self.client.link.closed:
            return
        self.fill(0.99, "emergency")
        self.fill(0.0, "relaxed")

    def fill(self, share: float, mode: str) -> None:
        self.heard.clear()
        self.card.occupy(int(share * self.card.capacity_bytes))
        until(lambda: mode in self.heard, f"the callback to hear of {mode}")

    def drop(self) -> None:
        self.subscription.close()
        if os.getpid() == self.pid:
            self.card.close()


UNDER_WAY: list[type[State]] = [
    WholePut,
    ManyPuts,
    LongPut,
    WaitingPut,
    Reserved,
    ReservedAndCommitted,
    ReservedAndWrittenTo,
    Claimed,
    SequencePut,
    OnDevice,
    Offloading,
    Subscribed,
]
