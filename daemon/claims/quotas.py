"""What one uid may have and send, so that some is always left for other uids: shares of resources, and a rate.

Owns the rules, and the time until which each uid has used up its rate (generic cell rate algorithm, ITU-T I.371). The
owner of a resource knows what a uid has.

Invariants: root and the daemon's own uid have no limit, since they could take the resources anyway. In any stretch of t
seconds, the requests of one uid that waited as required cost at most rate * (t + BURST_S) + 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

from ...errors import LimitReached

Kind = Literal["clients", "status_clients", "lanes", "claims", "namespaces"]
ROOT: Final = 0
BURST_S: Final = 1.0
"""A uid that was quiet may send the requests of this number of seconds at once."""


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

    def change_limits(self, rules: dict[Kind, Quota], requests_per_s_max: float) -> None:
        self.rules = rules
        self.rates.per_s_max = requests_per_s_max

    def admit(self, kind: Kind, uid: int, has: int, more: int = 1) -> None:
        """Checks that the uid, which has `has`, may have `more`; counts a refusal. The caller enforces the total.
        Raises LimitReached, which names the uid, what it has, the limit and both settings."""
        rule = self.rules.get(kind)
        if rule is None or uid in (ROOT, self.own_uid) or has + more <= rule.uid_max:
            return
        self.refusals[kind] += 1
        raise LimitReached(
            f"uid {uid} has {has} {rule.things} and asks for {more} more, and may have {rule.uid_max} ({rule.setting}) "
            f"of {rule.limit} = {rule.total}: the rest is for other uids. Close some, or raise the share or the total"
        )


class Rates:
    """A token bucket for each uid, of `per_s_max` requests a second, while other uids have clients. A request over the
    rate is not refused, it waits: its connection is not read meanwhile, so its sender waits too."""

    def __init__(self, per_s_max: float, own_uid: int) -> None:
        self.per_s_max = per_s_max
        self._own_uid = own_uid
        self._clients: Counter[int] = Counter()
        self._used_until: dict[int, float] = {}
        self.delayed = 0
        """The number of requests that had to wait."""

    def joined(self, uid: int) -> None:
        self._clients[uid] += 1

    def left(self, uid: int) -> None:
        self._clients[uid] -= 1
        if not self._clients[uid]:
            del self._clients[uid]

    def limits(self, uid: int) -> bool:
        """Whether requests of the uid are limited: none are while one uid is alone."""
        return uid not in (ROOT, self._own_uid) and len(self._clients) >= 2

    def delay_s(self, uid: int, now: float, cost: float = 1.0) -> float:
        """How long a request of the uid at this cost must wait, in seconds. The request counts from now on."""
        if not self.limits(uid):
            return 0.0
        until = max(self._used_until.get(uid, now), now)
        self._used_until[uid] = until + cost / self.per_s_max
        if len(self._used_until) > 2 * len(self._clients) + 16:
            self._used_until = {each: time for each, time in self._used_until.items() if time > now}
        waits_s = max(0.0, until - now - BURST_S)
        self.delayed += waits_s > 0
        return waits_s
