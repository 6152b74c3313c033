"""The claims: which client may compute a missing key, and which clients wait for the result.

Knows nothing of entries or messages. Every method returns the answers that it causes, in order.

The claim on a key, from the first request to the last answer:

    claim → compute (token A); later requests wait
        committed            → every waiter: hit
        a commit refused, or A finds that the value cannot be stored
                             → every waiter: alone
        A abandons, dies, or its time is up
                             → the first waiter: compute (token B); the other waiters wait on; only one such hand-over
            B fails likewise → every waiter: alone
        voided               → every waiter: alone

While a remote store is asked for a missing key, the daemon itself has the claim (`seek`), and every client that asks
waits. If nothing is found in time, the first waiter gets the claim; this is not the one hand-over.

Another client of the same uid may store the payload of a claim, by naming the token in its commit, or may abandon the
claim: an engine's scheduler claims a key, and a worker in another process stores the payload.

"alone" means: compute without a claim; no client waits for the result. So a key that can never be computed costs each
waiter one attempt.

Invariants: a claim lasts `claim_s` from its grant or last renewal, and at most `claim_s_max` from its grant. A token is
never used twice, in any epoch. A key has at most one claim. A client has at most `per_client_max` stakes: claims and
waits together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ...errors import LimitReached, UsageError
from .deadlines import Deadlines

TOKEN_COUNTER_BITS = 48
NOBODY = 0
"""In place of a client's number: the daemon itself. Clients have numbers from 1 on."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one request for a claim. `token`: the claim's token, with "compute". `lasts_s`: with "compute" the
    duration of the claim; with "wait" the time that the claim's holder still expects to take, 0 if unknown."""

    client: int
    request: int
    key: bytes
    answer: Literal["compute", "wait", "hit", "alone"]
    token: int = 0
    lasts_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Request:
    """`within_s`: the seconds within which the client would store the key if it got the claim; 0 if unknown."""

    client: int
    number: int
    uid: int
    within_s: float = 0.0


@dataclass(slots=True)
class _Claim:
    """`holder`: of client NOBODY while the daemon asks the remote store. `waiters`: by client and number."""

    key: bytes
    holder: _Request
    token: int
    ends_at: float
    expected_at: float
    handed_over: bool = False
    waiters: dict[tuple[int, int], _Request] = field(default_factory=dict)

    @property
    def seeks(self) -> bool:
        return self.holder.client == NOBODY


