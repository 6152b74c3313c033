"""One single-flight claim, from the request to its end: the states that every way to compute once goes through.

    asked ─→ waiting ─→ hit        stored by another client
      │         ├─────→ compute ─→ hit, once it is stored; alone, if it is not
      └─────────┴─────→ alone

Does not own: the decision which client computes (the daemon's), nor waiting. `once.py` drives a claim for a caller that
may wait, `vllm/encoder/claims.py` for the requests of an engine, `transformers/calls.py` for the items of a call.
Invariants: a claim that is granted after its end is given back at once, however late the answer comes.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Literal

from ...errors import TensordError, UsageError, shown
from ...ipc.messages import control as messages
from ..link.answers import PendingRequest
from ..link.link import SAY_S, Link
from ..threads.aside import aside
from ..threads.of_process import OfThisProcess

State = Literal["asked", "waiting", "compute", "hit", "alone"]


class Claim(OfThisProcess):
    """A single-flight claim on `key`, pending or granted. Belongs to the process that created it.

    The client renews a granted claim until it ends; other clients wait for as long. End each claim with `stored` or
    `abandon`. A claim that is garbage-collected is given back. A put of the key by any client ends the claim for all
    clients that wait.

    Example:
        >>> claim = cache.claim(key)
        >>> claim.state in ("asked", "compute")                   # "compute" once the daemon has granted it
        True
        >>> cache.put(key, np.zeros(3), wait=True).state
        'stored'
        >>> claim.stored()
        >>> claim.state
        'hit'
    """

    _instead = "end it here; another process claims the key by itself (Client.claim)"

    def __init__(self, link: Link, key: bytes, timeout_s: float, within_s: float = 0.0) -> None:
        """Sends the request, for up to `timeout_s` seconds if the daemon's socket is full. `within_s`: see
        `Client.claim`."""
        self.key = key
        self._link = link
        self._ended: Literal["hit", "alone"] | None = None
        self.answer: PendingRequest = link.ask(lambda number: messages.RequestClaim(number, key, within_s), timeout_s)

    @property
    def state(self) -> State:
        """The state so far. Sends no message.

        - "asked": the daemon has not answered.
        - "waiting": another client computes the payload.
        - "compute": the claim is granted. Compute the payload; other clients wait for it.
        - "hit": the payload is stored.
        - "alone": no claim: the daemon is away, a limit was reached, or the claim was given back. Compute the payload
          if you need it; no client waits for it.
        """
        if self._ended is not None:
            return self._ended
        answer = self.answer
        if not answer.done():
            return "waiting" if answer.waits else "asked"
        claimed = _outcome(answer)
        if claimed is None or claimed.answer == "wait":
            return "alone"
        if claimed.answer == "compute" and claimed.token not in self._link.claims.held:
            # The claim ended with the connection on which it was granted.
            return "alone"
        return claimed.answer

    @property
    def expected_at(self) -> float:
        """In the state "waiting": when the payload is expected to be stored, by time.monotonic; 0 if unknown."""
        return self.answer.expected_at

    @property
    def token(self) -> int:
        """Names the claim in a put by another client of the same user; 0 while it is not granted."""
        claimed = _outcome(self.answer) if self.answer.done() and self._ended is None else None
        return claimed.token if claimed is not None and claimed.answer == "compute" else 0

    def wait_no_longer(self) -> State:
        """Ends a claim that the daemon has not decided, and leaves any other as it is. Returns the state. For the
        library."""
        # The link gives back a claim that is granted to a cancelled request.
        self.answer.cancel()
        return self.state

    def end(self, *, stored: bool, error: TensordError | None = None) -> None:
        """Ends the claim as `stored` does, or as `abandon` does. For the library."""
        if self._ended is None:
            aside(partial(self._end, "hit" if stored else "alone", error))

    def stored(self) -> None:
        """Ends the claim because the key was stored, by any client. The client renews it no more."""
        self.end(stored=True)

    def abandon(self, error: TensordError | None = None) -> None:
        """Gives the claim back, also one that is not granted yet. The daemon grants the key to the first waiting
        client.

        May take up to a second if the daemon's socket is full.

        Args:
            error: why the value was not stored (`Put.error`), if it was computed. If nobody could store it
                (`ObjectTooLarge`, `UnsupportedLeaf`), all waiting clients compute at once, and the daemon grants nobody
                a claim on the key for a minute.

        Raises:
            UsageError: `error` is neither a TensordError nor None.
        """
        if error is not None and not isinstance(error, TensordError):
            raise UsageError(f"error is {shown(error)}; it must be a TensordError, as Put.error is, or None")
        self.end(stored=False, error=error)

    def _end(self, state_after: Literal["hit", "alone"], error: TensordError | None) -> None:
        self._ended = state_after
        # The link gives back a claim that is granted to a cancelled request.
        if not self.answer.cancel():
            self.answer.add_done_callback(partial(self._settle, error))

    def _settle(self, error: TensordError | None, answer: Future[messages.Claimed]) -> None:
        claimed = _outcome(answer)
        if claimed is None or claimed.answer != "compute":
            return
        if self._ended == "hit":
            self._link.claims.drop(claimed.token)
        else:
            self._link.claims.give_back(claimed.token, SAY_S, error)


def _outcome(answer: Future[messages.Claimed]) -> messages.Claimed | None:
    """The answer to a settled request; None if it failed or was cancelled."""
    return None if answer.cancelled() or answer.exception() is not None else answer.result()
