"""A request is measured from its arrival to its own answer, and to nothing else that comes under its id."""

from __future__ import annotations

import asyncio

import pytest

from tensord.daemon.connections import timing
from tensord.daemon.connections.timing import RequestTimer, measure_lag
from tensord.daemon.reports.counters import RequestTimes
from tensord.errors import StoreFull
from tensord.ipc.messages import control as messages

KEY = b"k" * 32


def counts(times: RequestTimes) -> dict[str, int]:
    return {kind: sum(found["counts"]) for kind, found in times.as_dict()["kinds"].items()}


@pytest.fixture
def times() -> RequestTimes:
    """Keeps the last three slow requests, and takes all for slow."""
    return RequestTimes(0.0, 3)


def test_a_request_ends_with_its_answer_and_not_with_a_push(times: RequestTimes) -> None:
    timer = RequestTimer(times, 7, "x")
    timer.began(messages.AskForGrants(4, [100]))
    timer.began(messages.ReturnGrants([4]))
    timer.answered(messages.PutRefused(4))
    timer.answered(messages.Settled())
    assert counts(times) == {}
    timer.answered(messages.GrantsLent(4, []))
    assert counts(times) == {"AskForGrants": 1}
    (slow,) = times.as_dict()["slow"]
    assert (slow["kind"], slow["payload_bytes"], slow["client"], slow["name"]) == ("AskForGrants", 100, 7, "x")


def test_a_claim_is_measured_to_its_first_answer_and_an_error_ends_a_request(times: RequestTimes) -> None:
    timer = RequestTimer(times, 7)
    timer.began(messages.RequestClaim(1, KEY))
    for answer in ("wait", "hit"):
        timer.answered(messages.Claimed(1, answer))
    timer.began(messages.Touch(1, [KEY]))
    timer.answered(messages.Error.of(StoreFull("full"), 1))
    timer.answered(messages.Error.of(StoreFull("of no request"), None))
    assert counts(times) == {"RequestClaim": 1, "Touch": 1}


def test_the_last_slow_requests_are_kept_and_no_more_than_the_limit(times: RequestTimes) -> None:
    for slow_s in (0.0, 60.0):
        times.slow_s = slow_s
        for client in range(1, 6):
            timer = RequestTimer(times, client)
            timer.began(messages.Touch(1, [KEY]))
            timer.answered(messages.Counted(1, 0))
    assert [row["client"] for row in times.as_dict()["slow"]] == [5, 4, 3]
    assert counts(times) == {"Touch": 10}


def test_the_lag_of_the_event_loop_is_measured_until_it_ends(
    times: RequestTimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "LAG_EVERY_S", 0.001)

    async def measured() -> None:
        task = asyncio.create_task(measure_lag(times))
        while sum(times.as_dict()["event_loop_lag"]["counts"]) < 2:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(asyncio.wait_for(measured(), 30))
    assert counts(times) == {}
