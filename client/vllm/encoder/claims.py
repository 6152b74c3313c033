"""The single-flight claims of one engine: which requests wait for a key, and whether this engine computes it.

Owns: one claim a key, for all requests of the engine that want it, the end of each claim, and the background thread.
Does not own: the thread's other jobs. The step's thread asks and reads states. The background thread makes and ends
claims.

    asked, waiting, hit, compute, alone    as of `client/computing/claim.py`
    compute ─→ (encoded here) saving ─→ given back: the output is stored or refused, or SAVE_S have passed

Invariants: a claim without users that is not saved is given back, whenever its answer arrives. While the client takes
the daemon for away (client/link/absence.py), a claim ends at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ...computing.claim import Claim, State
from ...core.client import Client
from ..engine.background import IDLE_S, Background

SAVE_S: Final = 30.0
"""Seconds from the step that encodes an output until the output must be stored. Later the claim is given up, so that
other engines need not wait."""
_SAVING_S: Final = 0.02


@dataclass(slots=True, eq=False)
class Wanted:
    """A claim on one key, for an output of `rows` rows. `claim` is None until the background thread has asked for it.
    `since`: when it was wanted, then when it began to be saved."""

    key: bytes
    rows: int
    since: float
    users: set[Hashable] = field(default_factory=set)
    claim: Claim | None = None

    @property
    def state(self) -> State:
        return self.claim.state if self.claim is not None else "asked"

    @property
    def expected_at(self) -> float:
        """In state "waiting": when the other engine expects to have stored the output, 0 if unknown."""
        return self.claim.expected_at if self.claim is not None else 0.0


class EncodeClaims:
    """The claims of one engine, and the background thread of its scheduler's side."""

    def __init__(self, socket: str | None, client_name: str, failed: Callable[[], None]) -> None:
        self._wanted: dict[bytes, Wanted] = {}
        self._saving: dict[bytes, Wanted] = {}
        self.background = Background(socket, client_name, "tensord-vllm-scheduler", self._tick, failed)
        self.background.start()

    # ---- the step's thread

    def want(self, key: bytes, rows: int, user: Hashable, now: float, within_s: float) -> Wanted | None:
        """The claim on the key. The first caller has the background thread ask for it. None if the daemon cannot be
        asked.

        Args:
            within_s: seconds within which this engine would store the output if it computes it; 0 if unknown.
        """
        wanted = self._wanted.get(key)
        if wanted is None:
            # With its user: the background thread asks for no claim that nobody wants.
            wanted = Wanted(key, rows, now, {user})
            if self.background.late or not self.background.post(partial(_ask, wanted, within_s)):
                return None
            self._wanted[key] = wanted
        wanted.users.add(user)
        return wanted

    def leave(self, wanted: Wanted, user: Hashable) -> None:
        """Ends the user's interest in the claim. The last user to leave ends the claim."""
        wanted.users.discard(user)
        if not wanted.users and self._wanted.get(wanted.key) is wanted:
            del self._wanted[wanted.key]
            self.background.post_end(partial(_give_back, wanted))

    def save(self, wanted: Wanted) -> int:
        """Keeps the claim until a worker has stored the output, whatever its users do. The output is being encoded
        here.

        Returns:
            The claim's token; 0 if another engine computes the output.
        """
        if wanted.claim is None or wanted.state != "compute" or self._wanted.get(wanted.key) is not wanted:
            return 0
        del self._wanted[wanted.key]
        wanted.users.clear()
        wanted.since = time.monotonic()
        self._saving[wanted.key] = wanted
        self.background.post_end(lambda _: None)  # a tick follows each job
        return wanted.claim.token

    def settled(self, key: bytes) -> None:
        """Ends a claim: a worker reports that it has stored the output, or will not."""
        wanted = self._saving.pop(key, None)
        if wanted is not None:
            self.background.post_end(partial(_give_back, wanted))

    def end_saves(self) -> None:
        """Ends all claims of outputs that are being encoded."""
        for key in list(self._saving):
            self.settled(key)

    def ahead(self) -> tuple[int, int]:
        """The outputs that this engine has to compute, or may have to once the daemon answers, and that are in no step
        yet: their rows, and the number of requests for them."""
        own = [wanted for wanted in self._wanted.values() if wanted.state in ("asked", "compute")]
        return sum(wanted.rows for wanted in own), len(set[Hashable]().union(*(wanted.users for wanted in own)))

    # ---- the background thread

    def _tick(self, client: Client) -> float:
        """Ends claims on outputs that are stored. Returns the seconds until the next tick."""
        saving = list(self._saving.values())
        for wanted in saving:
            if time.monotonic() - wanted.since > SAVE_S or client.contains(wanted.key):
                self._saving.pop(wanted.key, None)
                _give_back(wanted, client)
        return _SAVING_S if saving else IDLE_S


def _ask(wanted: Wanted, within_s: float, client: Client) -> None:
    if wanted.users:
        wanted.claim = client.claim(wanted.key, within_s=within_s)


def _give_back(wanted: Wanted, client: Client) -> None:
    if wanted.claim is not None:
        wanted.claim.end(stored=client.contains(wanted.key))
