"""What health says of the governor: everything that somebody has to look at is named, with why."""

from __future__ import annotations

from typing import Any

from tensord.daemon.actors.governor import problems

GAUGE = {"gauge": "card0", "source": "nvidia", "stale": False, "age_s": 8.04}
SOURCE = {"source": "nvidia", "state": "ok", "since_s": 7.5, "why": "", "problem": False}
DEVICE = {"device": "card0", "stuck": ""}
OWNER = {"client": 7, "name": "engine", "pid": 42, "device": "card0", "unresponsive": False}


def status(**changed: dict[str, Any]) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {"gauges": GAUGE, "sources": SOURCE, "devices": DEVICE, "owners": OWNER}
    found = {name: [{**row, **changed.get(name, {})}] for name, row in rows.items()}
    return {**found, "missing_cards": [changed["missing_cards"]] if "missing_cards" in changed else []}


def test_a_healthy_governor_has_no_problems() -> None:
    assert problems(status()) == []


def test_a_gauge_that_cannot_be_read_is_named_with_its_source_and_why() -> None:
    (found,) = problems(status(gauges={"stale": True, "failure": "GPU is lost"}))
    assert found == "gauge card0 cannot be read; its last value, 8.04 s old, is used (nvidia: GPU is lost)"


def test_a_source_that_hangs_or_never_worked_is_named_with_since_when_or_why() -> None:
    (found,) = problems(status(sources={"state": "hanging", "problem": True}))
    assert found == "gauge source nvidia hangs for 7.5 s; its gauges are not read"
    (found,) = problems(status(sources={"state": "failing", "problem": True, "why": "nvidia:0: GPU is lost"}))
    assert found == "gauge source nvidia cannot be read: nvidia:0: GPU is lost"
    assert problems(status(sources={"state": "absent", "why": "no driver"})) == []


def test_a_setting_that_names_a_card_that_is_not_there_is_named() -> None:
    (found,) = problems(status(missing_cards={"setting": "neighbours.servers", "card": "crad0"}))
    assert found == "neighbours.servers names crad0, and no card is called so; name one of `tensorctl status`"


def test_a_device_whose_passes_are_in_vain_and_an_owner_that_does_not_answer_are_named() -> None:
    first, second = problems(status(devices={"stuck": "3 entries left in vain"}, owners={"unresponsive": True}))
    assert first == "device card0: 3 entries left in vain"
    assert "client 7 (engine, pid 42)" in second
