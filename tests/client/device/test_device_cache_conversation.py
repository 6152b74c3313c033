"""What a cache and the daemon's core say to one another, in every order in which it can cross on the way.

The core is the daemon's own, and so is the cache's side; only the wire between them is the test's, which delivers in
either direction when it likes. When all is delivered, both sides must know the same entries.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tensord.client.device.entries import DeviceEntry, DeviceLease, Entries, Registration
from tensord.client.device.fake_vram import FakeCard, FakeVram
from tensord.client.device.upkeep import Upkeep
from tensord.client.puts import Put
from tensord.daemon.core.governor.effects import Send
from tensord.daemon.core.governor.events import ClientJoined, ClientLeft, Event, Received, Sample, Sampled, Tick
from tensord.daemon.core.governor.governor import Governor
from tensord.daemon.core.governor.limits import GovernorLimits
from tensord.errors import DaemonUnavailable
from tensord.ipc import messages
from tensord.ipc.modes import Tier

KEYS = [bytes([n]) * 32 for n in range(6)]
CARD = "card0"
TOTAL_BYTES = 1 << 20
ENTRY_BYTES = 4096
LIMITS = GovernorLimits(relaxed_idle_s=50.0, normal_idle_s=20.0, critical_idle_s=5.0, max_entries=5, retry_s=10.0)


class Wire:
    """A Link to a core in this thread: what is said waits until the test delivers it."""

    def __init__(self) -> None:
        self.governor = Governor(LIMITS)
        self.limits = messages.Limits()
        self.closed = False
        self.client = 0
        self.now = 0.0
        self.errors: list[messages.Error] = []
        self.said: deque[messages.Message] = deque()
        self.answered: deque[messages.Message] = deque()
        self.connection: Any = None
        self._asked: dict[int, tuple[Future[Any], Callable[[Future[Any]], None]]] = {}
        self._number = 0

    # ---- as the cache sees it

    def ask(
        self,
        make: Callable[[int], messages.Message],
        timeout_s: float,
        *,
        connected: Any = None,
        then: Callable[[Future[Any]], None] = lambda _: None,
    ) -> Future[Any]:
        self._number += 1
        answer: Future[Any] = Future()
        answer.add_done_callback(then)
        if connected is not self.connection:
            answer.set_exception(DaemonUnavailable("gone"))
            return answer
        self._asked[self._number] = answer, then
        self.said.append(make(self._number))
        return answer

    def send(self, *sent: messages.Message, timeout_s: float, connected: Any = None) -> None:
        if connected is not self.connection:
            raise DaemonUnavailable("gone")
        self.said.extend(sent)

    def listen(self, listener: Upkeep) -> None:
        self.listener = listener

    def unlisten(self, listener: Upkeep) -> None:
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
        asked, self._asked = self._asked, {}
        self.connection = None
        for answer, _ in asked.values():
            answer.set_exception(DaemonUnavailable("gone"))
        self.listener.detached()
        self.client += 1
        self.connection = object()
        self.happen(ClientJoined(self.client, "owner", 1))
        self.happen(Received(self.client, messages.Subscribe(0)))
        self.listener.attached(self.connection)

    def deliver_up(self) -> None:
        if self.said:
            said: Any = self.said.popleft()
            self.happen(Received(self.client, said))

    def deliver_down(self) -> None:
        if not self.answered:
            return
        message: Any = self.answered.popleft()
        if isinstance(message, messages.ModeChanged | messages.Order | messages.Modes | messages.DeviceOpened):
            self.listener.told(message, self.connection)
        if isinstance(message, messages.Error):
            self.errors.append(message)
        asked = self._asked.pop(getattr(message, "id", -1), None)
        if asked is None:
            return
        if isinstance(message, messages.Error):
            asked[0].set_exception(message.to_error())
        else:
            asked[0].set_result(message)

    def registered(self) -> set[bytes]:
        device = self.governor.devices._devices.get(CARD)
        return set(device.table._rows) if device else set()


class HostTier:
    """What offloaded trees are put into: the ring, as far as a conversation needs one."""

    def __init__(self, wire: Wire) -> None:
        self.link = wire
        self.governor = SimpleNamespace(watch=lambda: None)
        self.trees: dict[bytes, Any] = {}
        self.full = False

    def put(self, key: bytes, tree: Any, *, tokens: int, timeout_s: float) -> Put:
        put = Put(key)
        if self.full:
            put.settle("refused")
        else:
            self.trees[key] = tree
            put.settle("stored")
        return put

    def get(self, key: bytes) -> Any:
        return leased(self.trees[key]) if key in self.trees else None

    def peek(self, key: bytes) -> None:
        return None


@contextmanager
def leased(tree: Any) -> Iterator[Any]:
    yield SimpleNamespace(tree=tree)


class Conversation(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.card = FakeCard(Path(self.folder.name), CARD, TOTAL_BYTES)
        self.device = FakeVram(self.card)
        self.wire = Wire()
        self.host = HostTier(self.wire)
        self.entries = Entries()
        client: Any = self.host
        self.upkeep = Upkeep(client, self.device, self.entries, uses_every_s=1e-9)
        self.wire.listen(self.upkeep)
        self.wire.connect()
        self.leases: list[DeviceLease] = []
        self.registrations: list[Registration] = []
        self.somebody_was_late = False

    # ---- the owner

    @rule(key=st.sampled_from(KEYS), tokens=st.integers(0, 3), blocks=st.integers(1, 2))
    def put(self, key: bytes, tokens: int, blocks: int) -> None:
        tensor = self.device.upload(np.full(blocks * ENTRY_BYTES, key[0], np.uint8))
        registration = Registration(key)
        self.registrations.append(registration)
        size_bytes = self.device.size_of(tensor)
        assert self.entries.put(DeviceEntry(key, tensor, size_bytes, tokens, "", registration, [self.device.mark()]))

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: bytes) -> None:
        assert self.entries.delete([key]) == (1 if key in self.entries else 0) or key not in self.entries

    @rule(key=st.sampled_from(KEYS))
    def get(self, key: bytes) -> None:
        lease = self.entries.lease(key, self.device)
        if lease is not None:
            self.leases.append(lease)

    @rule()
    def give_leases_back(self) -> None:
        for lease in self.leases:
            assert (lease.tree.numpy() == lease.tree.numpy()[0]).all()
            lease.release()
        self.leases.clear()

    @rule(turns=st.integers(1, 3))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.upkeep.wake()
            self.upkeep.turn()

    # ---- the wire

    @rule(count=st.integers(1, 4))
    def deliver_up(self, count: int) -> None:
        for _ in range(count):
            self.wire.deliver_up()

    @rule(count=st.integers(1, 4))
    def deliver_down(self, count: int) -> None:
        for _ in range(count):
            self.wire.deliver_down()

    @rule()
    def connect_anew(self) -> None:
        self.wire.connect()

    # ---- the daemon

    @rule(share=st.sampled_from([0.1, 0.75, 0.9, 0.94, 0.99]))
    def sample(self, share: float) -> None:
        self.wire.now += 0.25
        used_bytes = int(share * TOTAL_BYTES)
        self.wire.happen(Sampled((Sample(CARD, Tier.DEVICE, used_bytes, TOTAL_BYTES, "file", self.wire.now),)))

    @rule(s=st.sampled_from([1.0, 6.0, 30.0, 60.0]))
    def wait(self, s: float) -> None:
        self.wire.now += s
        before = self.wire.governor.counters.timed_out
        self.wire.happen(Tick())
        self.somebody_was_late |= self.wire.governor.counters.timed_out > before

    @rule(full=st.booleans())
    def fill_host(self, full: bool) -> None:
        self.host.full = full

    @invariant()
    def sums_are_right(self) -> None:
        self.entries.check_invariants()

    def teardown(self) -> None:
        try:
            self.give_leases_back()
            # Nothing is refused for long any more, and nothing leaves by itself.
            for _ in range(2):
                self.sample(0.1)
            for _ in range(2000):
                self.upkeep.wake()
                self.upkeep.turn()
                if not (self.wire.said or self.wire.answered):
                    break
                self.wire.deliver_up()
                self.wire.deliver_down()
            else:
                raise AssertionError("the two never come to an end")
            assert set(self.entries.keys()) == self.wire.registered()
            codes = {error.code for error in self.wire.errors}
            assert codes <= {"UnderPressure", "DeviceFull"} | ({"UnknownOrder"} if self.somebody_was_late else set())
            assert all(r.state != "sent" for r in self.registrations if r.key in self.entries)
            assert self.upkeep.error is None
        finally:
            self.card.close()
            self.folder.cleanup()


Conversation.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestWhateverCrossesBothSidesKnowTheSameEntries = Conversation.TestCase
