"""A claim on a key that is computed elsewhere than where it is stored, by somebody who must not wait.

Owns: one claim from asking to its end. `once.py` is the same for who computes here and may wait; who is told to compute
is the daemon's to say.

Invariant: however late an answer comes, a claim that is granted after its end is given back at once.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Literal

from ...ipc import messages
from .aside import aside
from .link import SAY_S, Link, PendingRequest

State = Literal["asked", "waiting", "compute", "hit", "alone"]


class Claim:
    """The wish to compute `key`, or to have it. Belongs to the process that made it.

    One that is granted is renewed until it is ended, and keeps others waiting for as long: end each by `stored` or
    `abandon`. One that nobody holds any more is given back. A put of the key ends it for everybody who waits, whichever
    client's it is.

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

    def __init__(self, link: Link, key: bytes, timeout_s: float, within_s: float = 0.0) -> None:
        """Asks; sending may take `timeout_s` where the daemon takes nothing in. `within_s`: see `Client.claim`."""
        self.key = key
        self._link = link
        self._ended: Literal["hit", "alone"] | None = None
        self._answer: PendingRequest = link.ask(lambda number: messages.RequestClaim(number, key, within_s), timeout_s)

    @property
    def state(self) -> State:
        """What is known by now; costs no message.

        "asked": no answer yet. "waiting": another client computes it. "compute": this one should, and the others wait.
        "hit": it is stored. "alone": there is no daemon any more, or a limit in the way, or the claim was given back:
        compute it if it is wanted, nobody waits for it.
        """
        if self._ended is not None:
            return self._ended
        answer = self._answer
        if not answer.done():
            return "waiting" if answer.waits else "asked"
        claimed = _outcome(answer)
        if claimed is None or claimed.answer == "wait":
            return "alone"
        if claimed.answer == "compute" and not self._link.holds_claim(claimed.token):
            # It ended with the connection under which it was granted.
            return "alone"
        return claimed.answer

    @property
    def expected_at(self) -> float:
        """Of one that waits: when whoever computes expects to have stored it, by time.monotonic; 0 where it did not
        tell."""
        return self._answer.expected_at

    @property
    def token(self) -> int:
        """What names the claim in a put by another client of the same user; 0 while it is not granted."""
        claimed = _outcome(self._answer) if self._answer.done() and self._ended is None else None
        return claimed.token if claimed is not None and claimed.answer == "compute" else 0

    def stored(self) -> None:
        """The key was stored, by whichever client: the claim is renewed no more."""
        self._end("hit")

    def abandon(self) -> None:
        """Gives the claim back, also one that is yet to be granted: the first who waits is asked to compute.

        It may take a second where the daemon takes nothing in.
        """
        self._end("alone")

    def _end(self, how: Literal["hit", "alone"]) -> None:
        if self._ended is None:
            aside(partial(self._end_now, how))

    def _end_now(self, how: Literal["hit", "alone"]) -> None:
        self._ended = how
        # The link gives back what is granted to a request that was cancelled.
        if not self._answer.cancel():
            self._answer.add_done_callback(self._drop if how == "hit" else self._give_back)

    def _drop(self, answer: Future[messages.Claimed]) -> None:
        claimed = _outcome(answer)
        if claimed is not None and claimed.answer == "compute":
            self._link.drop_claim(claimed.token)

    def _give_back(self, answer: Future[messages.Claimed]) -> None:
        claimed = _outcome(answer)
        if claimed is not None and claimed.answer == "compute":
            self._link.give_back(claimed.token, SAY_S)


def _outcome(answer: Future[messages.Claimed]) -> messages.Claimed | None:
    """What a settled request was told; None if it failed or was cancelled."""
    return None if answer.cancelled() or answer.exception() is not None else answer.result()
