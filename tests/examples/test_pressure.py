"""The demonstration of a card that fills up: it shows what it says, and fails where it could not."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pressure
import pytest
from pressure import Seen

GOOD = Seen(
    modes=["normal", "pressure", "workflow_aware", "critical", "emergency", "relaxed"],
    offloaded=3,
    dropped=2,
    finished_went_first=True,
    refused_in_emergency=True,
    accepted_afterwards=True,
    fetched=3,
)


def test_three_processes_give_memory_back_offload_first_and_get_every_tensor_back(tmp_path: Path) -> None:
    told = tmp_path / "seen.json"
    assert pressure.main(["--json", str(told)]) == 0
    seen = Seen(**json.loads(told.read_text()))
    assert seen.failures == []
    assert seen.offloaded > 0
    assert seen.fetched == 48


@pytest.mark.parametrize("change", [
    {"modes": ["normal", "pressure", "workflow_aware", "emergency", "relaxed"]},
    {"modes": ["relaxed", "normal", "pressure", "workflow_aware", "critical", "emergency"]},
    {"offloaded": 0},
    {"dropped": 0},
    {"dropped_before_host_was_full": 1},
    {"finished_went_first": False},
    {"refused_in_emergency": False},
    {"accepted_afterwards": False},
    {"fetched": 0},
    {"wrong": 1},
])  # fmt: skip
def test_each_thing_that_was_not_seen_is_named(change: dict[str, object]) -> None:
    assert set(change) <= {each.name for each in fields(Seen)}
    assert len(replace(GOOD, **change).failures) == 1  # type: ignore[arg-type]
