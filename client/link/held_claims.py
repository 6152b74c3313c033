"""The claims that the daemon granted to this client, from the grant until they are committed or given back.

Owns: which claims are renewed, and when. Does not own: the states of a claim (claim.py), nor the connection (link.py),
whose thread grants, renews and gives back forgotten claims.
Invariant: a claim is renewed only while the request that it was granted to exists, and on the connection that it was
granted on.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ...errors import CANNOT_BE_STORED, TensordError
from ...ipc.messages import control as messages
from ...ipc.messages.schema import TOKENS_MAX
from ...ipc.wire.blocking import BlockingChannel
from .answers import PendingRequest

# A claim is renewed three times within its lifetime.
_RENEWALS: Final = 3


class HeldClaims:
    """The held claims of one client. `send` is the link's."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self.held: dict[int, tuple[float, weakref.ref[PendingRequest]]] = {}
        """By its token: how long a claim lasts, in seconds, and the request that it was granted to. Ends with the
        connection.
        """
        self.renew_at = 0.0
        """When the next claim is to be renewed, by time.monotonic. Has no meaning while none is held."""

    def hold(self, token: int, lasts_s: float, asked: PendingRequest) -> None:
        """Renews a claim until `drop`, or until the request that it was granted to is collected. A signal handler's
        exception may end a call before it returns that request.
        """
        renew_at = time.monotonic() + lasts_s / _RENEWALS
        self.renew_at = min(self.renew_at, renew_at) if self.held else renew_at
        self.held[token] = lasts_s, weakref.ref(asked)

    def drop(self, token: int) -> bool:
        """Stops renewing a claim that was committed or abandoned. Returns False if it was not held any more."""
        return self.held.pop(token, None) is not None

    def give_back(self, token: int, timeout_s: float, error: TensordError | None = None) -> None:
        """Abandons a claim without a payload. The daemon grants the key to the first waiting client, unless `error`
        says that nobody can store the value. Call it where no signal handler can interrupt it."""
        if self.drop(token):
            # An unsent Abandon does no harm: the claim ends with the connection, or expires.
            with suppress(TensordError):
                self._send(abandon(token, error), timeout_s=timeout_s)

    def give_back_forgotten(self, timeout_s: float) -> None:
        """Gives back each claim whose request was collected."""
        for token, (_, asked) in list(self.held.items()):
            if asked() is None:
                self.give_back(token, timeout_s)

    def renew(self, channel: BlockingChannel, timeout_s: float) -> None:
        """Renews all claims on the connection that they were granted on."""
        tokens = list(self.held)
        for start in range(0, len(tokens), TOKENS_MAX):
            channel.send(messages.Renew(tokens[start : start + TOKENS_MAX]), timeout_s=timeout_s)
        # Another thread may have dropped the last claim; then `renew_at` has no meaning.
        shortest_s = min((lasts_s for lasts_s, _ in list(self.held.values())), default=1.0)
        self.renew_at = time.monotonic() + shortest_s / _RENEWALS


def abandon(token: int, error: BaseException | None) -> messages.Abandon:
    """The message that gives a claim up. `error`: why the value was not stored; None if no value was computed."""
    never = isinstance(error, CANNOT_BE_STORED)
    return messages.Abandon(token, messages.ErrorBody.of(error) if error is not None and never else None)
