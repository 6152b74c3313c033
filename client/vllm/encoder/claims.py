"""The single-flight claims of one engine: which requests wait for a key, and whether this engine computes it.

Owns: one claim a key, for all requests of the engine that want it, and the end of each claim. Does not own: the
connection to the daemon. The step's thread asks and reads states. The background thread talks to the daemon and alone
uses a client's `Claim`.

    asked, waiting, hit, compute, alone    as of `client/computing/claim.py`; in state hit the entry is pinned already
    compute ─→ (encoded here) saving ─→ over
    over: the last request has left, or the output is stored or refused, or SAVE_S have passed

Invariants: a claim that is over is given back, whenever its answer arrives. If the daemon has not answered for
ANSWER_S, no request waits for that answer any more. While the client takes the daemon for away
(client/link/absence.py), a claim ends at once.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from ...computing.claim import Claim
from ...computing.claim import State as ClaimState
from ...core.client import Client
from ...reading.lease import Lease
from ..engine.background import IDLE_S, SOON_S, Background

if TYPE_CHECKING:
    from collections.abc import Hashable

ANSWER_S: Final = 0.25
"""Seconds that a request waits for the answer of a silent daemon, until the client takes it for away."""
SAVE_S: Final = 30.0
"""Seconds from the step that encodes an output until the output must be stored. Later the claim is given up, so that
other engines need not wait."""
_SAVING_S: Final = 0.02

State = ClaimState | Literal["saving", "over"]


class Wanted:
    """A claim on one key, for an output of `rows` rows.

    `state` is for the step. `lease` is set in state "hit". `expected_at` is set in state "waiting": the time at which
    the other engine expects to have stored the output, 0 if unknown.
    """

    __slots__ = ("asked_at", "claim", "expected_at", "key", "lease", "rows", "state", "token", "users")

    def __init__(self, key: bytes, rows: int, now: float) -> None:
        self.key = key
        self.rows = rows
        self.asked_at = now
        self.expected_at = 0.0
        self.state: State = "asked"
        self.claim: Claim | None = None
        self.lease: Lease | None = None
        self.token = 0
        self.users: set[Hashable] = set()


class EncodeClaims:
    """The claims of one engine.

    Args:
        computes: whether this engine stores the outputs that it encodes. An engine that does not store them only waits
            for other engines, and gives back the claims that it is granted.
    """

    def __init__(self, background: Background, *, computes: bool) -> None:
        self._background = background
        self._computes = computes
        self._wanted: dict[bytes, Wanted] = {}
        self._saving: dict[bytes, Wanted] = {}
        # Used by the background thread alone: the claims that each tick examines.
        self._watched: set[Wanted] = set()

    # ---- the step's thread

    def want(self, key: bytes, rows: int, user: Hashable, now: float, within_s: float = 0.0) -> Wanted | None:
        """The claim on the key. The first caller has the background thread ask for it. None if the daemon cannot be
        asked.

        Args:
            within_s: seconds within which this engine would store the output if it computes it; 0 if unknown.
        """
        wanted = self._wanted.get(key)
        if wanted is None:
            if self._background.late:
                return None
            wanted = Wanted(key, rows, now)
            # The user is added before the claim is posted: the background thread asks for no claim without users.
            wanted.users.add(user)
            if not self._background.post(partial(self._ask, wanted, within_s)):
                return None
            self._wanted[key] = wanted
        wanted.users.add(user)
        return wanted

    def unanswered(self, wanted: Wanted, now: float) -> bool:
        """Whether the daemon has been silent for too long to wait for its answer."""
        return wanted.state == "asked" and now - wanted.asked_at > ANSWER_S

    def leave(self, wanted: Wanted, user: Hashable) -> None:
        """Ends the user's interest in the claim. The last user to leave ends the claim."""
        wanted.users.discard(user)
        if not wanted.users and self._wanted.get(wanted.key) is wanted:
            del self._wanted[wanted.key]
            self._background.post_end(partial(self._give_back, wanted))

    def save(self, wanted: Wanted) -> int:
        """Keeps the claim until a worker has stored the output, whatever its users do. The output is being encoded
        here.

        Returns:
            The claim's token; 0 if another engine computes the output.
        """
        if wanted.state == "compute" and self._wanted.get(wanted.key) is wanted:
            del self._wanted[wanted.key]
            wanted.users.clear()
            wanted.asked_at = time.monotonic()
            wanted.state = "saving"
            self._saving[wanted.key] = wanted
            self._background.post_end(lambda _: self._watched.add(wanted))
            return wanted.token
        return 0

    def settled(self, key: bytes) -> None:
        """Ends a claim: a worker reports that it has stored the output, or will not."""
        wanted = self._saving.pop(key, None)
        if wanted is not None:
            self._background.post_end(partial(self._give_back, wanted))

    def end_saves(self) -> None:
        """Ends all claims of outputs that are being encoded."""
        for key in list(self._saving):
            self.settled(key)

    def rows_ahead(self) -> int:
        """Number of rows that this engine has to compute, or may have to once the daemon answers, and that are in no
        step yet."""
        return sum(wanted.rows for wanted in self._wanted.values() if wanted.state in ("asked", "compute"))

    def users_ahead(self) -> int:
        """Number of requests for outputs that this engine has to compute, or may have to, and that are in no step
        yet."""
        users: set[Hashable] = set()
        for wanted in self._wanted.values():
            if wanted.state in ("asked", "compute"):
                users |= wanted.users
        return len(users)

    def fill(self, rows: int, step_rows: int, step_requests: int) -> bool:
        """Whether the claims leave no room for `rows` more in a step of at most `step_rows` and `step_requests`."""
        ahead = self.rows_ahead()
        return bool(ahead) and (ahead + rows > step_rows or self.users_ahead() >= step_requests)

    @property
    def open(self) -> int:
        """Number of claims that are not over."""
        return len(self._wanted) + len(self._saving)

    # ---- the background thread

    def tick(self, client: Client) -> float:
        """Processes the daemon's answers. Returns the seconds until the next tick."""
        now = time.monotonic()
        for wanted in list(self._watched):
            if wanted.state == "saving":
                self._look_for_stored(wanted, client, now)
            else:
                self._look_for_answer(wanted, client)
        if any(wanted.state != "saving" for wanted in self._watched):
            return SOON_S
        return _SAVING_S if self._watched else IDLE_S

    def _ask(self, wanted: Wanted, within_s: float, client: Client) -> None:
        if wanted.users:
            wanted.claim = client.claim(wanted.key, within_s=within_s)
            self._watched.add(wanted)

    def _look_for_answer(self, wanted: Wanted, client: Client) -> None:
        claim = wanted.claim
        assert claim is not None
        state = claim.state
        if state == "asked":
            return
        if state == "waiting":
            wanted.expected_at = claim.expected_at
            wanted.state = "waiting"
            return
        self._watched.discard(wanted)
        if state == "hit":
            # The entry is pinned before the state changes to "hit".
            wanted.lease = client.get(wanted.key)
            wanted.state = "hit" if wanted.lease is not None else "alone"
        elif state == "compute" and self._computes:
            wanted.token = claim.token
            wanted.state = "compute"
        else:
            claim.abandon()
            wanted.state = "alone"

    def _look_for_stored(self, wanted: Wanted, client: Client, now: float) -> None:
        if now - wanted.asked_at > SAVE_S or client.contains(wanted.key):
            self._give_back(wanted, client)

    def _give_back(self, wanted: Wanted, client: Client) -> None:
        wanted.state = "over"
        wanted.lease = None
        self._watched.discard(wanted)
        self._saving.pop(wanted.key, None)
        if wanted.claim is not None:
            wanted.claim.end(stored=client.contains(wanted.key))
