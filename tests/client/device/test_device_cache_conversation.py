"""What a cache and the daemon's core say to one another, in every order in which it can cross on the way; and what goes
in a move, and what stays.

The core is the daemon's own, and so is the cache's side; only the wire between them is the test's, which delivers in
either direction when it likes. When all is delivered, both sides must know the same entries.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tensord.client.device import moves
from tensord.client.device.entries import DeviceLease, Registration
from tensord.daemon.forms.events import Tick
from tensord.daemon.governor.forms.events import Sample, Sampled
from tensord.ipc.messages.modes import Tier
from tensord.testing.fake_vram import FakeCard, FakeStream

from ...daemon_process import PATIENCE_S
from .wire import CARD, Owner

KEYS = [bytes([n]) * 32 for n in range(6)]
TOTAL_BYTES = 1 << 20
ENTRY_BYTES = 4096


class Conversation(Owner, RuleBasedStateMachine):
    def __init__(self) -> None:
        RuleBasedStateMachine.__init__(self)
        self.folder = tempfile.TemporaryDirectory()
        self.card = FakeCard(Path(self.folder.name), CARD, TOTAL_BYTES)
        Owner.__init__(self, self.card)
        self.leases: list[DeviceLease] = []
        self.registrations: list[Registration] = []
        self.somebody_was_late = False
        for key in KEYS[:4]:
            self.put(key, 1, 1)
        self.exchange()

    # ---- the owner

    @rule(key=st.sampled_from(KEYS), tokens=st.integers(0, 3), blocks=st.integers(1, 2))
    def put(self, key: bytes, tokens: int, blocks: int) -> None:
        kept = self.enter(key, np.full(blocks * ENTRY_BYTES, key[0], np.uint8), tokens)
        self.registrations.append(kept.registration)

    @rule(key=st.sampled_from(KEYS), blocks=st.integers(1, 2))
    def put_anew(self, key: bytes, blocks: int) -> None:
        self.entries.delete([key])
        self.put(key, 1, blocks)

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: bytes) -> None:
        before = self.entries.keys()
        assert self.entries.delete([key]) == (key in before)

    @rule(key=st.sampled_from(KEYS))
    def get(self, key: bytes) -> None:
        self.leases += filter(None, [self.entries.lease(key)])

    @rule(keys=st.sets(st.sampled_from(KEYS)))
    def send_away(self, keys: set[bytes]) -> None:
        self.upkeep.send_away(keys)

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

    @rule()
    def order_all_away(self) -> None:
        self.wire.now += 6.0
        self.sample(0.94)

    @rule(s=st.sampled_from([1.0, 6.0, 30.0, 60.0]))
    def wait(self, s: float) -> None:
        self.wire.now += s
        before = self.wire.governor.outbox.counters.timed_out
        self.wire.happen(Tick())
        self.somebody_was_late |= self.wire.governor.outbox.counters.timed_out > before

    @rule(full=st.booleans())
    def fill_host(self, full: bool) -> None:
        self.host.full = full

    def teardown(self) -> None:
        try:
            self.give_leases_back()
            # Nothing is refused for long any more, and nothing leaves by itself.
            for _ in range(2):
                self.sample(0.1)
            self.exchange()
            assert set(self.entries.keys()) == set(self.upkeep.ledger.told)
            assert self.wire.sizes() == {key: entry.size_bytes for key, entry in self.entries._table.items()}
            codes = {error.code for error in self.wire.errors}
            assert codes <= {"UnderPressure", "DeviceFull"} | ({"UnknownOrder"} if self.somebody_was_late else set())
            assert all(registration.state != "sent" for registration in self.registrations)
            assert self.upkeep.error is None
        finally:
            self.card.close()
            self.folder.cleanup()


Conversation.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestWhateverCrossesBothSidesKnowTheSameEntries = Conversation.TestCase


# ---- one order by itself


@pytest.fixture
def owner(card: FakeCard) -> Owner:
    """With entry 1, which the daemon knows."""
    owner = Owner(card)
    owner.enter(KEYS[1], np.arange(ENTRY_BYTES))
    owner.exchange()
    return owner


def read(owner: Owner) -> None:
    lease = owner.entries.lease(KEYS[1])
    assert lease is not None
    lease.release()


def test_an_entry_that_cannot_be_copied_is_dropped_unless_the_daemon_is_gone(owner: Owner) -> None:
    owner.host.full = True
    connection = owner.wire.connection
    owner.host.after_put = lambda: setattr(owner.wire, "connection", None)
    assert owner.ordered(KEYS[1], "offload") is None and KEYS[1] in owner.entries
    owner.host.after_put = lambda: None
    owner.wire.connection = connection
    moved = owner.ordered(KEYS[1], "offload")
    assert moved is not None and moved.dropped == [KEYS[1]] and moved.freed_bytes > 0 and len(owner.entries) == 0


def test_an_entry_that_is_read_while_it_is_copied_stays(owner: Owner) -> None:
    owner.host.after_put = lambda: read(owner)
    moved = owner.ordered(KEYS[1], "offload")
    assert moved is not None and moved.kept == [KEYS[1]] and KEYS[1] in owner.entries


@pytest.mark.parametrize("kind", ["offload", "drop"])
def test_nothing_goes_before_every_stream_that_used_it_has_done_so(
    owner: Owner, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark that is missing is neither the last nor of the stream that put it."""
    monkeypatch.setattr(moves, "_MARK_S", 0.0)
    entry = owner.entries.find(KEYS[1])
    assert entry is not None
    with owner.device.on(FakeStream()) as stream, stream.hold():
        read(owner)
        entry.marks.append(FakeStream().mark())
        assert all(mark.wait(PATIENCE_S) for mark in (entry.marks[0], entry.marks[-1]))
        moved = owner.ordered(KEYS[1], kind)
        assert moved is not None and moved.kept == [KEYS[1]]


def test_an_offload_that_its_owner_asks_for_while_the_daemon_leaves_is_tried_with_the_next(owner: Owner) -> None:
    owner.wire.listener.detached()
    _, leaving = owner.upkeep.send_away([KEYS[1]])
    owner.wire.connect()
    owner.exchange()
    assert leaving.ended.is_set() and leaving.gone == 1 and KEYS[1] not in owner.entries
