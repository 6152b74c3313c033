"""The claims of an engine: which of its requests wait for a key, and whether it is this engine's to compute.

Owns: one claim a key, however many of the engine's requests want it, and the end of each. The step's thread asks and
looks; the background thread speaks with the daemon and is the only one that touches a client's `Claim`.

    asked ─→ waiting ─→ hit        the entry is pinned by then
      │         ├─────→ compute ─→ (encoded here) saving ─→ over
      └─────────┴─────→ alone
    over: its last request has left it, or it was stored, or refused, or nothing came of it in time

Invariants: a claim that is over is given back, whenever its answer comes. Where the daemon has not answered for
ANSWER_S nobody is asked to wait for it, and nothing new is asked, until it has.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from ..core.cache import Client
from ..core.claim import Claim
from ..core.lease import Lease
from .background import IDLE_S, SOON_S, Background

if TYPE_CHECKING:
    from collections.abc import Hashable

ANSWER_S: Final = 0.25
"""Only the first who asks a daemon that is silent waits for so long."""
SAVE_S: Final = 30.0
"""How long an output may take from the step that encodes it until it is stored; then others are let go on."""
_SAVING_S: Final = 0.02

State = Literal["asked", "waiting", "compute", "hit", "alone", "saving", "over"]


class Wanted:
    """One key that is wanted, of an output of `rows` rows.

    `state` is what the step may go by. `lease` comes with "hit"; `expected_at` with "waiting": when the other engine
    expects to have stored it, 0 where it did not tell.
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
    """Args:
    computes: whether this engine stores what it encodes. One that does not waits for others, and gives back what it
        is granted.
    """

    def __init__(self, background: Background, *, computes: bool) -> None:
        self._background = background
        self._computes = computes
        self._wanted: dict[bytes, Wanted] = {}
        self._saving: dict[bytes, Wanted] = {}
        # The background thread's: what is looked at in each tick.
        self._watched: set[Wanted] = set()
        self._silent: Wanted | None = None

    # ---- the step's thread

    def want(self, key: bytes, rows: int, user: Hashable, now: float, within_s: float = 0.0) -> Wanted | None:
        """The key's claim, asked for if this is the first who wants it; None where there is nobody to ask.

        Args:
            within_s: when it would be stored, if it is this engine's to compute; 0 where that is not known.
        """
        wanted = self._wanted.get(key)
        if wanted is None:
            if self._silent is not None or self._background.late:
                return None
            wanted = Wanted(key, rows, now)
            # Before it is asked for: the other thread asks for nothing that nobody wants.
            wanted.users.add(user)
            if not self._background.post(partial(self._ask, wanted, within_s)):
                return None
            self._wanted[key] = wanted
        wanted.users.add(user)
        return wanted

    def unanswered(self, wanted: Wanted, now: float) -> bool:
        """Whether the daemon has been silent for too long to be waited for."""
        return wanted.state == "asked" and (now - wanted.asked_at > ANSWER_S or self._silent is not None)

    def leave(self, wanted: Wanted, user: Hashable) -> None:
        """The user needs it no more. The last one ends it."""
        wanted.users.discard(user)
        if not wanted.users and self._wanted.get(wanted.key) is wanted:
            del self._wanted[wanted.key]
            self._background.post_end(partial(self._give_back, wanted))

    def save(self, wanted: Wanted) -> int:
        """It is being encoded here, and will be stored by a worker: kept until then, whatever becomes of its users.

        Returns:
            The claim's token, 0 where it is not this engine's.
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
        """A worker says that it is stored, or will not be."""
        wanted = self._saving.pop(key, None)
        if wanted is not None:
            self._background.post_end(partial(self._give_back, wanted))

    def end_saves(self) -> None:
        """What is being encoded is nobody's any more."""
        for key in list(self._saving):
            self.settled(key)

    def rows_ahead(self) -> int:
        """Rows that are this engine's to compute, or may be when the daemon has answered, and in no step yet."""
        return sum(wanted.rows for wanted in self._wanted.values() if wanted.state in ("asked", "compute"))

    def users_ahead(self) -> int:
        """How many requests want what is this engine's to compute, or may be, and in no step yet."""
        users: set[Hashable] = set()
        for wanted in self._wanted.values():
            if wanted.state in ("asked", "compute"):
                users |= wanted.users
        return len(users)

    @property
    def open(self) -> int:
        """Claims that are not over."""
        return len(self._wanted) + len(self._saving)

    @property
    def silent(self) -> bool:
        """Whether the daemon owes an answer for too long."""
        return self._silent is not None

    # ---- the background thread

    def tick(self, client: Client) -> float:
        """Takes in what the daemon said. Gives the seconds after which to look again."""
        silent = self._silent
        if silent is not None and (silent.claim is None or silent.claim.state != "asked"):
            self._silent = None
            if silent.state == "over" and silent.claim is not None:
                silent.claim.abandon()
        now = time.monotonic()
        for wanted in list(self._watched):
            if wanted.state == "saving":
                self._look_for_stored(wanted, client, now)
            else:
                self._look_for_answer(wanted, client, now)
        if self._silent is not None or any(wanted.state != "saving" for wanted in self._watched):
            return SOON_S
        return _SAVING_S if self._watched else IDLE_S

    def _ask(self, wanted: Wanted, within_s: float, client: Client) -> None:
        if wanted.users:
            wanted.claim = client.claim(wanted.key, within_s=within_s)
            self._watched.add(wanted)

    def _look_for_answer(self, wanted: Wanted, client: Client, now: float) -> None:
        claim = wanted.claim
        assert claim is not None
        state = claim.state
        if state == "asked":
            if now - wanted.asked_at > ANSWER_S and self._silent is None:
                # The one whose answer tells that the daemon is back.
                self._silent = wanted
            return
        if state == "waiting":
            wanted.expected_at = claim.expected_at
            wanted.state = "waiting"
            return
        self._watched.discard(wanted)
        if state == "hit":
            # Pinned before anybody is told.
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
        if wanted.claim is None or wanted is self._silent:
            return
        if client.contains(wanted.key):
            wanted.claim.stored()
        else:
            wanted.claim.abandon()
