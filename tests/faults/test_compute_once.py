"""Compute once per host: several processes miss one key, and one of them computes, whatever happens to it.

A computation here tells the test that it has begun, and goes on when the test says so; whoever waits is seen to wait in
the daemon's status. A value that cannot be stored costs each process its own computation: nobody waits in vain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.errors import UnsupportedLeaf

from ..daemon_process import PATIENCE_S, Daemon, until
from ..processes import Child, Stage, python
from .payloads import is_payload, key, payload

KEY = key(1)


@pytest.fixture
def patient() -> Iterator[Daemon]:
    """Claims outlast any test."""
    with Daemon(limits_claim_s=60, limits_claim_s_max=120) as running:
        yield running.start()


def asks(stage: Stage, socket: Path, timeout_s: float) -> tuple[Any, ...]:
    """Asks for the key. Its computation says so, and then waits to be told to go on."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)

    def compute() -> Any:
        stage.tell("computing")
        stage.hear()
        return payload(1)

    value = client.get_or_compute(KEY, compute, timeout_s=timeout_s)
    outcome = "right" if is_payload(value, 1) else "wrong"
    return (outcome, client.tally.found, client.tally.waited, client.tally.computed)


FOUND, WAITED, COMPUTED = ("right", 1, 0, 0), ("right", 0, 1, 0), ("right", 0, 0, 1)


class Company:
    """Processes that ask for the same key: the first computes, the others wait for it."""

    def __init__(self, stack: ExitStack, daemon: Daemon, waiting: int, timeout_s: float = 60.0) -> None:
        self.daemon = daemon
        self.claimant = stack.enter_context(Child(asks, daemon.socket, timeout_s))
        assert self.claimant.hear() == "computing"
        self.waiters = [stack.enter_context(Child(asks, daemon.socket, timeout_s)) for _ in range(waiting)]
        self.await_waiting(waiting)

    def await_waiting(self, how_many: int) -> None:
        self.daemon.until(lambda s: s["store"]["claims_waiting"] == how_many, f"{how_many} to wait")

    def heir(self) -> Child:
        """The one waiter that has begun to compute."""
        heirs = until(lambda: [w for w in self.waiters if not w.silent()], "a waiter to compute")
        assert len(heirs) == 1
        assert heirs[0].hear() == "computing"
        self.waiters.remove(heirs[0])
        return heirs[0]


def test_one_of_many_processes_computes_and_the_others_get_its_result(patient: Daemon) -> None:
    with ExitStack() as stack:
        company = Company(stack, patient, 5)
        assert all(waiter.silent() for waiter in company.waiters)
        company.claimant.tell("go on")
        assert company.claimant.hear() == COMPUTED
        assert [waiter.hear() for waiter in company.waiters] == [WAITED] * 5
        late = stack.enter_context(Child(asks, patient.socket, 60.0))
        assert late.hear() == FOUND
    assert patient.store("puts") == {"stored": 1}
    assert patient.store("claims_held") == 0


def test_when_a_claimant_is_killed_one_of_those_who_wait_computes(patient: Daemon) -> None:
    with ExitStack() as stack:
        company = Company(stack, patient, 3)
        company.claimant.kill()
        heir = company.heir()
        company.await_waiting(2)
        heir.tell("go on")
        assert heir.hear() == COMPUTED
        assert [waiter.hear() for waiter in company.waiters] == [WAITED] * 2


def test_a_claim_ends_at_claim_s_max_though_its_holder_lives() -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(limits_claim_s=1, limits_claim_s_max=1)).start()
        company = Company(stack, daemon, 0)
        # On a busy machine the claim may have ended before this one asks.
        heir = stack.enter_context(Child(asks, daemon.socket, 60.0))
        assert heir.hear() == "computing"
        heir.tell("go on")
        assert heir.hear() == COMPUTED
        company.claimant.tell("go on")
        assert company.claimant.hear() == COMPUTED
        # Its put goes on after it has its value.
        daemon.until(lambda status: status["store"]["puts"].get("existed") == 1, "the second put is seen to be one")


def test_waiting_callers_compute_when_the_daemon_dies(patient: Daemon) -> None:
    with ExitStack() as stack:
        company = Company(stack, patient, 2)
        patient.kill()
        assert [waiter.hear() for waiter in company.waiters] == ["computing"] * 2
        for child in [company.claimant, *company.waiters]:
            child.tell("go on")
            assert child.hear() == COMPUTED


