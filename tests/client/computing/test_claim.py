"""Claims by those who must not wait: asked for, looked at, and ended, by a real daemon's word."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import tensord
from tensord.client.computing.claim import Claim
from tensord.errors import BadKey, UsageError

from ...daemon_process import PATIENCE_S, Daemon, until
from ...memory_bench import key

_numbers = count(1)


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """Claims outlast any test."""
    with Daemon(limits_claim_s=60, limits_claim_s_max=120) as running:
        yield running.start()


@pytest.fixture
def clients(shared: Daemon) -> Iterator[tuple[tensord.Client, tensord.Client]]:
    with tensord.Client(shared.socket) as first, tensord.Client(shared.socket) as second:
        yield first, second
    shared.until(lambda s: not s["store"]["claims_held"] and not s["store"]["claims_waiting"], "no claim to be left")


@pytest.fixture
def wanted() -> bytes:
    """A key that nobody has asked for."""
    return key(next(_numbers))


def becomes(claim: Claim, state: str) -> None:
    until(lambda: claim.state == state, f"the claim to be {state!r}, not {claim.state!r}")


def computes_and_waits(
    first: tensord.Client, second: tensord.Client, wanted: bytes, **options: float
) -> tuple[Claim, Claim]:
    """The claim of the first, who computes, and that of the second, who waits."""
    mine = first.claim(wanted, **options)
    becomes(mine, "compute")
    theirs = second.claim(wanted)
    assert theirs.state in ("asked", "waiting")
    becomes(theirs, "waiting")
    return mine, theirs


def test_one_computes_the_other_waits_and_a_put_by_anybody_is_a_hit_for_it(
    shared: Daemon, clients: tuple[tensord.Client, tensord.Client], wanted: bytes
) -> None:
    mine, theirs = computes_and_waits(*clients, wanted)
    with tensord.Client(shared.socket) as worker:
        assert worker.put(wanted, np.arange(3), wait=True).state == "stored"
    becomes(theirs, "hit")
    assert clients[1].contains(wanted)
    becomes(mine, "compute")
    mine.stored()
    becomes(mine, "hit")
    shared.until(lambda s: not s["store"]["claims_held"], "the put to have ended the claim")
    assert shared.store("claims_handed_over") == 0


def test_a_claim_ended_as_stored_before_its_commit_arrives_makes_nobody_compute_again(
    clients: tuple[tensord.Client, tensord.Client], wanted: bytes
) -> None:
    first, second = clients
    mine, theirs = computes_and_waits(first, second, wanted)
    mine.stored()
    # Whatever was said before it has arrived, and been answered.
    assert first.touch(wanted) == second.touch(wanted) == 0
    assert theirs.state == "waiting"
    assert first.put(wanted, np.arange(3), wait=True).state == "stored"
    becomes(theirs, "hit")


def test_a_claim_abandoned_before_its_answer_is_given_back_when_the_answer_comes(
    shared: Daemon, clients: tuple[tensord.Client, tensord.Client], wanted: bytes
) -> None:
    first, _ = clients
    granted = shared.store("claims_granted")
    shared.pause()
    try:
        claims = [first.claim(wanted), first.claim(key(next(_numbers)))]
        assert [claim.state for claim in claims] == ["asked", "asked"]
        claims[0].abandon()
        claims[1].stored()
        assert [claim.state for claim in claims] == ["alone", "hit"]
    finally:
        shared.resume()
    shared.until(lambda s: s["store"]["claims_granted"] == granted + 2, "both to be granted")
    shared.until(lambda s: not s["store"]["claims_held"], "both to be given back")
    assert [claim.state for claim in claims] == ["alone", "hit"]


def outlives_itself(daemon: Daemon, wanted: bytes, claim_s: float) -> bool:
    """Whether a claim of `claim_s` is held for half as long again. It ends once nobody renews it."""
    mine, theirs = computes_and_waits(daemon.client(), daemon.client(), wanted)
    began = daemon.status()["uptime_s"]
    daemon.until(lambda s: s["uptime_s"] > began + 1.5 * claim_s, "a claim that is not renewed to end")
    if (mine.state, theirs.state) != ("compute", "waiting"):
        return False
    mine.stored()
    # Nothing was stored: nobody renews it, and it passes on.
    becomes(theirs, "compute")
    return True


def test_a_claim_is_renewed_until_it_is_ended() -> None:
    # A client that is not scheduled for two thirds of a claim's time loses it: then a longer one tells.
    for claim_s in (2.4, 12.0):
        with Daemon(limits_claim_s=claim_s, limits_claim_s_max=60) as daemon:
            if outlives_itself(daemon.start(), key(next(_numbers)), claim_s):
                return
    pytest.fail("a claim ended though its client lives")


def test_over_the_limit_or_without_a_daemon_a_client_computes_without_a_claim(tmp_path: Path, wanted: bytes) -> None:
    with tensord.Client(tmp_path / "nobody.sock", timeout_s=0.5) as client:
        claim = client.claim(wanted)
        assert claim.state == "alone"
        for wrong in ("too large", 5, ValueError("too large")):
            with pytest.raises(UsageError, match="must be a TensordError"):
                claim.abandon(wrong)  # type: ignore[arg-type]
        claim.abandon()
        claim.stored()
        with pytest.raises(BadKey):
            client.claim(b"short")
    with Daemon() as daemon:
        client = daemon.start().client()
        mine = client.claim(wanted)
        becomes(mine, "compute")
        others = [client.claim(key(next(_numbers))) for _ in range(1024)]
        becomes(others[-1], "alone")
        assert others[-2].state == "compute"
        os.kill(daemon.pid, signal.SIGKILL)
        until(lambda: not client.connected, "the client to notice")
        assert mine.state == "alone", "its claim is gone with the daemon"
        mine.abandon()


def test_a_client_that_waits_knows_when_the_payload_is_expected(
    clients: tuple[tensord.Client, tensord.Client], wanted: bytes
) -> None:
    before = time.monotonic()
    mine, theirs = computes_and_waits(*clients, wanted, within_s=40.0)
    assert before + 40.0 - PATIENCE_S < theirs.expected_at <= time.monotonic() + 40.0
    mine.abandon()
