"""The demonstration of a card that fills up: it shows what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pressure
from pressure import Seen


def test_three_processes_give_memory_back_offload_first_and_get_every_tensor_back(tmp_path: Path) -> None:
    told = tmp_path / "seen.json"
    assert pressure.main(["--json", str(told)]) == 0
    seen = Seen(**json.loads(told.read_text()))
    assert seen.failures == []
    assert seen.offloaded > 0
    assert seen.fetched == 48
