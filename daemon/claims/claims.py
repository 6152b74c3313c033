"""The claims: which client may compute a missing key, and which clients wait for the result.

Owns claims and their waiters. Knows nothing of entries, messages or memory. Every method returns the answers that it
causes, in order.

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
claim. For example, an engine's scheduler claims a key, and a worker in another process stores the payload.

"alone" means: compute without a claim; no client waits for the result. So a key that can never be computed costs each
waiter one attempt.

Invariants: a claim lasts `claim_s` from its grant or last renewal, and at most `claim_s_max` from its grant. A token is
never used twice, in any epoch. A key has at most one claim. A client has at most `per_client_max` claims and waits
together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Literal

from ...errors import LimitReached
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


@dataclass(slots=True)
class _Claim:
    key: bytes
    client: int
    uid: int
    token: int
    ends_at: float
    expected_at: float = 0.0
    handed_over: bool = False
    seeks: bool = False
    """The daemon has the claim while it asks the remote store. No client holds it."""
    waiters: dict[tuple[int, int], float] = field(default_factory=dict)
    """By client and request: the seconds within which this client would store the key if it got the claim."""


@dataclass(slots=True)
class _ClientClaims:
    """The tokens that one client holds, and the (key, request) pairs that it waits for."""

    uid: int
    held: set[int] = field(default_factory=set)
    waits: set[tuple[bytes, int]] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.held) + len(self.waits)


class ClaimTable:
    """The claims of one daemon. The first `tag_bytes` of a key name its namespace."""

    def __init__(self, claim_s: float, claim_s_max: float, per_client_max: int, epoch: int, tag_bytes: int = 8) -> None:
        self._claim_s = claim_s
        self._claim_s_max = claim_s_max
        self._per_client_max = self._per_client_most = per_client_max
        # On the wire, a token is a positive 63-bit number.
        self._last_token = (epoch & 0x7FFF) << TOKEN_COUNTER_BITS
        self._first_token = self._last_token + 1
        self._tag_bytes = tag_bytes
        self._by_key: dict[bytes, _Claim] = {}
        self.by_key: Container[bytes] = self._by_key
        """The keys that are claimed."""
        self._by_token: dict[int, _Claim] = {}
        self._by_tag: dict[bytes, set[bytes]] = {}
        self._by_client: dict[int, _ClientClaims] = {}
        self.of_uid: Counter[int] = Counter()
        """The number of claims and waits of each uid that has any."""
        self._timers: Deadlines[int] = Deadlines()
        self.given_up: Callable[[bytes], object] = lambda _: None
        """Called with a key whose claim has ended, though nobody has stored the key, and nobody waits any more."""
        self.granted = 0
        self.handed_over = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def change_limits(self, claim_s: float, claim_s_max: float, per_client_max: int) -> None:
        """Applies to later claims and renewals."""
        self._claim_s = claim_s
        self._claim_s_max = claim_s_max
        self._per_client_max = per_client_max
        self._per_client_most = max(self._per_client_most, per_client_max)

    def claimed(self, key: bytes) -> bool:
        """Whether a client has the claim on `key`."""
        return key in self._by_key

    def holds(self, token: int) -> bool:
        """Whether the token's claim is active."""
        return token in self._by_token

    @property
    def waiting(self) -> int:
        """The number of requests that wait for another client's result."""
        return sum(len(own.waits) for own in self._by_client.values())

    def next_timer(self) -> float | None:
        """When `expire` is due."""
        return self._timers.next_timer()

    def claim(self, key: bytes, client: int, request: int, now: float, uid: int = 0, within_s: float = 0.0) -> Verdict:
        """Requests the claim on `key`, which the client missed and expects to store within `within_s` seconds.

        Returns:
            "compute" with a token; or "wait" if another client has the claim. Another Verdict follows a "wait".

        Raises:
            LimitReached: the client has as many claims and waits as it may.
        """
        self._admit(client)
        claim = self._by_key.get(key)
        if claim is None:
            return self._grant(key, client, uid, request, now, within_s)
        return self._wait(claim, client, uid, request, now, within_s)

    def seek(
        self, key: bytes, client: int, request: int, now: float, uid: int, within_s: float, for_s: float
    ) -> tuple[int, Verdict]:
        """As `claim`, of a key that nobody has claimed: the daemon takes the claim for `for_s` seconds.

        Returns:
            The token of the daemon's claim, and "wait" for the client.

        Raises:
            LimitReached: as `claim`.
        """
        self._admit(client)
        claim = self._begin(key, NOBODY, uid, now + for_s)
        claim.expected_at = now + for_s
        claim.seeks = True
        self._timers.set(claim.token, now + for_s)
        return claim.token, self._wait(claim, client, uid, request, now, within_s)

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
        if claim is not None and claim.client == client:
            self._timers.set(token, min(now + self._claim_s, claim.ends_at))

    def abandon(self, token: int, uid: int, now: float) -> list[Verdict]:
        """Ends a claim whose holder gives up. Does nothing if the claim has ended, or is another uid's."""
        claim = self._by_token.get(token)
        if claim is None or claim.uid != uid:
            return []
        return self._failed(claim, now)

    def key_held(self, token: int, uid: int) -> bytes | None:
        """The key of a claim that a client of this uid holds; None if there is none."""
        claim = self._by_token.get(token)
        if claim is None or claim.uid != uid or claim.seeks:
            return None
        return claim.key

    def committed(self, key: bytes) -> list[Verdict]:
        """`key` is stored, by any client."""
        claim = self._by_key.get(key)
        return [] if claim is None else self._end(claim, "hit")

    def refused(self, token: int, uid: int, key: bytes, now: float) -> list[Verdict]:
        """A commit under this claim was refused, or will not come, as its value cannot be stored. Does nothing if the
        claim has ended, or is not one of this uid on this key."""
        claim = self._by_token.get(token)
        if claim is None or claim.uid != uid or claim.key != key:
            return []
        return self._failed(claim, now) if claim.seeks else self._give_up(claim)

    def void(self, tag: bytes) -> list[Verdict]:
        """Ends every claim in the namespace."""
        verdicts: list[Verdict] = []
        for key in sorted(self._by_tag.get(tag, ())):
            verdicts += self._give_up(self._by_key[key])
        return verdicts

    def client_left(self, client: int, now: float) -> list[Verdict]:
        """Drops the client's waits and fails its claims."""
        own = self._by_client.pop(client, None)
        if own is None:
            return []
        self._uncount(own.uid, len(own))
        for key, request in own.waits:
            del self._by_key[key].waiters[client, request]
        verdicts: list[Verdict] = []
        for token in sorted(own.held):
            verdicts += self._failed(self._by_token[token], now)
        return verdicts

    def expire(self, now: float, most: int) -> list[Verdict]:
        """Fails up to `most` claims whose time is up."""
        verdicts: list[Verdict] = []
        for _ in range(most):
            token = self._timers.pop_due(now)
            if token is None:
                break
            verdicts += self._failed(self._by_token[token], now)
        return verdicts

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        self._timers.check_invariants()
        assert {c.token: c for c in self._by_key.values()} == self._by_token
        tags: dict[bytes, set[bytes]] = {}
        waits: dict[int, set[tuple[bytes, int]]] = {}
        held: dict[int, set[int]] = {}
        for key, claim in self._by_key.items():
            assert claim.key == key
            assert self._first_token <= claim.token <= self._last_token
            tags.setdefault(key[: self._tag_bytes], set()).add(key)
            due = self._timers.when(claim.token)
            assert due is not None and due <= claim.ends_at
            assert claim.seeks == (claim.client == NOBODY)
            if not claim.seeks:
                held.setdefault(claim.client, set()).add(claim.token)
            for client, request in claim.waiters:
                waits.setdefault(client, set()).add((key, request))
        assert tags == self._by_tag
        of_uid: Counter[int] = Counter()
        for own in self._by_client.values():
            of_uid[own.uid] += len(own)
        assert of_uid == self.of_uid
        for client, own in self._by_client.items():
            assert 0 < len(own) <= self._per_client_most
            assert own.held == held.pop(client, set())
            assert own.waits == waits.pop(client, set())
        assert not held, "a claim of a client that is not known"
        assert not waits, "a waiter that is not known"

    def _of_client(self, client: int, uid: int) -> _ClientClaims:
        own = self._by_client.get(client)
        if own is None:
            own = self._by_client[client] = _ClientClaims(uid)
        return own

    def _uncount(self, uid: int, count: int) -> None:
        self.of_uid[uid] -= count
        if not self.of_uid[uid]:
            del self.of_uid[uid]

    def _admit(self, client: int) -> None:
        own = self._by_client.get(client)
        if own is not None and len(own) >= self._per_client_max:
            raise LimitReached(
                f"this client has {len(own)} claims and waits, and may have "
                f"{self._per_client_max}: compute without a claim"
            )

    def _begin(self, key: bytes, client: int, uid: int, ends_at: float) -> _Claim:
        self._last_token += 1
        claim = _Claim(key, client, uid, self._last_token, ends_at)
        self._by_key[key] = self._by_token[claim.token] = claim
        self._by_tag.setdefault(key[: self._tag_bytes], set()).add(key)
        return claim

    def _wait(self, claim: _Claim, client: int, uid: int, request: int, now: float, within_s: float) -> Verdict:
        claim.waiters[client, request] = within_s
        self._of_client(client, uid).waits.add((claim.key, request))
        self.of_uid[uid] += 1
        return Verdict(client, request, claim.key, "wait", lasts_s=max(0.0, claim.expected_at - now))

    def _grant(self, key: bytes, client: int, uid: int, request: int, now: float, within_s: float) -> Verdict:
        claim = self._begin(key, client, uid, now + self._claim_s_max)
        claim.expected_at = now + within_s if within_s else 0.0
        self._of_client(client, uid).held.add(claim.token)
        self.of_uid[uid] += 1
        self._timers.set(claim.token, now + self._claim_s)
        self.granted += 1
        return Verdict(client, request, key, "compute", claim.token, self._claim_s)

    def _failed(self, claim: _Claim, now: float) -> list[Verdict]:
        """The holder will not store the key: hands the claim over once, or lets every waiter compute."""
        if claim.handed_over or not claim.waiters:
            return self._give_up(claim)
        waiters = claim.waiters
        client, request = next(iter(waiters))
        within_s = waiters.pop((client, request))
        uid = self._by_client[client].uid
        self._drop_wait(client, claim.key, request)
        claim.waiters = {}
        self._end(claim, "alone")
        verdict = self._grant(claim.key, client, uid, request, now, within_s)
        successor = self._by_key[claim.key]
        successor.handed_over = not claim.seeks
        successor.waiters = waiters
        self.handed_over += successor.handed_over
        return [verdict]

    def _give_up(self, claim: _Claim) -> list[Verdict]:
        verdicts = self._end(claim, "alone")
        self.given_up(claim.key)
        return verdicts

    def _end(self, claim: _Claim, answer: Literal["hit", "alone"]) -> list[Verdict]:
        del self._by_key[claim.key]
        del self._by_token[claim.token]
        tag = claim.key[: self._tag_bytes]
        self._by_tag[tag].discard(claim.key)
        if not self._by_tag[tag]:
            del self._by_tag[tag]
        self._timers.drop(claim.token)
        holder = self._by_client.get(claim.client)
        if holder is not None and not claim.seeks:
            holder.held.remove(claim.token)
            self._uncount(holder.uid, 1)
            self._drop_if_empty(claim.client)
        verdicts = []
        for client, request in claim.waiters:
            self._drop_wait(client, claim.key, request)
            verdicts.append(Verdict(client, request, claim.key, answer))
        return verdicts

    def _drop_wait(self, client: int, key: bytes, request: int) -> None:
        own = self._by_client[client]
        own.waits.remove((key, request))
        self._uncount(own.uid, 1)
        self._drop_if_empty(client)

    def _drop_if_empty(self, client: int) -> None:
        if not self._by_client[client]:
            del self._by_client[client]
