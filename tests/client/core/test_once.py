"""The steps of one `get_or_compute`, against a link whose answers the test gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import pytest

from tensord.client.core import once
from tensord.client.core.lease import Lease
from tensord.client.core.link import Link, PendingRequest
from tensord.client.core.once import AwaitAnswer, Compute, ComputeTally, Steps, StoreValue, compute_once
from tensord.client.core.put import Put, PutState
from tensord.errors import DaemonUnavailable, LimitReached, StoreFull, TimedOut, UnsupportedLeaf
from tensord.ipc import messages
from tensord.ipc.schema import COST_MS_MAX
from tensord.shm.recipe import recipe
from tensord.shm.tree import encode

KEY = bytes(range(32))
VALUE = "the value"
TOKEN = 7
TIMEOUT_S = 2.5


def lease_on(value: Any) -> Lease:
    payload = encode(value)
    memory = np.zeros(payload.payload_bytes, np.uint8)
    payload.write_into(memory)
    return Lease(memory, recipe(payload.header), payload.payload_bytes)


def put_in(state: PutState) -> Put:
    put = Put(KEY)
    if state != "sent":
        put.settle(state)
    return put


class PlayedLink:
    """Takes one request for a claim. `settle` answers it as the link does when a message of the daemon arrives."""

    def __init__(self) -> None:
        self.asked: list[messages.Message] = []
        self.held: set[int] = set()
        self.given_back: list[int] = []
        self.request = PendingRequest()

    def ask(self, make: Callable[[int], messages.Message], timeout_s: float) -> PendingRequest:
        assert timeout_s == TIMEOUT_S
        self.asked.append(make(1))
        return self.request

    def holds_claim(self, token: int) -> bool:
        return token in self.held

    def drop_claim(self, token: int) -> bool:
        held = token in self.held
        self.held.discard(token)
        return held

    def give_back(self, token: int, timeout_s: float) -> None:
        if self.drop_claim(token):
            self.given_back.append(token)

    def settle(self, answer: Literal["hit", "compute", "alone"]) -> None:
        token = TOKEN if answer == "compute" else 0
        if token:
            self.held.add(token)
        if self.request.set_running_or_notify_cancel():
            self.request.set_result(messages.Claimed(1, answer, token, 60.0 if token else 0.0))
        elif token:
            # Link gives back a claim that is granted to a cancelled request.
            self.give_back(token, 1.0)


class Call:
    """One `get_or_compute` of KEY. The test drives it; `entries` is what lookups find."""

    def __init__(self) -> None:
        self.link = PlayedLink()
        self.tally = ComputeTally()
        self.entries: dict[bytes, Lease] = {}
        self.looked_up = 0
        self.steps: Steps = compute_once(KEY, self._look_up, cast(Link, self.link), self.tally, TIMEOUT_S)

    def _look_up(self, key: bytes) -> Lease | None:
        self.looked_up += 1
        return self.entries.get(key)

    def begin(self) -> None:
        """Goes up to the wait for the daemon's answer."""
        step = next(self.steps)
        assert isinstance(step, AwaitAnswer)
        assert step.future is self.link.request

    def answered(self, answer: Literal["hit", "compute", "alone"]) -> Any:
        """The step after the daemon's answer."""
        self.link.settle(answer)
        return self.steps.send(self.link.request.result(0))

    def computed(self, value: Any = VALUE) -> StoreValue:
        """The step after the computation."""
        step = self.steps.send(value)
        assert isinstance(step, StoreValue)
        return step

    def returned(self, sent: Any = None) -> Any:
        """The payload, with which the call ends after `sent`."""
        with pytest.raises(StopIteration) as done:
            self.steps.send(sent)
        return done.value.value


@pytest.fixture
def call() -> Iterator[Call]:
    call = Call()
    yield call
    # A generator that a failed test left suspended ends here, and not while the interpreter exits.
    call.steps.close()


def test_a_stored_key_is_returned_without_asking_the_daemon(call: Call) -> None:
    call.entries[KEY] = lease_on(VALUE)
    assert call.returned() == VALUE
    assert call.tally == ComputeTally(found=1)
    assert call.link.asked == []


@pytest.mark.parametrize("state", ["sent", "stored", "existed"])
def test_a_granted_claim_is_computed_stored_under_its_token_and_renewed_no_more(call: Call, state: PutState) -> None:
    call.begin()
    assert call.link.asked == [messages.RequestClaim(1, KEY)]
    assert call.answered("compute") == Compute()
    store = call.computed()
    assert (store.value, store.claim) == (VALUE, TOKEN)
    assert call.link.held == {TOKEN}, "the claim is renewed until the value is put"
    assert call.returned(put_in(state)) == VALUE
    assert (call.link.held, call.link.given_back) == (set(), [])
    assert call.tally == ComputeTally(computed=1)


