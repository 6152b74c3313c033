"""Status: every field that is promised, and what stands in it."""

from __future__ import annotations

import json

from tensord.ipc.messages import control as messages
from tensord.ipc.messages.modes import HOST_GAUGE

from .stand import GPU, MIB, TOTAL, Make


def test_devices_are_listed_by_name_after_the_host_whichever_was_found_first(make: Make) -> None:
    stand = make()
    for gauge in ("b", "a", HOST_GAUGE):
        stand.sample(0.5, gauge)
    stand.lose("a")
    stand.sample(0.5, "a")
    assert [row["gauge"] for row in stand.status()["gauges"]] == [HOST_GAUGE, "a", "b"]


def test_status_shows_gauges_devices_owners_and_workflows(make: Make) -> None:
    stand = make(max_bytes=500 * MIB, block_bytes=10 * MIB)
    stand.open(1, 2)
    stand.register(1, 1, 30 * MIB, tokens=7)
    stand.register(2, 2, 20 * MIB, tokens=5)
    stand.sample(0.93)
    stand.sample(0.5, HOST_GAUGE, psi_some_s=0.25)
    stand.ask(1, messages.ReserveDevice, GPU, 3 * MIB, 10.0)
    stand.ask(2, messages.RegisterWorkflow, "w", [messages.AgentStep("a"), messages.AgentStep("b", ("a",), 1)])
    stand.ask(2, messages.AdvanceWorkflow, "w", 1)
    stand.holds(8 * MIB, 9 * MIB)
    for _ in range(10):
        stand.say(1, messages.RequestsArrived(GPU, 1))
        stand.say(1, messages.RequestCompleted(GPU, 0.5, 3))
    stand.now += 1
    stand.holds(8 * MIB, 9 * MIB)
    status = stand.status()
    assert json.loads(json.dumps(status)) == status
    device = {
        "gauge": GPU,
        "tier": "device",
        "source": "test",
        "used_bytes": 930 * MIB,
        "total_bytes": TOTAL,
        "baseline_bytes": 0,
        "share": 0.93,
        "mode": "critical",
        "level": "critical",
        "stale": False,
        "age_s": 1.0,
        "since_s": 2.0,
        "refuses": False,
    }
    host = {"gauge": HOST_GAUGE, "tier": "host", "used_bytes": 500 * MIB, "share": 0.5, "psi_some_s": 0.25}
    host |= {"mode": "relaxed", "level": "relaxed", "since_s": 1.0}
    assert status["gauges"] == [device | host, device]
    device = status["devices"][0]
    assert device.pop("floor_blocks") > 0
    assert device == {
        "device": GPU,
        "entries": 2,
        "bytes": 50 * MIB,
        "tokens": 12,
        "ordered_entries": 1,
        "ordered_bytes": 30 * MIB,
        "owners": 2,
        "stuck": "",
        "reserved_bytes": 3 * MIB,
        "waiting_reservations": 0,
        "waiting_bytes": 0,
        "capacity_blocks": 50,
    }
    assert status["owners"][0] == {
        "client": 1,
        "name": "client 1",
        "pid": 4001,
        "device": GPU,
        "entries": 1,
        "bytes": 30 * MIB,
        "ordered_entries": 1,
        "unresponsive": False,
    }
    assert status["workflows"] == [{"workflow": "w", "client": 2, "step": 1, "agents": 2, "steps": 2}]
    assert status["host"] == {"resident_bytes": 8 * MIB, "wanted_bytes": 9 * MIB, "resident_bytes_max": None}
    assert status["reservations"] == 1 and status["remembered"] == 0
    assert status["counters"]["registered"] == 2 and status["counters"]["refused"] == {}
    levels = {"normal": 0.70, "pressure": 0.85, "critical": 0.92, "emergency": 0.96}
    assert status["thresholds"] == levels | {"hysteresis": 0.02}


def test_a_device_of_which_only_reservations_or_requests_are_known_is_shown(make: Make) -> None:
    stand = make()
    stand.sample(0.5)
    stand.ask(1, messages.ReserveDevice, GPU, MIB, 10.0)
    stand.sample(0.5, "other")
    stand.say(1, messages.RequestsArrived("other", 1))
    assert [(row["device"], row["entries"], row["reserved_bytes"]) for row in stand.status()["devices"]] == [
        (GPU, 0, MIB),
        ("other", 0, 0),
    ]
