from __future__ import annotations

import json
import signal
from typing import Any

import numpy as np
import pytest

from tensord.client.ctl import status
from tensord.client.ctl.tables import WIDTH
from tensord.errors import VersionMismatch

from ...daemon_process import PATIENCE_S, Daemon
from .conftest import Ctl

KEY = bytes(range(32))


def test_status_tells_what_is_stored_and_what_happened(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client()
    client.put(KEY, np.zeros(1000, np.uint8), tokens=7, wait=True)
    kept = client.get(KEY)
    client.get(b"\1" * 32)
    daemon.until(lambda now: now["store"]["hits"] and now["store"]["misses"], "the lane was drained")
    told = ctl("status").out
    assert kept is not None
    assert told.startswith("tensord ")
    assert f"instance {daemon.instance}: pid {daemon.pid}" in told
    assert "hits 1 (50.0 %), misses 1" in told
    lines = {line.split()[0]: line for line in told.splitlines()[2:] if line}
    assert "1 of 4,096" in lines["entries"]
    assert "stored 1" in lines["puts"]
    assert "1 lease," in lines["pinned"]


def test_json_is_the_daemon_s_own_document(daemon: Daemon, ctl: Ctl) -> None:
    told, own = json.loads(ctl("status", "--json").out), daemon.status()
    assert told.keys() == own.keys()
    assert told["store"].keys() == own["store"].keys()
    assert (told["pid"], told["epoch"]) == (daemon.pid, 1)


def test_a_limit_of_the_store_below_its_ring_is_shown(ctl: Ctl) -> None:
    assert "limit" not in ctl("status").out
    ctl("limit", "4MiB")
    assert "4.00 MiB of a ring of 16.0 MiB" in ctl("status").out


def _document(daemon: Daemon, **changed: Any) -> dict[str, Any]:
    body = daemon.status()
    store = {name: changed.pop(name) for name in list(changed) if name in body["store"]}
    return {**body, **changed, "store": {**body["store"], **store}}


def test_any_figures_fit_100_columns(daemon: Daemon) -> None:
    huge = {name: 10**15 for name, value in daemon.status()["store"].items() if type(value) is int}
    reasons = {f"for the reason {number}": 10**12 for number in range(9)}
    text = status.text({**_document(daemon, **{**huge, "evictions": reasons}), "lanes": 10**9, "pins": 10**9})
    assert max(map(len, text.splitlines())) <= WIDTH


def test_the_idle_time_of_evicted_entries_is_shown_in_words(daemon: Daemon) -> None:
    assert "no entry has been evicted for other entries" in status.text(daemon.status())
    told = {"entries": 1024, "age_s": {"median": 400.0, "tenth": 9.0}, "idle_s": {"median": 60.0, "tenth": 5.0}}
    text = " ".join(status.text(_document(daemon, at_eviction=told)).split())
    assert "the last 1,024 evictions for other entries: median idle time 1m00s, median age 6m40s" in text
    assert "one in ten was idle for less than 5s" in text


def test_the_hit_ratio_is_shown_beside_that_of_lru(daemon: Daemon) -> None:
    told = " ".join(status.text(daemon.status()).split())
    assert "hit ratio - in the last minute, - over the last ring's worth of puts" in told
    assert "no entry was used or stored yet" in told
    lately = {"hits": 3, "lookups": 4, "requests": 16, "here": 8, "lru": 4}
    ratios = {**daemon.status()["store"]["hit_ratios"], "minute": lately, "ring": lately, "sampled": 4}
    told = " ".join(status.text(_document(daemon, hit_ratios=ratios)).split())
    assert "75.0 % in the last minute, 75.0 % over the last ring's worth of puts" in told
    assert "50.0 % found here, 25.0 % under lru, over the last ring's worth of puts (a sample, one key in 4)" in told


def test_a_daemon_counts_hits_lately_and_beside_lru(daemon: Daemon) -> None:
    client = daemon.client()
    keys = [bytes([number]) * 32 for number in range(4)]
    for key in keys:
        client.get(key)
        client.put(key, b"x" * 1000, wait=True)
    for _ in range(3):
        assert all(client.get(key) is not None for key in keys)
    daemon.until(lambda now: now["store"]["hits"] == 12 and now["store"]["misses"] == 4, "the lane was drained")
    ratios = daemon.status()["store"]["hit_ratios"]
    for over in ("minute", "ring"):
        assert ratios[over] == {"hits": 12, "lookups": 16, "requests": 16, "here": 12, "lru": 12}


def test_the_share_of_the_window_is_shown_where_the_policy_has_one(daemon: Daemon) -> None:
    text = status.text(_document(daemon, used_bytes=8 << 20, window_bytes=1 << 20))
    assert "policy hazard, window 1.00 MiB (12.5 % of what is used)" in " ".join(text.split())
    assert "window" not in status.text(_document(daemon, policy="lru", window_bytes=None))


def test_counters_that_must_stay_0_are_pointed_out(daemon: Daemon) -> None:
    assert "TROUBLE" not in status.text(daemon.status())
    assert "TROUBLE" in status.text(_document(daemon, found_corrupt=1))


def test_a_ring_that_could_not_be_had_is_pointed_out(daemon: Daemon) -> None:
    text = status.text(_document(daemon, ring_ready_bytes=1 << 20, ring_growing=False))
    assert "stays smaller" in text
    assert "growing" in status.text(_document(daemon, ring_ready_bytes=1 << 20, ring_growing=True))


def test_a_document_of_another_version_is_told_so(daemon: Daemon) -> None:
    body = daemon.status()
    del body["store"]["holes"]
    with pytest.raises(VersionMismatch, match=r"'holes'.*--json"):
        status.text(body)


def test_watch_goes_on_through_a_restart_and_ends_with_ctrl_c(daemon: Daemon, ctl: Ctl) -> None:
    with ctl.spawn("status", "--json", "--watch") as watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["epoch"] == 1
        daemon.terminate()
        while "error" not in (body := json.loads(watching.stdout.readline())):
            assert body["epoch"] == 1
        assert body["error"] == "DaemonUnavailable"
        daemon.start()
        while "error" in (body := json.loads(watching.stdout.readline())):
            pass
        assert body["epoch"] == 2
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=PATIENCE_S)
        assert (watching.returncode, err) == (0, "")


