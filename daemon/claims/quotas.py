"""Quotas: the share of each shared resource that one uid may have, so that some is always left for other uids.

Owns the rules, and the count of refusals by each. Does not own the amounts: the owner of a resource knows what a uid
has.

Invariant: root and the daemon's own uid have no quota, since they could take the resources anyway.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

from ...errors import LimitReached
from .rates import Rates

Kind = Literal["clients", "status_clients", "lanes", "claims", "namespaces"]
ROOT: Final = 0


@dataclass(frozen=True, slots=True)
class Quota:
    """One rule. A uid may have `uid_max` of the `total` `things`. `limit` and `setting` are the configuration's names
    for the total and for the uid's maximum."""

    things: str
    limit: str
    total: int
    setting: str
    uid_max: int


class Quotas:
    """The rules by kind; a kind without a rule has no quota. `own_uid`: the daemon's uid."""

    def __init__(self, rules: dict[Kind, Quota], own_uid: int, requests_per_s_max: float = inf) -> None:
        self.rules = rules
        self.rates = Rates(requests_per_s_max, own_uid)
        self.refusals: Counter[str] = Counter()
        self.own_uid = own_uid
        self._exempt = frozenset({ROOT, own_uid})

    def change_limits(self, rules: dict[Kind, Quota], requests_per_s_max: float) -> None:
        """Applies to later requests."""
        self.rules = rules
        self.rates.change_limits(requests_per_s_max)

    def admit(self, kind: Kind, uid: int, has: int, more: int = 1) -> None:
        """Checks that the uid, which has `has`, may have `more`; counts a refusal. The caller enforces the total.

        Raises:
            LimitReached: the error names the uid, what it has, the limit and both settings.
        """
        rule = self.rules.get(kind)
        if rule is None or uid in self._exempt or has + more <= rule.uid_max:
            return
        self.refusals[kind] += 1
        raise LimitReached(
            f"uid {uid} has {has} {rule.things} and asks for {more} more, and may have {rule.uid_max} ({rule.setting}) "
            f"of {rule.limit} = {rule.total}: the rest is for other uids. Close some, or raise the share or the total"
        )
