"""Claims against a plain model, and what a user may rely on when computing once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensord.daemon.claims.claims import ClaimTable, Verdict
from tensord.errors import LimitReached, UsageError

KEYS = [tag * 8 + bytes([i]) * 24 for tag in (b"a", b"b") for i in range(3)]
CLIENTS = [1, 2, 3]


def uid_of(client: int) -> int:
    """Clients 2 and 3 are one user's."""
    return client // 2


class ClaimsAgainstAList(RuleBasedStateMachine):
    """The model: per key its holder, token, both ends, its waiters, and how far it has come."""

    def __init__(self) -> None:
        super().__init__()
        self.claims = ClaimTable(claim_s=10, claim_s_max=35, per_client_max=6, epoch=3)
        self.now = 0.0
        self.request = 0
        self.model: dict[bytes, dict[str, Any]] = {}
        self.tokens: dict[int, tuple[int, bytes]] = {}
        self.open: set[tuple[int, int]] = set()

    def told(self, verdicts: list[Verdict]) -> list[tuple[int, int, str]]:
        for verdict in verdicts:
            assert (verdict.client, verdict.request) in self.open, "an answer to nobody's question"
            if verdict.answer != "wait":
                self.open.discard((verdict.client, verdict.request))
            if verdict.answer == "compute":
                assert verdict.token not in self.tokens, "a token was used again"
                self.tokens[verdict.token] = (verdict.client, verdict.key)
        return [(v.client, v.request, v.answer) for v in verdicts]

    def grant(self, key: bytes, client: int, verdict: Verdict, *, handed_over: bool) -> None:
        times = {"until": self.now + 10, "end": self.now + 35}
        self.model[key] = {"client": client, "uid": uid_of(client), "token": verdict.token, **times}
        self.model[key] |= {"handed_over": handed_over, "seeks": False, "waiters": []}

    def ended(self, key: bytes, answer: str) -> list[tuple[int, int, str]]:
        return [(c, r, answer) for c, r in self.model.pop(key)["waiters"]]

    def failed(self, key: bytes, verdicts: list[Verdict]) -> None:
        """Checks, and takes over into the model, what follows from one failed claim."""
        claim = self.model[key]
        waiters = claim["waiters"]
        if claim["handed_over"] or not waiters:
            assert self.told(verdicts) == self.ended(key, "alone")
            return
        (client, request), *rest = waiters
        assert self.told(verdicts) == [(client, request, "compute")]
        self.grant(key, client, verdicts[0], handed_over=not claim["seeks"])
        self.model[key]["waiters"] = rest

    def held_by(self, client: int) -> int:
        stakes = [c["client"] for c in self.model.values()]
        stakes += [waiter for c in self.model.values() for waiter, _ in c["waiters"]]
        return stakes.count(client)

    @rule(key=st.sampled_from(KEYS), client=st.sampled_from(CLIENTS))
    def claim(self, key: bytes, client: int) -> None:
        self.request += 1
        if self.held_by(client) >= 6:
            with pytest.raises(LimitReached, match="may have 6"):
                self.claims.claim(key, client, self.request, self.now, uid_of(client))
            return
        self.open.add((client, self.request))
        verdict = self.claims.claim(key, client, self.request, self.now, uid_of(client))
        if key in self.model:
            assert self.told([verdict]) == [(client, self.request, "wait")]
            self.model[key]["waiters"].append((client, self.request))
        else:
            assert self.told([verdict]) == [(client, self.request, "compute")]
            self.grant(key, client, verdict, handed_over=False)

    @rule(key=st.sampled_from(KEYS), client=st.sampled_from(CLIENTS), for_s=st.sampled_from([2.0, 8.0]))
    def daemon_seeks(self, key: bytes, client: int, for_s: float) -> None:
        """The daemon takes the claim itself, for a client that waits."""
        self.request += 1
        if key in self.model or self.held_by(client) >= 6:
            return
        self.open.add((client, self.request))
        token, verdict = self.claims.seek(key, client, self.request, self.now, uid_of(client), 0.0, for_s)
        assert self.told([verdict]) == [(client, self.request, "wait")]
        assert token not in self.tokens, "a token was used again"
        self.tokens[token] = (client, key)
        self.grant(key, client, replace(verdict, token=token), handed_over=False)
        times = {"until": self.now + for_s, "end": self.now + for_s}
        self.model[key] |= {"client": 0, "seeks": True, "waiters": [(client, self.request)], **times}

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def daemon_finds_nothing(self, data: st.DataObject) -> None:
        token, claim = self.some_token(data)
        verdicts = self.claims.sought(token, self.now)
        if claim is None or not claim["seeks"]:
            assert verdicts == []
        else:
            self.failed(self.tokens[token][1], verdicts)

    def some_token(self, data: st.DataObject) -> tuple[int, dict[str, Any] | None]:
        token = data.draw(st.sampled_from(sorted(self.tokens)))
        claim = self.model.get(self.tokens[token][1])
        return token, claim if claim is not None and claim["token"] == token else None

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), client=st.sampled_from(CLIENTS))
    def renew(self, data: st.DataObject, client: int) -> None:
        token, claim = self.some_token(data)
        self.claims.renew(token, client, self.now)
        if claim is not None and claim["client"] == client:
            claim["until"] = min(self.now + 10, claim["end"])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), client=st.sampled_from(CLIENTS))
    def abandon(self, data: st.DataObject, client: int) -> None:
        token, claim = self.some_token(data)
        verdicts = self.claims.abandon(token, uid_of(client), self.now)
        if claim is None or claim["uid"] != uid_of(client):
            assert verdicts == []
        else:
            self.failed(self.tokens[token][1], verdicts)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def commit_is_refused(self, data: st.DataObject) -> None:
        token, claim = self.some_token(data)
        client, key = self.tokens[token]
        verdicts = self.claims.refused(token, uid_of(client), key, self.now)
        if claim is not None and claim["seeks"]:
            self.failed(key, verdicts)
            return
        expected = [] if claim is None else self.ended(self.tokens[token][1], "alone")
        assert self.told(verdicts) == expected

    @rule(key=st.sampled_from(KEYS))
    def somebody_stores(self, key: bytes) -> None:
        verdicts = self.claims.committed(key)
        assert self.told(verdicts) == (self.ended(key, "hit") if key in self.model else [])

    @rule(tag=st.sampled_from([b"a" * 8, b"b" * 8]))
    def void(self, tag: bytes) -> None:
        verdicts = self.claims.void(tag)
        expected = [v for k in sorted(self.model) if k[:8] == tag for v in self.ended(k, "alone")]
        assert self.told(verdicts) == expected

    @rule(client=st.sampled_from(CLIENTS))
    def client_leaves(self, client: int) -> None:
        self.open -= {(c, r) for c, r in self.open if c == client}
        for claim in self.model.values():
            claim["waiters"] = [w for w in claim["waiters"] if w[0] != client]
        verdicts = self.claims.client_left(client, self.now)
        mine = [(claim["token"], key) for key, claim in self.model.items() if claim["client"] == client]
        for _, key in sorted(mine):
            expected = len(self.model[key]["waiters"])
            if not self.model[key]["handed_over"]:
                expected = min(expected, 1)
            self.failed(key, verdicts[:expected])
            verdicts = verdicts[expected:]
        assert verdicts == []

    @rule(seconds=st.sampled_from([1.0, 4.0, 9.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        while True:
            due = [(claim["until"], key) for key, claim in self.model.items() if claim["until"] <= self.now]
            verdicts = self.claims.expire(self.now, 1)
            if not due:
                assert verdicts == []
                break
            # Of those due at the same time any may come first; tokens tell which did.
            before = dict(self.model)
            earliest = [key for until, key in due if until == min(due)[0]]
            gone = [k for k in earliest if not self.claims.holds(before[k]["token"])]
            assert len(gone) == 1
            self.failed(gone[0], verdicts)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.claims.check_invariants()
        assert len(self.claims) == len(self.model)
        assert self.claims.waiting == sum(len(c["waiters"]) for c in self.model.values())
        ends = [c["until"] for c in self.model.values()]
        assert self.claims.next_timer() == min(ends, default=None)
        assert all(c["until"] <= c["end"] for c in self.model.values())


TestClaimsAgainstAList = ClaimsAgainstAList.TestCase
TestClaimsAgainstAList.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_request_number_that_is_used_twice_for_a_key_is_refused_and_leaves_nothing() -> None:
    claims = ClaimTable(10, 35, 6, 3)
    assert claims.claim(KEYS[0], 1, 7, 0.0).answer == "compute"
    with pytest.raises(UsageError, match="request 7"):
        claims.claim(KEYS[0], 1, 7, 0.0)
    claims.check_invariants()
    assert claims.client_left(1, 0.0) == [] and not claims.of_uid