@pytest.mark.parametrize("state", ["refused", "lost"])
def test_the_claim_of_a_put_that_stored_nothing_is_given_back_and_the_value_returned(
    call: Call, state: PutState
) -> None:
    call.begin()
    call.answered("compute")
    call.computed()
    assert call.returned(put_in(state)) == VALUE
    assert (call.link.held, call.link.given_back) == (set(), [TOKEN])
    assert call.tally == ComputeTally(computed=1)


@pytest.mark.parametrize(("took_s", "cost_ms"), [(0.25, 250.0), (1e30, COST_MS_MAX)])
def test_the_value_is_put_with_the_milliseconds_that_computing_it_took(
    call: Call, monkeypatch: pytest.MonkeyPatch, took_s: float, cost_ms: float
) -> None:
    times = iter([16.0, 16.0 + took_s])
    monkeypatch.setattr(once, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    call.begin()
    call.answered("compute")
    assert call.computed().cost_ms == cost_ms


def test_a_value_that_another_client_stored_meanwhile_is_looked_up_again_and_not_computed(call: Call) -> None:
    call.begin()
    call.link.request.waits = True
    call.entries[KEY] = lease_on(VALUE)
    call.link.settle("hit")
    assert call.returned(call.link.request.result(0)) == VALUE
    assert call.looked_up == 2
    assert call.tally == ComputeTally(waited=1)
    assert call.link.given_back == []


def test_an_entry_that_is_gone_again_after_the_wait_is_computed_without_a_claim(call: Call) -> None:
    call.begin()
    assert call.answered("hit") == Compute()
    assert call.looked_up == 2
    assert call.computed().claim is None
    assert call.returned(put_in("stored")) == VALUE
    assert call.tally == ComputeTally(computed=1)
    assert len(call.link.asked) == 1, "it waits for another client once at most"


def test_a_call_that_is_to_compute_alone_stores_without_a_claim(call: Call) -> None:
    call.begin()
    assert call.answered("alone") == Compute()
    assert call.computed().claim is None
    assert call.returned(put_in("stored")) == VALUE


@pytest.mark.parametrize("error", [DaemonUnavailable("no daemon"), LimitReached("claims_per_client_max")])
def test_a_request_that_failed_computes_without_a_claim(call: Call, error: Exception) -> None:
    call.begin()
    call.link.request.set_exception(error)
    assert call.steps.throw(error) == Compute()
    assert call.computed().claim is None
    assert call.returned(put_in("lost")) == VALUE
    assert call.tally == ComputeTally(computed=1)


def test_a_wait_that_took_too_long_computes_without_a_claim_and_a_late_grant_is_given_back(call: Call) -> None:
    call.begin()
    call.link.request.waits = True
    assert call.steps.throw(TimedOut("no answer in time")) == Compute()
    call.link.settle("compute")
    assert call.link.given_back == [TOKEN]
    assert call.computed().claim is None
    assert call.returned(put_in("stored")) == VALUE
    assert (call.link.held, call.link.given_back) == (set(), [TOKEN])


def test_a_claim_that_is_granted_in_the_moment_of_the_timeout_is_used(call: Call) -> None:
    call.begin()
    call.link.settle("compute")
    assert call.steps.throw(TimedOut("no answer in time")) == Compute()
    assert call.computed().claim == TOKEN
    assert call.returned(put_in("sent")) == VALUE
    assert (call.link.held, call.link.given_back) == (set(), [])


@pytest.mark.parametrize("error", [ZeroDivisionError(), StoreFull("raised by compute"), KeyboardInterrupt()])
def test_an_exception_of_the_computation_gives_the_claim_back_and_is_raised_again(
    call: Call, error: BaseException
) -> None:
    call.begin()
    call.answered("compute")
    with pytest.raises(type(error)) as raised:
        call.steps.throw(error)
    assert raised.value is error
    assert (call.link.held, call.link.given_back) == (set(), [TOKEN])
    assert call.tally == ComputeTally()


def test_a_value_that_cannot_be_put_gives_the_claim_back_and_its_error_is_raised(call: Call) -> None:
    call.begin()
    call.answered("compute")
    call.computed()
    with pytest.raises(UnsupportedLeaf):
        call.steps.throw(UnsupportedLeaf("a set"))
    assert (call.link.held, call.link.given_back) == (set(), [TOKEN])


def test_a_call_that_is_cancelled_while_it_waits_computes_nothing_and_a_late_grant_is_given_back(call: Call) -> None:
    call.begin()
    with pytest.raises(asyncio.CancelledError):
        call.steps.throw(asyncio.CancelledError())
    call.link.settle("compute")
    assert (call.link.held, call.link.given_back) == (set(), [TOKEN])
    assert call.tally == ComputeTally()


def test_a_call_whose_driver_is_gone_gives_its_claim_back(call: Call) -> None:
    call.begin()
    call.answered("compute")
    call.steps.close()
    assert (call.link.held, call.link.given_back) == (set(), [TOKEN])
