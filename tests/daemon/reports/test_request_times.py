"""Each request is counted once under its kind, and the last slow ones are kept."""

from __future__ import annotations

from tensord.daemon.reports.request_times import RequestTimes


def took(times: RequestTimes, kind: str, took_s: float, client: int = 1) -> None:
    times.took(kind, took_s, size_bytes=5, client=client, name="x", unix_s=9.0)


def test_each_request_is_counted_under_its_kind() -> None:
    times = RequestTimes(1.0, 4)
    for seconds in (0.00001, 0.0003, 0.0003, 99.0):
        took(times, "RequestClaim", seconds)
    took(times, "Touch", 0.1)
    kinds = times.as_dict()["kinds"]
    assert {kind: sum(found["counts"]) for kind, found in kinds.items()} == {"RequestClaim": 4, "Touch": 1}
    claims = kinds["RequestClaim"]
    assert claims["counts"][0] == 1, "a bound belongs to its bucket"
    assert claims["counts"][-1] == 1, "above the last bound"
    assert list(claims["bounds"]) == sorted(claims["bounds"])
    assert claims["bounds"][0] == 1e-5 and claims["bounds"][-1] == 10.0


def test_the_last_slow_requests_are_kept_and_no_more_than_the_limit() -> None:
    times = RequestTimes(0.5, 3)
    took(times, "RequestClaim", 0.5)
    assert times.as_dict()["slow"] == []
    for client in range(1, 6):
        took(times, "RequestClaim", 0.6, client)
    assert [row["client"] for row in times.as_dict()["slow"]] == [5, 4, 3]
    assert times.as_dict()["slow"][0] == {
        "kind": "RequestClaim",
        "took_s": 0.6,
        "payload_bytes": 5,
        "client": 5,
        "name": "x",
        "unix_s": 9.0,
    }
    times.slow_s = 0.7
    took(times, "RequestClaim", 0.6, 6)
    assert times.as_dict()["slow"][0]["client"] == 5


def test_the_lag_of_the_event_loop_is_counted_beside_the_requests() -> None:
    times = RequestTimes(0.5, 3)
    times.lagged(0.02)
    times.lagged(-0.001)
    lag = times.as_dict()["event_loop_lag"]
    assert (sum(lag["counts"]), lag["counts"][0]) == (2, 1)
    assert times.as_dict()["kinds"] == {}
