"""What a put says of its payload besides its bytes."""

from __future__ import annotations

from typing import NamedTuple

from ...errors import UsageError
from ...ipc.schema import AGENT_NAME_CHARS_MAX, COST_MS_MAX, NUMBER_MAX
from .fields import check_count, check_name, check_seconds, number


class PutOptions(NamedTuple):
    """The fields of Commit that are the caller's.

    Args:
        tokens: that the payload stands for.
        ttl_s: seconds until it expires; None: the daemon's default.
        claim: the token of the claim under which it was computed.
        cost_ms: what computing it took, 0 where that is not known.
        agent: on whose behalf it is stored.
        prefix_bytes: of the record that is its first leaf, if it is a piece of a sequence (`shm.prefix`), else 0.
        parent: the key of the piece before.
    """

    tokens: int = 0
    ttl_s: float | None = None
    claim: int | None = None
    cost_ms: float = 0.0
    agent: str = ""
    prefix_bytes: int = 0
    parent: bytes | None = None

    def checked(self) -> PutOptions:
        """These, as the daemon takes them. It ends the connection of who says what cannot be.

        Raises:
            UsageError: a value is out of its range; it is named.
        """
        check_name("agent", self.agent, AGENT_NAME_CHARS_MAX, least=0)
        return self._replace(
            tokens=check_count("tokens", self.tokens, NUMBER_MAX),
            ttl_s=None if self.ttl_s is None else check_seconds("ttl_s", self.ttl_s, above_0=True),
            cost_ms=_checked_cost(self.cost_ms),
        )


def _checked_cost(cost_ms: object) -> float:
    value = number(cost_ms)
    if 0 <= value <= COST_MS_MAX:
        return value
    raise UsageError(f"cost_ms is {cost_ms!r}; it is a time from 0 to {COST_MS_MAX:g} milliseconds")
