"""A cache's side of a conversation with the daemon's own core, and a wire that delivers when the test likes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from tensord.client.arguments.put_options import PutOptions
from tensord.client.device.entries import DeviceEntries, DeviceEntry, Registration
from tensord.client.device.upkeep import Upkeep
from tensord.client.writing.outcomes import Put
from tensord.client.writing.put import PutPayload
from tensord.daemon.forms.effects import Send
from tensord.daemon.forms.events import ClientLeft
from tensord.daemon.governor.forms.events import Event, Governed, GovernorClientJoined
from tensord.daemon.governor.forms.limits import GovernorLimits
from tensord.daemon.governor.governor import Governor
from tensord.errors import DaemonUnavailable
from tensord.ipc.messages import control as messages
from tensord.shm.payloads.recipe import recipe
from tensord.testing.fake_vram import FakeCard, FakeVram

CARD = "card0"
LIMITS = GovernorLimits(relaxed_idle_s=50.0, normal_idle_s=20.0, critical_idle_s=5.0, max_entries=5, retry_s=10.0)


class Wire:
    """A Link to a core in this thread: what is said waits until the test delivers it."""

    def __init__(self) -> None:
        self.governor = Governor(LIMITS)
        self.limits = messages.ClientLimits()
        self.client = 0
        self.now = 0.0
        self.errors: list[messages.Error] = []
        self.said: deque[messages.Message] = deque()
        self.answered: deque[messages.Message] = deque()
        self.connection: Any = None
        self.state: messages.TierState | None = None
        self.listeners = self
        self.puts: Any = None
        self._asked: dict[int, Future[Any]] = {}
        self._number = 0

    # ---- as the cache sees it

    def ask(
        self, make: Callable[[int], messages.Message], *, connected: Any, then: Callable[[Future[Any]], None]
    ) -> None:
        self._number += 1
        answer: Future[Any] = Future()
        answer.add_done_callback(then)
        if connected is self.connection:
            self._asked[self._number] = answer
            self.said.append(make(self._number))
        else:
            answer.set_exception(DaemonUnavailable("gone"))

    def send(self, *sent: messages.Message, timeout_s: float = 1.0, connected: Any = None) -> None:
        if connected is not self.connection:
            raise DaemonUnavailable("gone")
        self.said.extend(sent)

    def batches(self, keys: list[bytes]) -> list[list[bytes]]:
        return [keys] if keys else []

    def add(self, listener: Upkeep) -> None:
        self.listener = listener

    def remove(self, listener: Upkeep) -> None:
        pass

    # ---- as the test sees it

    def happen(self, event: Event) -> None:
        for effect in self.governor.handle(event, self.now):
            if isinstance(effect, Send) and effect.client == self.client:
                self.answered.append(effect.message)
        self.governor.check_invariants()

    def connect(self) -> None:
        """A new connection; the old one's words are lost, those that the daemon had read are not."""
        if self.connection is not None:
            self.happen(ClientLeft(self.client))
        self.said.clear()
        self.answered.clear()
        self.connection = self.state = None
        while self._asked:
            self._asked.popitem()[1].set_exception(DaemonUnavailable("gone"))
        self.listener.detached()
        self.client += 1
        self.connection = object()
        self.happen(GovernorClientJoined(self.client, "owner", 1))
        self.happen(Governed(self.client, messages.Subscribe(0)))
        self.listener.attached(self.connection)

    def deliver_up(self) -> None:
        if self.said:
            said: Any = self.said.popleft()
            self.happen(Governed(self.client, said))

    def deliver_down(self) -> None:
        if not self.answered:
            return
        message: Any = self.answered.popleft()
        if isinstance(message, messages.ModeChanged):
            self.state = message.state
        if isinstance(message, messages.ModeChanged | messages.Order):
            self.listener.received(message, self.connection)
        if isinstance(message, messages.Error):
            self.errors.append(message)
        asked = self._asked.pop(getattr(message, "id", -1), None)
        if asked is not None and isinstance(message, messages.Error):
            asked.set_exception(message.to_error())
        elif asked is not None:
            asked.set_result(message)

    def sizes(self) -> dict[bytes, int]:
        """The bytes that the daemon counts for each key."""
        device = self.governor.devices._devices.get(CARD)
        return {key: entry.size_bytes for key, entry in device.entries.items()} if device else {}


class HostTier:
    """What offloaded trees are put into: the ring, as far as a conversation needs one."""

    def __init__(self, wire: Wire) -> None:
        self.link = wire
        wire.puts = self
        self.governor = SimpleNamespace(watch=lambda: None, state_of=lambda gauge: wire.state)
        self.trees: dict[bytes, Any] = {}
        self.full = False
        self.after_put: Callable[[], object] = lambda: None

    def put(self, put: Put, payload: PutPayload, options: PutOptions, deadline: float) -> None:
        """As the client's Puts."""
        memory = np.zeros(payload.payload_bytes, np.uint8)
        payload.write(memory.data, 0)
        if self.full:
            put.settle("refused")
        else:
            self.trees[put.key] = recipe(payload.header).view(memory)
            put.settle("stored")
        self.after_put()

    def get(self, key: bytes) -> Any:
        return nullcontext(SimpleNamespace(tree=self.trees[key])) if key in self.trees else None

    def peek(self, key: bytes) -> None:
        return None


class Owner:
    """A cache without its thread, on a wire: the test takes its turns."""

    def __init__(self, card: FakeCard) -> None:
        self.device = FakeVram(card)
        self.wire = Wire()
        self.host = HostTier(self.wire)
        self.entries = DeviceEntries(self.device)
        client: Any = self.host
        self.upkeep = Upkeep(client, self.entries)
        self.upkeep.uses_every_s = 1e-9
        self.wire.listeners.add(self.upkeep)
        self.wire.connect()

    def enter(self, key: bytes, array: Any, tokens: int = 1) -> DeviceEntry:
        """Puts an entry. Returns the one that is there then."""
        tensor = self.device.upload(array)
        entry = DeviceEntry(key, tensor, tensor.nbytes, tokens, "", Registration(key), [self.device.mark()])
        kept = self.entries.put(entry)
        assert kept is not None
        return kept

    def ordered(self, key: bytes, kind: Any) -> messages.AcknowledgeOrder | None:
        """What is acknowledged of an order that the daemon has just sent."""
        self.upkeep.received(messages.Order(1, CARD, kind, [key], "test"), self.wire.connection)
        self.wire.said.clear()
        self.upkeep.turn()
        said = [message for message in self.wire.said if isinstance(message, messages.AcknowledgeOrder)]
        return said[0] if said else None

    def exchange(self) -> None:
        """All that is to be said, until nothing is."""
        quiet = 0
        for _ in range(2000):
            self.upkeep.wake()
            self.upkeep.turn()
            # One job of the owner's own ends a turn, perhaps without a word; what has left is said a turn later.
            busy = self.wire.said or self.wire.answered or self.upkeep.moves.waiting
            quiet = 0 if busy else quiet + 1
            if quiet > 2:
                return
            self.wire.deliver_up()
            self.wire.deliver_down()
        raise AssertionError("the two never come to an end")