class ClaimTable:
    """The claims of one daemon."""

    def __init__(self, claim_s: float, claim_s_max: float, per_client_max: int, epoch: int) -> None:
        self.change_limits(claim_s, claim_s_max, per_client_max)
        # On the wire, a token is a positive 63-bit number.
        self._last_token = (epoch & 0x7FFF) << TOKEN_COUNTER_BITS
        self.by_key: dict[bytes, _Claim] = {}
        self._by_token: dict[int, _Claim] = {}
        self._stakes: defaultdict[int, set[tuple[bytes, int]]] = defaultdict(set)
        """By client: the key and number of each of its requests that have a claim or wait."""
        self.of_uid: Counter[int] = Counter()
        """The number of claims and waits of each uid that has any."""
        self._timers: Deadlines[int] = Deadlines()
        self.given_up: Callable[[bytes], object] = lambda _: None
        """Called with a key whose claim has ended, though nobody has stored the key, and nobody waits any more."""
        self.handed_over = 0

    def __len__(self) -> int:
        return len(self.by_key)

    def change_limits(self, claim_s: float, claim_s_max: float, per_client_max: int) -> None:
        """Applies to later claims and renewals."""
        self._claim_s = claim_s
        self._claim_s_max = claim_s_max
        self._per_client_max = per_client_max

    def holds(self, token: int) -> bool:
        return token in self._by_token

    @property
    def waiting(self) -> int:
        return sum(len(claim.waiters) for claim in self.by_key.values())

    def next_timer(self) -> float | None:
        return self._timers.next_timer()

    def claim(self, key: bytes, client: int, request: int, now: float, uid: int = 0, within_s: float = 0.0) -> Verdict:
        """Requests the claim on `key`, which the client missed and expects to store within `within_s` seconds. Returns
        "compute" with a token; or "wait" if another client has the claim. Another Verdict follows a "wait". Raises
        LimitReached if the client has as many claims and waits as it may; UsageError if it has asked for the key by a
        request of this number before."""
        asked = self._admitted(key, _Request(client, request, uid, within_s))
        claim = self.by_key.get(key)
        return self._grant(key, asked, now) if claim is None else self._wait(claim, asked, now)

    def seek(
        self, key: bytes, client: int, request: int, now: float, uid: int, within_s: float, for_s: float
    ) -> tuple[int, Verdict]:
        """As `claim`, of a key that nobody has claimed: the daemon takes the claim for `for_s` seconds. Returns the
        token of the daemon's claim, and "wait" for the client."""
        asked, until = self._admitted(key, _Request(client, request, uid, within_s)), now + for_s
        claim = self._begin(key, _Request(NOBODY, 0, uid), until, until, until)
        return claim.token, self._wait(claim, asked, now)

    def extend(self, token: int, ends_at: float) -> None:
        """The daemon's claim ends at another time. It must be active."""
        claim = self._by_token[token]
        claim.ends_at = claim.expected_at = ends_at
        self._timers.set(token, ends_at)

    def sought(self, token: int, now: float) -> list[Verdict]:
        """The remote store has nothing. Does nothing if the daemon's claim has ended."""
        claim = self._by_token.get(token)
        return [] if claim is None or not claim.seeks else self._failed(claim, now)

    def renew(self, token: int, client: int, now: float) -> None:
        """Renews a claim whose holder is alive. Does nothing if the claim has ended or another client holds it."""
        claim = self._by_token.get(token)
        if claim is not None and claim.holder.client == client:
            self._timers.set(token, min(now + self._claim_s, claim.ends_at))

    def abandon(self, token: int, uid: int, now: float) -> list[Verdict]:
        """Ends a claim whose holder gives up. Does nothing if the claim has ended, or is another uid's."""
        claim = self._by_token.get(token)
        return [] if claim is None or claim.holder.uid != uid else self._failed(claim, now)

    def key_held(self, token: int, uid: int) -> bytes | None:
        """The key of a claim that a client of this uid holds; None if there is none."""
        claim = self._by_token.get(token)
        return None if claim is None or claim.holder.uid != uid or claim.seeks else claim.key

    def committed(self, key: bytes) -> list[Verdict]:
        """`key` is stored, by any client."""
        claim = self.by_key.get(key)
        return [] if claim is None else self._end(claim, "hit")

    def refused(self, token: int, uid: int, key: bytes, now: float) -> list[Verdict]:
        """A commit under this claim was refused, or will not come, as its value cannot be stored. Does nothing if the
        claim has ended, or is not one of this uid on this key."""
        claim = self._by_token.get(token)
        if claim is None or claim.holder.uid != uid or claim.key != key:
            return []
        return self._failed(claim, now) if claim.seeks else self._give_up(claim)

    def void(self, tag: bytes) -> list[Verdict]:
        keys = sorted(key for key in self.by_key if key.startswith(tag))
        return [verdict for key in keys for verdict in self._give_up(self.by_key[key])]

    def client_left(self, client: int, now: float) -> list[Verdict]:
        held = []
        for key, number in list(self._stakes.get(client, ())):
            claim = self.by_key[key]
            asked = claim.waiters.pop((client, number), None)
            if asked is None:
                held.append(claim)
            else:
                self._settled(key, asked)
        held.sort(key=lambda claim: claim.token)
        return [verdict for claim in held for verdict in self._failed(claim, now)]

    def expire(self, now: float, most: int) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for _ in range(most):
            token = self._timers.pop_due(now)
            if token is None:
                break
            verdicts += self._failed(self._by_token[token], now)
        return verdicts

    def check_invariants(self) -> None:
        assert {claim.token: claim for claim in self.by_key.values()} == self._by_token
        stakes, of_uid = defaultdict(set), Counter[int]()
        for key, claim in self.by_key.items():
            due = self._timers.when(claim.token)
            assert due is not None and due <= claim.ends_at
            for asked in [*claim.waiters.values(), *([] if claim.seeks else [claim.holder])]:
                stakes[asked.client].add((key, asked.number))
                of_uid[asked.uid] += 1
        assert stakes == self._stakes and of_uid == self.of_uid

    def _admitted(self, key: bytes, asked: _Request) -> _Request:
        """Counts the stake of a request, which is to get a claim or to wait."""
        stakes = self._stakes.get(asked.client, ())
        if len(stakes) >= self._per_client_max:
            raise LimitReached(
                f"this client has {len(stakes)} claims and waits, and may have {self._per_client_max}: compute without "
                "a claim"
            )
        if (key, asked.number) in stakes:
            raise UsageError(f"request {asked.number} asks for this key already: give each request an id of its own")
        self._stakes[asked.client].add((key, asked.number))
        self.of_uid[asked.uid] += 1
        return asked

    def _settled(self, key: bytes, asked: _Request) -> None:
        """A request neither waits nor has its claim any more."""
        self._stakes[asked.client].remove((key, asked.number))
        if not self._stakes[asked.client]:
            del self._stakes[asked.client]
        self.of_uid[asked.uid] -= 1
        if not self.of_uid[asked.uid]:
            del self.of_uid[asked.uid]

    def _begin(self, key: bytes, holder: _Request, due: float, ends_at: float, expected_at: float) -> _Claim:
        self._last_token += 1
        claim = _Claim(key, holder, self._last_token, ends_at, expected_at)
        self.by_key[key] = self._by_token[claim.token] = claim
        self._timers.set(claim.token, due)
        return claim

    def _wait(self, claim: _Claim, asked: _Request, now: float) -> Verdict:
        claim.waiters[asked.client, asked.number] = asked
        return Verdict(asked.client, asked.number, claim.key, "wait", lasts_s=max(0.0, claim.expected_at - now))

    def _grant(self, key: bytes, asked: _Request, now: float) -> Verdict:
        expected_at = now + asked.within_s if asked.within_s else 0.0
        claim = self._begin(key, asked, now + self._claim_s, now + self._claim_s_max, expected_at)
        return Verdict(asked.client, asked.number, key, "compute", claim.token, self._claim_s)

    def _failed(self, claim: _Claim, now: float) -> list[Verdict]:
        """The holder will not store the key: hands the claim over once, or lets every waiter compute."""
        if claim.handed_over or not claim.waiters:
            return self._give_up(claim)
        self._remove(claim)
        first = next(iter(claim.waiters.values()))
        del claim.waiters[first.client, first.number]
        verdict = self._grant(claim.key, first, now)
        successor = self.by_key[claim.key]
        successor.waiters, successor.handed_over = claim.waiters, not claim.seeks
        self.handed_over += successor.handed_over
        return [verdict]

    def _give_up(self, claim: _Claim) -> list[Verdict]:
        verdicts = self._end(claim, "alone")
        self.given_up(claim.key)
        return verdicts

    def _end(self, claim: _Claim, answer: Literal["hit", "alone"]) -> list[Verdict]:
        self._remove(claim)
        for asked in claim.waiters.values():
            self._settled(claim.key, asked)
        return [Verdict(client, number, claim.key, answer) for client, number in claim.waiters]

    def _remove(self, claim: _Claim) -> None:
        del self.by_key[claim.key]
        del self._by_token[claim.token]
        self._timers.drop(claim.token)
        if not claim.seeks:
            self._settled(claim.key, claim.holder)
