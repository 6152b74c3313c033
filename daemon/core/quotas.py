"""How much of what all uids share one uid may have: a share of the total, so that some is always left for others.

Owns the rules, and how often each has refused. Does not own the counts: who keeps the things knows how many a uid has.
Root, and the uid that the daemon runs under, may have all: they could take it from the others anyhow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

from ...errors import LimitReached
from .rates import Rates

Kind = Literal["clients", "status_clients", "lanes", "inboxes", "claims", "namespaces"]
ROOT: Final = 0


@dataclass(frozen=True, slots=True)
class Quota:
    """One rule. `total` of `things`, named `limit` in the configuration, of which a uid may have `uid_max`, by
    `setting`.
    """

    things: str
    limit: str
    total: int
    setting: str
    uid_max: int


class Quotas:
    """The rules by kind; a kind without one is not limited. `own_uid`: the daemon's."""

    def __init__(self, rules: dict[Kind, Quota], own_uid: int, requests_per_s_max: float = inf) -> None:
        self.rules = rules
        self.rates = Rates(requests_per_s_max, own_uid)
        self.refusals: Counter[str] = Counter()
        self._exempt = frozenset({ROOT, own_uid})

    def change_limits(self, rules: dict[Kind, Quota], requests_per_s_max: float) -> None:
        """For whatever is asked for from now on."""
        self.rules = rules
        self.rates.change_limits(requests_per_s_max)

    def admit(self, kind: Kind, uid: int, has: int, more: int = 1) -> None:
        """Counts a refusal where the uid, which has so many, may not have `more`. The total is the caller's to hold.

        Raises:
            LimitReached: the error names the uid, what it has, the limit and both settings.
        """
        rule = self.rules.get(kind)
        if rule is None or uid in self._exempt or has + more <= rule.uid_max:
            return
        self.refusals[kind] += 1
        raise LimitReached(
            f"uid {uid} has {has} {rule.things} and asks for {more} more, and may have {rule.uid_max} ({rule.setting}) "
            f"of {rule.limit} = {rule.total}: the rest is for other uids. Close some, or raise one of the two"
        )
