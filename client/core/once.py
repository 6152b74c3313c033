"""Computes a payload once per host: look up, else claim, else wait for the client that computes, else compute.

Owns: the order of the steps, for threads and for asyncio. Does not own: waiting and computing. The generator yields
each step, and its driver sends the outcome in.
Invariants: it waits for another client once at most, and then computes. A granted claim is committed or given back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ...errors import TensordError
from ...ipc import messages
from ...ipc.schema import COST_MS_MAX
from .lease import Lease
from .link import Link
from .puts import Put


@dataclass(frozen=True, slots=True)
class AwaitAnswer:
    """Step: wait for this answer of the daemon."""

    future: Future[messages.Claimed]


@dataclass(frozen=True, slots=True)
class Compute:
    """Step: compute the value."""


@dataclass(frozen=True, slots=True)
class StoreValue:
    """Step: put the value under the claim, or without one if None. `cost_ms`: milliseconds that computing it took."""

    value: Any
    claim: int | None
    cost_ms: float


@dataclass(slots=True)
class ComputeTally:
    """Counts of `get_or_compute` calls: value found at once, received from another client, or computed here."""

    found: int = 0
    waited: int = 0
    computed: int = 0


Steps = Generator[AwaitAnswer | Compute | StoreValue, Any, Any]


def compute_once(
    key: bytes, look_up: Callable[[bytes], Lease | None], link: Link, tally: ComputeTally, timeout_s: float
) -> Steps:
    """The steps of one `get_or_compute`, as a generator whose return value is the payload.

    The driver throws an exception of the computation in. The generator gives the claim back, and raises the exception
    again.
    """
    lease = look_up(key)
    if lease is not None:
        tally.found += 1
        return lease.value
    token: int | None = None
    asked = link.ask(lambda number: messages.RequestClaim(number, key), timeout_s)
    try:
        claimed: messages.Claimed | None = yield AwaitAnswer(asked)
    except TensordError:
        # No daemon, a limit was reached, or no answer in time. The value is computed without a claim.
        claimed = _late(asked)
    except BaseException:
        claimed = _late(asked)
        _abandon(link, claimed.token if claimed is not None and claimed.answer == "compute" else None)
        raise
    if claimed is not None and claimed.answer == "hit":
        lease = look_up(key)
        if lease is not None:
            tally.waited += 1
            return lease.value
    if claimed is not None and claimed.answer == "compute":
        token = claimed.token
    try:
        began_s = time.perf_counter()
        value = yield Compute()
        cost_ms = min((time.perf_counter() - began_s) * 1000, COST_MS_MAX)
        tally.computed += 1
        put: Put = yield StoreValue(value, token, cost_ms)
    except BaseException:
        _abandon(link, token)
        raise
    if put.state in ("lost", "refused"):
        _abandon(link, token)
    elif token is not None:
        link.drop_claim(token)
    return value


def _late(asked: Future[messages.Claimed]) -> messages.Claimed | None:
    """The answer that arrived while the wait for it ended, which may be a grant; None if there is none."""
    if asked.cancel() or asked.exception() is not None:
        return None
    return asked.result()


def _abandon(link: Link, token: int | None) -> None:
    if token is not None:
        link.give_back(token)