PROGRAM = """
import sys
from pathlib import Path
socket, key, imported, patched = sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3], sys.argv[4]
if imported == "before":
    import tensord
    tensord.Client
from gevent import monkey
if patched != "nothing":
    monkey.patch_all(thread=patched == "all")
import gevent
import tensord

# Longer than the test waits: who waits for a time limit has failed.
client = tensord.Client(socket, timeout_s=1e6)
computing, go_on = gevent.event.Event(), gevent.event.Event()
computed = []

def compute():
    computing.set()
    go_on.wait()
    computed.append(1)
    return "value"

def ask():
    return client.get_or_compute(key, compute)

first = gevent.spawn(ask)
computing.wait()
second = gevent.spawn(ask)
gevent.spawn_later(0, go_on.set)
print(ask(), first.get(), second.get(), len(computed), client.tally.waited)
print(client.put(bytes(32), 1, wait=True).state, client.touch(bytes(32)), client.get(bytes(32)).tree)
client.close()
"""


@pytest.mark.skipif(find_spec("gevent") is None, reason="gevent is not installed")
@pytest.mark.parametrize(
    ("imported", "patched"), [("after", "all"), ("after", "all but threads"), ("after", "nothing"), ("before", "all")]
)
def test_greenlets_of_one_thread_compute_once(daemon: Daemon, imported: str, patched: str) -> None:
    ended = python("-c", PROGRAM, str(daemon.socket), key(1).hex(), imported, patched)
    assert ended.stdout == "value value value 1 2\nstored 1 1\n", ended.stderr
    assert ended.returncode == 0 and not ended.stderr


SMALL_BYTES = 4 << 20


class Unknown:
    """A type that no payload has."""


VALUES: dict[str, tuple[Callable[[], Any], int, str]] = {
    "more nodes than a tree has": (lambda: [[{}] for _ in range(20_000)], 0, "ObjectTooLarge"),
    "a header of more than a mebibyte": (lambda: ["x" * 100] * 20_000, 0, "ObjectTooLarge"),
    "larger than the ring": (lambda: np.zeros(SMALL_BYTES, np.uint8), 0, "ObjectTooLarge"),
    "larger than object_bytes_max": (lambda: np.zeros(3 << 20, np.uint8), 0, "ObjectTooLarge"),
    "a type that no payload has": (lambda: {"a": Unknown()}, 0, "UnsupportedLeaf"),
    "more tokens than the store may have": (lambda: np.zeros(9), 1000, "LimitReached"),
}


def asks_twice(stage: Stage, socket: Path, case: str) -> tuple[Any, ...]:
    """Asks for the key twice. The computation says so, and then goes on."""
    made, tokens, _ = VALUES[case]
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tensord").addHandler(handler)

    def compute() -> Any:
        stage.tell("computing")
        stage.hear()
        return made()

    with tensord.Client(socket, timeout_s=PATIENCE_S) as client:
        for _ in range(2):
            try:
                client.get_or_compute(KEY, compute, tokens=tokens, timeout_s=PATIENCE_S)
            except UnsupportedLeaf:
                continue
        # The daemon's answer to a put comes in the link's thread; that of a later request comes after it.
        client.evict(bytes(32))
        assert client.tally.waited == 0
        return client.tally.computed, dict(client.tally.not_stored), lines


@pytest.fixture
def limited() -> Iterator[Daemon]:
    """Claims outlast any test."""
    limits: dict[str, Any] = {"limits_claim_s": 60, "limits_claim_s_max": 120, "limits_object_bytes_max": 2 << 20}
    with Daemon(ring_bytes=SMALL_BYTES, max_tokens=100, **limits) as running:
        yield running.start()


@pytest.mark.parametrize("case", VALUES)
def test_nobody_waits_for_a_value_that_cannot_be_stored(case: str, limited: Daemon) -> None:
    *_, code = VALUES[case]
    with ExitStack() as stack:
        first = stack.enter_context(Child(asks_twice, limited.socket, case))
        assert first.hear() == "computing"
        others = [stack.enter_context(Child(asks_twice, limited.socket, case)) for _ in range(5)]
        limited.until(lambda status: status["store"]["claims_waiting"] == 5, "five to wait")
        first.tell("go on")
        # All six compute at the same time, none behind another: the first one for the second time.
        assert [child.hear() for child in (first, *others)] == ["computing"] * 6
        for child in (first, *others):
            child.tell("go on")
        assert [child.hear() for child in others] == ["computing"] * 5
        for child in others:
            child.tell("go on")
        for child in (first, *others):
            computed, not_stored, lines = child.hear()
            assert not_stored == {code: 2}
            assert computed == 2
            [line] = [line for line in lines if KEY[:8].hex() in line]
            assert code in line
    store = limited.status()["store"]
    assert (store["claims_granted"], store["claims_handed_over"], store["claims_held"]) == (1, 0, 0)
    assert store["claims_unstorable"] == {code: 1}
    assert store["refusals"][code] >= 1
