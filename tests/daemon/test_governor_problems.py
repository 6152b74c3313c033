"""What health says of the governor: everything that somebody has to look at is named, with why."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.actors.governor import problems

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
            [
                "device card0: 3 entries left in vain",
                "client 7 (engine, pid 42) does not carry out orders for card0",
            ],
        ),
    ],
)
def test_everything_that_somebody_has_to_look_at_is_named_with_why(changed: dict[str, Any], said: list[str]) -> None:
    assert problems(status(**changed)) == said