def test_a_watch_for_people_draws_the_same_again(ctl: Ctl) -> None:
    with ctl.spawn("status", "--watch") as watching:
        assert watching.stdout is not None
        heads = 0
        while heads < 2:
            heads += watching.stdout.readline().startswith("tensord ")
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=PATIENCE_S)
        assert (watching.returncode, err) == (0, "")


def test_a_closed_pipe_ends_it_quietly(ctl: Ctl) -> None:
    with ctl.spawn("status", "--json", "--watch") as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        watching.stdout.readline()
        watching.stdout.close()
        assert watching.wait(PATIENCE_S) == 0
        assert watching.stderr.read() == ""


# ---- health


def test_healthy_is_exit_code_0(ctl: Ctl) -> None:
    assert ctl("health").out == "healthy\n"
    assert json.loads(ctl("health", "--json").out)["problems"] == []


def test_no_daemon_is_exit_code_1(alone: Ctl) -> None:
    assert "no daemon at" in alone("health", code=1).err


def test_a_daemon_that_does_not_answer_in_time_is_exit_code_1(daemon: Daemon, ctl: Ctl) -> None:
    daemon.pause()
    try:
        assert "no answer within 0.2 s" in ctl("--timeout", "0.2s", "health", code=1).err
    finally:
        daemon.resume()
    ctl("health")


def test_problems_that_the_daemon_names_are_exit_code_1(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"healthy": False, "problems": ["the ring has 1 of 2 bytes"]}
    monkeypatch.setattr("tensord.client.ctl.daemon.Daemon.ask", lambda *_: body)
    assert ctl("health", code=1).err == "tensorctl: unhealthy: the ring has 1 of 2 bytes\n"
