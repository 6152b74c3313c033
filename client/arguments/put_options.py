"""The options of a put: their defaults and their checks.

Invariants: `checked` returns only values that the daemon accepts.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ...errors import UsageError, shown
from ...ipc.messages.schema import AGENT_NAME_CHARS_MAX, COST_MS_MAX
from .checks import check_count, check_key, check_name, check_seconds, number

TOKENS_MAX: Final = (1 << 32) - 1


class PutOptions(NamedTuple):
    """The fields of a record that the caller sets, as `Client.put` takes them; and

    claim: token of the claim under which the payload was computed.
    prefix_bytes: bytes of the record that is the payload's first leaf, if the entry is a block of a sequence, else 0.
    """

    tokens: int = 0
    ttl_s: float | None = None
    claim: int | None = None
    cost_ms: float = 0.0
    agent: str = ""
    prefix_bytes: int = 0
    parent: bytes | None = None

    def checked(self) -> PutOptions:
        """These options, checked and converted. Raises BadKey, or UsageError that names the value."""
        tokens, ttl_s, _, cost_ms, agent, _, parent = self
        if (
            ttl_s is None
            and parent is None
            and type(tokens) is int
            and 0 <= tokens <= TOKENS_MAX
            and type(cost_ms) is float
            and 0.0 <= cost_ms <= COST_MS_MAX
            and type(agent) is str
            and agent == ""
        ):
            # The common case takes no further call.
            return self
        check_name("agent", self.agent, AGENT_NAME_CHARS_MAX, least=0)
        return self._replace(
            tokens=check_count("tokens", self.tokens, TOKENS_MAX),
            ttl_s=None if self.ttl_s is None else check_seconds("ttl_s", self.ttl_s, above_0=True),
            cost_ms=check_cost(self.cost_ms),
            parent=None if self.parent is None else check_key(self.parent),
        )


def check_cost(cost_ms: object) -> float:
    """Milliseconds that a payload took to compute; UsageError for a value out of range."""
    value = number(cost_ms)
    if 0 <= value <= COST_MS_MAX:
        return value
    raise UsageError(f"cost_ms is {shown(cost_ms)}; it must be a time from 0 to {COST_MS_MAX:g} milliseconds")
