"""Computes a payload once per host: look up, else claim, else wait for the client that computes, else compute.

Owns: the order of the steps, for threads and for asyncio: a coroutine, which threads run by `at_once`; the count of
values that were not stored. Does not own: the states of a claim (claim.py).
Invariants: it waits for another client once at most, and then computes; for a daemon that does not answer it waits
WORD_S at most. A granted claim is committed or given back.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import Struct, field

from ...errors import Invalidated, TensordError, UnderPressure, UnsupportedLeaf, UsageError, shown
from ...ipc.messages import control as messages
from ...ipc.messages.schema import COST_MS_MAX, DURATION_S_MAX
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..arguments.checks import check_key
from ..link.absence import WORD_S
from ..link.answers import PendingRequest
from ..link.link import Link
from ..writing.outcomes import Put
from .claim import Claim

if TYPE_CHECKING:
    from ..core.puts import PutCalls

Result = TypeVar("Result")
_log = logging.getLogger("tensord")
_TOLD_MAX: Final = 1024
_PASSING: Final = (Invalidated, UnderPressure)
"""Refusals that a sound program meets, and that end by themselves."""
_told: Final[set[tuple[bytes, str]]] = set()
"""Namespaces and names of errors of which this process has told."""


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


class Computation:
    """One `get_or_compute`, carried out in the calling thread. `AsyncClient` overrides what may wait. `deadline`: until
    when another client is waited for, by time.monotonic."""

    def __init__(
        self, client: PutCalls, key: bytes, compute: object, tokens: int, ttl_s: float | None, deadline: float
    ) -> None:
        if not callable(compute):
            wants = "a function without arguments that returns a tree"
            raise UsageError(f"compute is {shown(compute)}; it must be {wants}")
        self._client, self._key, self._compute = client, key, compute
        self._tokens, self._ttl_s, self._deadline = tokens, ttl_s, deadline

    async def run(self) -> Any:
        """Returns the payload. After an exception of a step it gives the claim back, and raises it."""
        client, key = self._client, check_key(self._key)
        lease = client.get(key)
        if lease is not None:
            client.tally.found += 1
            return lease.value
        claim = Claim(client.link, key, min(client.timeout_s, WORD_S))
        try:
            return await self._claimed(claim)
        except BaseException:
            claim.abandon()
            raise

    async def _claimed(self, claim: Claim) -> Any:
        client, answer = self._client, claim.answer
        if await answers(client.link, answer, self.listen):
            await self.listen(answer, DURATION_S_MAX)
            if not answer.done():
                client.link.silence.timed_out()
        if claim.wait_no_longer() == "hit" and (lease := client.get(claim.key)) is not None:
            client.tally.waited += 1
            return lease.value
        token = claim.token or None
        began_s = time.perf_counter()
        value = await self.compute()
        cost_ms = min((time.perf_counter() - began_s) * 1000, COST_MS_MAX)
        client.tally.computed += 1
        try:
            put = await self.store(partial(self._put, claim.key, value, token, cost_ms))
        except UnsupportedLeaf as error:
            client.tally.refused(claim.key, error)
            claim.abandon(error)
            raise
        claim.end(stored=put.state not in ("lost", "refused"), error=put.error)
        return value

    def _put(self, key: bytes, value: Any, claim: int | None, cost_ms: float) -> Put:
        return self._client.store(key, value, tokens=self._tokens, ttl_s=self._ttl_s, claim=claim, cost_ms=cost_ms)

    async def listen(self, future: Future[Any], within_s: float) -> None:
        """Waits until this future is settled, for at most `within_s` seconds, and not beyond the deadline. Raises
        nothing."""
        self._client.link.answers.within(future, min(within_s, self._deadline - time.monotonic()))

    async def compute(self) -> Any:
        """Computes the value."""
        return self._compute()

    async def store(self, put: Callable[[], Put]) -> Put:
        """Puts the value."""
        return put()
