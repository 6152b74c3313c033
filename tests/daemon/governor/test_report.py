"""Status: every field that is promised, and what stands in it; and what health says of the governor."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tensord.daemon.actors.governor import problems
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.modes import HOST_GAUGE

from ...client.ctl import documents
from .stand import GPU, MIB, TOTAL, with_clients


def test_status_shows_gauges_devices_owners_and_workflows() -> None:
    stand = with_clients(max_bytes=500 * MIB, block_bytes=10 * MIB)
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
    shown = {"source": "test", "age_s": 1.0}
    assert status["gauges"] == [
        documents.gauge(HOST_GAUGE, 500 * MIB, TOTAL, "relaxed", **shown, since_s=1.0, psi_some_s=0.25),
        documents.gauge(GPU, 930 * MIB, TOTAL, "critical", **shown, since_s=2.0),
    ]
    device = status["devices"][0]
    assert device["floor_blocks"] > 0
    entries = {"entries": 2, "bytes": 50 * MIB, "tokens": 12, "ordered_entries": 1, "ordered_bytes": 30 * MIB}
    blocks = {"capacity_blocks": 50, "floor_blocks": device["floor_blocks"]}
    assert device == documents.device(GPU, **entries, **blocks, reserved_bytes=3 * MIB)
    owner = {"name": "client 1", "pid": 4001, "device": GPU, "entries": 1, "bytes": 30 * MIB, "ordered_entries": 1}
    assert status["owners"][0] == documents.owner(1, **owner)
    assert status["workflows"] == [{"workflow": "w", "client": 2, "step": 1, "agents": 2, "steps": 2}]
    assert status["host"] == {"resident_bytes": 8 * MIB, "wanted_bytes": 9 * MIB, "resident_bytes_max": None}
    assert status["reservations"] == 1 and status["remembered"] == 0
    assert status["counters"]["registered"] == 2 and status["counters"]["refused"] == {}
    levels = {"normal": 0.70, "pressure": 0.85, "critical": 0.92, "emergency": 0.96}
    assert status["thresholds"] == levels | {"hysteresis": 0.02}


GAUGE = {"gauge": "card0", "source": "nvidia", "stale": False, "age_s": 8.04}
SOURCE = {"source": "nvidia", "state": "ok", "since_s": 7.5, "why": "", "problem": False}
DEVICE = {"device": "card0", "stuck": ""}
OWNER = {"client": 7, "name": "engine", "pid": 42, "device": "card0", "unresponsive": False}


def status(**changed: dict[str, Any]) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {"gauges": GAUGE, "sources": SOURCE, "devices": DEVICE, "owners": OWNER}
    found = {name: [{**row, **changed.get(name, {})}] for name, row in rows.items()}
    return {**found, "missing_cards": [changed["missing_cards"]] if "missing_cards" in changed else []}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        (
            {"gauges": {"stale": True, "failure": "GPU is lost"}},
            ["gauge card0 cannot be read; its last value, 8.04 s old, is used (nvidia: GPU is lost)"],
        ),
        (
            {"sources": {"state": "hanging", "problem": True}},
            ["gauge source nvidia hangs for 7.5 s; its gauges are not read"],
        ),
        (
            {"sources": {"state": "failing", "problem": True, "why": "nvidia:0: GPU is lost"}},
            ["gauge source nvidia cannot be read: nvidia:0: GPU is lost"],
        ),
        ({"sources": {"state": "absent", "why": "no driver"}}, []),
        (
            {"missing_cards": {"setting": "neighbours.servers", "card": "crad0"}},
            ["neighbours.servers names crad0, and no card is called so; name one of `tensorctl status`"],
        ),
        (
            {"devices": {"stuck": "3 entries left in vain"}, "owners": {"unresponsive": True}},
            ["device card0: 3 entries left in vain", "client 7 (engine, pid 42) does not carry out orders for card0"],
        ),
    ],
)
def test_everything_that_somebody_has_to_look_at_is_named_with_why(changed: dict[str, Any], said: list[str]) -> None:
    assert problems(status(**changed)) == said
