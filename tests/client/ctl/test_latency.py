"""latency and slowlog tell what the daemon measured of a real client's requests."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import numpy as np
import pytest

from tensord.client.ctl.latency import percentile_s, since, slowlog_text
from tensord.client.ctl.tables import WIDTH

from ...daemon_process import Daemon, until
from .conftest import Ctl

KEY = bytes(range(32))


def counts_of(ctl: Ctl) -> dict[str, int]:
    kinds = json.loads(ctl("latency", "--json").out)["kinds"]
    return {kind: sum(found["counts"]) for kind, found in kinds.items()}


def rows_of(ctl: Ctl, *words: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(ctl("slowlog", "--json", *words).out)
    return rows


def test_each_kind_of_request_is_counted_once_for_each_answer(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client()
    for number in range(3):
        client.touch(bytes([number] * 32))
    # Two connections ask for one key: the second one waits, and is answered twice.
    first, second = client.claim(KEY), daemon.client().claim(KEY)
    until(lambda: {first.state, second.state} == {"compute", "waiting"}, "both claims to be answered")
    client.put(KEY, 1, wait=True)
    until(lambda: counts_of(ctl).get("RequestClaim") == 2, "the claims to be counted")
    counts = counts_of(ctl)
    assert (counts["Touch"], counts["RequestClaim"]) == (3, 2)
    assert counts["AskForGrants"] >= 1
    assert counts["LatencyQuery"] >= 1
    assert "Doorbell" not in counts and "Hello" not in counts


def test_latency_shows_percentiles_that_rise_and_the_lag_of_the_event_loop(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client()
    for number in range(50):
        client.touch(bytes([number] * 32))
    until(lambda: "event loop lag" in ctl("latency").out, "the first measurement")
    lines = ctl("latency").out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    (touch,) = (line.split() for line in lines if line.startswith("Touch "))
    assert touch[1] == "50"
    assert 0 < float(touch[3]) <= float(touch[4]) <= float(touch[5]) <= float(touch[6])


def test_latency_over_a_time_shows_only_the_requests_of_it(daemon: Daemon, ctl: Ctl) -> None:
    daemon.client().touch(KEY)
    assert "Touch" not in ctl("latency", "--over", "1ms").out


def test_slowlog_names_the_slow_request_its_client_and_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    with Daemon(log_slow_s=0) as daemon:
        client = daemon.start().client(name="encoder-1")
        client.put(KEY, np.zeros(1000), wait=True)
        ctl = Ctl(capsys, daemon.socket)
        (row,) = (
            row
            for row in rows_of(ctl, "--count", "1000")
            if row["kind"] == "AskForGrants" and row["payload_bytes"] >= 8000
        )
        assert row["name"] == "encoder-1"
        assert 0 < row["took_s"] < 60
        took = [row["took_s"] for row in rows_of(ctl)]
        assert took == sorted(took, reverse=True)
        assert rows_of(ctl, "--latest", "--count", "1")[0]["kind"] == "SlowQuery"


def test_slowlog_fits_100_columns_and_says_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with Daemon(log_slow_s=3600) as quick:
        assert "no request took longer than 3.6e+06 ms" in Ctl(capsys, quick.start().socket)("slowlog").out
    row = {"unix_s": 1.8e9, "kind": "k" * 20, "took_s": 3599.0, "payload_bytes": 1 << 40, "client": 1 << 30}
    assert max(map(len, slowlog_text([{**row, "name": "n" * 128}]).splitlines())) <= WIDTH


def test_the_threshold_of_the_slowlog_changes_by_a_reload(capsys: pytest.CaptureFixture[str]) -> None:
    with Daemon() as daemon:
        file = daemon.folder / "tensord.toml"
        file.write_text("")
        daemon.flags["config"] = file
        ctl = Ctl(capsys, daemon.start().socket)
        daemon.client().put(KEY, 1, wait=True)
        file.write_text("[log]\nslow_s = 0\n")
        os.kill(daemon.pid, signal.SIGHUP)
        until(lambda: [row for row in rows_of(ctl) if row["kind"] == "SlowQuery"], "the reload")


HISTOGRAM = {"bounds": [1.0, 2.0, 5.0], "counts": [10, 80, 9, 1], "sum": 150.0}


@pytest.mark.parametrize(("share", "least", "most"), [(0.05, 0, 1), (0.5, 1, 2), (0.95, 2, 5), (1.0, 5, 5)])
def test_a_percentile_lies_in_its_bucket(share: float, least: float, most: float) -> None:
    assert least <= percentile_s(HISTOGRAM, share) <= most


def test_no_request_has_no_percentile() -> None:
    assert percentile_s({"bounds": [1.0], "counts": [0, 0]}, 0.99) == 0.0


def test_a_difference_over_a_restart_is_what_the_new_daemon_counted() -> None:
    small = {"bounds": [1.0], "counts": [1, 0], "sum": 0.5}
    large = {"bounds": [1.0], "counts": [3, 4], "sum": 9.5}
    before = {"kinds": {"Touch": small}, "event_loop_lag": large, "hits": small}
    after = {"kinds": {"Touch": large, "Evict": small}, "event_loop_lag": small, "hits": large}
    assert since(before, after) == {
        "kinds": {"Touch": {"bounds": [1.0], "counts": [2, 4], "sum": 9.0}, "Evict": small},
        "event_loop_lag": small,
        "hits": {"bounds": [1.0], "counts": [2, 4], "sum": 9.0},
    }


def test_latency_has_a_row_of_hits_once_a_client_has_timed_one(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client()
    client.put(KEY, 1, wait=True)
    assert not any(line.startswith("hit ") for line in ctl("latency").out.splitlines())

    def row() -> list[str]:
        assert client.get(KEY) is not None
        return next((line.split() for line in ctl("latency").out.splitlines() if line.startswith("hit ")), [])

    _, count, mean, half, *_ = until(row, "a hit to be timed")
    assert int(count) >= 1 and float(mean) > 0 and float(half) > 0
