"""The demonstration of a shared prefix: what is continued says what it would have said from nothing."""

from __future__ import annotations

import json
from pathlib import Path

import chat_prefix
from conversation import AGENTS


def test_three_agents_continue_from_each_others_prefix_and_say_what_they_would_have_said(tmp_path: Path) -> None:
    told = tmp_path / "seen.json"
    assert chat_prefix.main(["--model", "numpy", "--json", str(told)]) == 0
    seen = json.loads(told.read_text())
    turns = [*seen["first"], *seen["follow_up"], *seen["other_picture"]]
    assert len(turns) == 2 * len(AGENTS) + 1
    assert all(turn["same_tokens"] for turn in turns)
    assert seen["computed"] * 3 < seen["computed_without"] == sum(turn["computed_without"] for turn in turns)
    assert (seen["pictures"], seen["pictures_without"]) == (2, len(turns))
    assert [turn["matched"] for turn in seen["other_picture"]] == [seen["picture_at"]]
