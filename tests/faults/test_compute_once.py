"""Compute once per host: several processes miss one key, and one of them computes, whatever happens to it.

A computation here tells the test that it has begun, and goes on when the test says so; whoever waits is seen to wait in
the daemon's status.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tensord

from ..daemon_process import PATIENCE_S, Daemon, until
from ..processes import Child, Stage
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
