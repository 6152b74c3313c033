"""Computes a payload once per host: look up, else claim, else wait for the client that computes, else compute.

Owns: the order of the steps, for threads and for asyncio: a coroutine, whose driver waits, computes and puts. Threads
run it by `at_once`. The count of values that were not stored. Does not own: the states of a claim (claim.py), waiting,
computing.
Invariants: it waits for another client once at most, and then computes; for a daemon that does not answer it waits
WORD_S at most. A granted claim is committed or given back. A value that nobody could store ends the claim for all who
wait.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, Protocol, TypeVar

from msgspec import Struct, field

from ...errors import Invalidated, TensordError, UnderPressure, UnsupportedLeaf, without_frames
from ...ipc.messages import control as messages
from ...ipc.messages.schema import COST_MS_MAX
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..link.absence import WORD_S
from ..link.answers import PendingRequest
from ..link.link import Link
from ..reading.lease import Lease
from ..writing.outcomes import Put
from .claim import Claim

Result = TypeVar("Result")
_log = logging.getLogger("tensord")
_TOLD_MAX: Final = 1024
_PASSING: Final = (Invalidated, UnderPressure)
"""Refusals that a sound program meets, and that end by themselves."""
_told: Final[set[tuple[bytes, str]]] = set()
"""Namespaces and names of errors of which this process has told."""


class Driver(Protocol):
    """How the steps of one computation are carried out."""

    async def answer(self, future: Future[Any]) -> None:
        """Waits for this answer of the daemon, and raises its error."""

    async def listen(self, future: Future[Any], within_s: float) -> None:
        """Waits until this future is settled, for at most `within_s` seconds. Whatever its outcome, it raises nothing,
        and the request stays."""

    async def compute(self) -> Any:
        """Computes the value."""

    async def store(self, value: Any, claim: int | None, cost_ms: float) -> Put:
        """Puts the value under the claim, or without one if None. `cost_ms`: milliseconds that computing it took."""
        ...


class ComputeTally(Struct):
    """Counts of `get_or_compute` calls: value found at once, received from another client, or computed here.

    `not_stored`: values that were computed here and refused, by the error's name. Values that were lost because the
    daemon was away are not counted.
    """

    found: int = 0
    waited: int = 0
    computed: int = 0
    not_stored: Counter[str] = field(default_factory=Counter)

    def refused(self, key: bytes, error: TensordError) -> None:
        """Counts the value of `key`, which could not be stored, and logs the reason: one line of the process for each
        namespace and name of an error. Any thread may call it. For the library."""
        self.not_stored[error.code] += 1
        reason = key[:NAMESPACE_TAG_BYTES], error.code
        if isinstance(error, _PASSING) or reason in _told or len(_told) >= _TOLD_MAX:
            return
        _told.add(reason)
        _log.warning(
            "computed values of the namespace %s are not stored, so each process computes them itself: %s: %s",
            reason[0].hex(),
            error.code,
            str(error),  # whoever keeps log records would keep the error's frames
        )


def at_once(steps: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that never suspends: its driver waits in the calling thread."""
    try:
        steps.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    raise AssertionError("a step was not carried out at once")


async def answers(link: Link, asked: PendingRequest, listen: Callable[[Future[Any], float], Awaitable[None]]) -> bool:
    """Finds out whether the daemon answers at all, for a caller who can do without it: WORD_S seconds in all, and none
    beside a daemon that has said nothing for so long. A daemon may have good reason not to answer this request yet, so
    it is asked another one, which it answers at once."""
    half_s = link.silence.patience_s / 2
    if half_s:
        await listen(asked, half_s)
    if not half_s or asked.done() or asked.waits:
        return asked.done() or asked.waits
    probe = link.ask(lambda number: messages.Touch(number, []), 0.0)
    await listen(probe, half_s)
    probe.cancel()
    return asked.done() or not (probe.cancelled() or probe.exception())


async def compute_once(
    key: bytes,
    look_up: Callable[[bytes], Lease | None],
    link: Link,
    tally: ComputeTally,
    timeout_s: float,
    driver: Driver,
) -> Any:
    """The payload of one `get_or_compute`. After an exception of a step it gives the claim back, and raises it."""
    lease = look_up(key)
    if lease is not None:
        tally.found += 1
        return lease.value
    claim = Claim(link, key, min(timeout_s, WORD_S))
    try:
        if await answers(link, claim.answer, driver.listen):
            try:
                await driver.answer(claim.answer)
            except TensordError as error:
                # No daemon, a limit was reached, or no answer in time: the value is computed without a claim. The
                # answer keeps the error, and with its frames it would keep this one and all that called it.
                without_frames(error)
        if claim.wait_no_longer() == "hit":
            lease = look_up(key)
            if lease is not None:
                tally.waited += 1
                return lease.value
        token = claim.token or None
        began_s = time.perf_counter()
        value = await driver.compute()
        cost_ms = min((time.perf_counter() - began_s) * 1000, COST_MS_MAX)
        tally.computed += 1
        try:
            put = await driver.store(value, token, cost_ms)
        except UnsupportedLeaf as error:
            tally.refused(key, error)
            claim.abandon(error)
            raise
    except BaseException:
        claim.abandon()
        raise
    claim.end(stored=put.state not in ("lost", "refused"), error=put.error)
    return value
