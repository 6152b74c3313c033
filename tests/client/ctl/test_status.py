"""`status` and `health`, of a real daemon and of documents that are written down."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensord.client.ctl.output import WIDTH
from tensord.client.ctl.show import status_text

from ...daemon_process import Daemon
from . import documents
from .conftest import Ctl
from .documents import CARD, GIB, OTHER

KEY = bytes(range(32))
HEALTHY: dict[str, Any] = {"healthy": True, "problems": [], "notices": []}


def shown(status: dict[str, Any], health: dict[str, Any] = HEALTHY) -> str:
    """The status as text, its lines joined."""
    return " ".join(status_text(status, health).split())


def test_status_tells_what_is_stored_and_what_happened(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client()
    client.put(KEY, np.zeros(1000, np.uint8), tokens=7, wait=True)
    kept = client.get(KEY)
    client.get(b"\1" * 32)
    daemon.until(lambda now: now["store"]["hits"] and now["store"]["misses"], "the lane was drained")
    told = " ".join(ctl("status").out.split())
    assert kept is not None
    assert told.startswith("tensord ")
    assert f"instance {daemon.instance}: pid {daemon.pid}" in told
    for said in ("lookups hits 1, misses 1", "entries 1 of 4,096", "puts stored 1;", "clients 1, with leases 1;"):
        assert said in told
    assert "hit ratio 50.0 % in the last minute" in told and "limited" not in told
    ctl("limit", "4MiB")
    assert "limited to 4.00 MiB of a ring of 16.0 MiB" in " ".join(ctl("status").out.split())


def test_json_is_the_daemon_s_own_document(daemon: Daemon, ctl: Ctl) -> None:
    told, own = json.loads(ctl("status", "--json").out), daemon.status()
    assert told.keys() == own.keys()
    assert told["store"].keys() == own["store"].keys()
    assert (told["pid"], told["epoch"]) == (daemon.pid, 1)


STORE = documents.store()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({}, "75.0 % found here, 50.0 % under lru (one key in 8 counts)"),
        ({}, "remote valkey://cache.example:6379 serves; fetched 30, missed 900; read 300 MiB, written 5.00 GiB"),
        ({"remote": documents.remote(serves=False)}, "LEFT ALONE"),
        ({"ring_ready_bytes": GIB, "store": {**STORE, "ring_growing": True}}, "; 1.00 GiB ready, growing"),
    ],
)
def test_the_store_is_shown_in_words(status: dict[str, Any], said: str) -> None:
    assert said in shown(documents.status(**status))


@pytest.mark.parametrize(
    ("governor", "said"),
    [
        ({}, f"gauge {CARD}: pressure for 3m12s, 87.5 % of 80.0 GiB; from nvidia, read 1s ago"),
        ({}, f"gauge {OTHER}: emergency for 3m12s, 98.8 % of 80.0 GiB; from a FILE, and no measurement"),
        ({"gauges": [documents.gauge("host", 1, 2, "normal", stale=True)]}, "STALE: its last value is used"),
        (
            {"gauges": [], "devices": [], "workflows": [], "counters": {"registered": 0}},
            "gauges none: the use of the tiers is unknown",
        ),
        ({}, f"device {CARD}: 300 entries of 2 clients, 6.00 GiB, tokens 307,200; leaving 12 (240 MiB); reserved 1.00"),
        (
            {"devices": [documents.device(CARD, waiting_reservations=2, waiting_bytes=GIB)]},
            "; 2 reservations wait for 1.00 GiB",
        ),
        (
            {"host": {"resident_bytes": 3 * GIB, "wanted_bytes": 5 * GIB, "resident_bytes_max": 4 * GIB}},
            "ring under pressure, 3.00 GiB of 5.00 GiB in memory; may have 4.00 GiB",
        ),
    ],
)
def test_pressure_is_shown_in_words(governor: dict[str, Any], said: str) -> None:
    assert said in shown(documents.status(governor=documents.governor(**governor)))


def test_problems_stand_first(recorded: Callable[..., Ctl]) -> None:
    unstorable = {"namespace": "ab", "count": 3, "ago_s": 61.0, "code": "ObjectTooLarge", "text": "too large"}
    status = documents.status(store=documents.store(unstorable=[unstorable]))
    health = {"healthy": False, "problems": ["the ring has 1 of 2 bytes"], "notices": ["slow"]}
    ctl = recorded(StatusQuery=status, HealthQuery=health)
    assert ctl("status").out.splitlines()[2:5] == [
        "PROBLEM     the ring has 1 of 2 bytes",
        "notice      slow",
        "NOT STORED  namespace ab: values 3, the last 1m01s ago: ObjectTooLarge: too large",
    ]
    told = ctl("health", "--json", code=1)
    assert told.err == "tensorctl: unhealthy: the ring has 1 of 2 bytes\ntensorctl: notice: slow\n"
    assert json.loads(told.out) == health


def test_any_figures_and_names_fit_100_columns() -> None:
    huge = {name: 10**15 for name, value in documents.store().items() if type(value) is int}
    large = {figure: 10**15 for figure, value in documents.device(CARD).items() if type(value) is int}
    governor = documents.governor(
        gauges=[documents.gauge("g\x1b" * 32, 10**15, 1, "workflow_aware", stale=True, source="file")],
        devices=[documents.device("d" * 64, **large, stuck="why " * 60)],
    )
    reasons = {f"for the reason {number}": 10**12 for number in range(9)}
    status = documents.status(store={**documents.store(), **huge, "evictions": reasons}, governor=governor, lanes=10**9)
    text = status_text(status, HEALTHY)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "\x1b" not in text
