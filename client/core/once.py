"""Computes a payload once per host: look up, else claim, else wait for the client that computes, else compute.

Owns: the order of the steps, for threads and for asyncio. The generator yields each step, and its driver sends the
outcome in. Does not own: the states of a claim (claim.py), waiting, computing.
Invariants: it waits for another client once at most, and then computes. A granted claim is committed or given back. A
value that nobody could store ends the claim for all who wait.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ...errors import TensordError, UnsupportedLeaf
from ...ipc import messages
from ...ipc.schema import COST_MS_MAX
from .claim import Claim
from .lease import Lease
from .link import Link
from .puts import Put
from .unstored import Unstored


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
    """Counts of `get_or_compute` calls: value found at once, received from another client, or computed here.

    `not_stored`: values that were computed here and refused, by the error's name. Values that were lost because the
    daemon was away are not counted.
    """

    found: int = 0
    waited: int = 0
    computed: int = 0
    not_stored: Counter[str] = field(default_factory=Counter)


Steps = Generator[AwaitAnswer | Compute | StoreValue, Any, Any]


def compute_once(
    key: bytes,
    look_up: Callable[[bytes], Lease | None],
    link: Link,
    tally: ComputeTally,
    unstored: Unstored,
    timeout_s: float,
) -> Steps:
    """The steps of one `get_or_compute`, as a generator whose return value is the payload.

    The driver throws an exception of the computation in. The generator gives the claim back, and raises the exception
    again.
    """
    lease = look_up(key)
    if lease is not None:
        tally.found += 1
        return lease.value
    claim = Claim(link, key, timeout_s)
    try:
        with suppress(TensordError):
            # No daemon, a limit was reached, or no answer in time: the value is computed without a claim.
            yield AwaitAnswer(claim.answer)
        if claim.wait_no_longer() == "hit":
            lease = look_up(key)
            if lease is not None:
                tally.waited += 1
                return lease.value
        token = claim.token or None
        began_s = time.perf_counter()
        value = yield Compute()
        cost_ms = min((time.perf_counter() - began_s) * 1000, COST_MS_MAX)
        tally.computed += 1
        try:
            put: Put = yield StoreValue(value, token, cost_ms)
        except UnsupportedLeaf as error:
            unstored.refused(key, error)
            claim.abandon(error)
            raise
    except BaseException:
        claim.abandon()
        raise
    claim.end(stored=put.state not in ("lost", "refused"), error=put.error)
    return value
