"""The table of limits of docs/prefix_cache.md has the limits as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tensord.daemon.config.config import SETTINGS
from tensord.daemon.prefix import trees
from tensord.ipc.messages import schema
from tensord.shm.payloads import prefix
from tensord.shm.ring import layout

TABLE = (Path(__file__).parents[1] / "docs" / "prefix_cache.md").read_text().split("## Bad input")[1].split("\n## ")[0]
LIMITS: dict[str, tuple[Any, str]] = {
    "BLOCK_TOKENS_MIN": (prefix.BLOCK_TOKENS_MIN, "`block_tokens`"),
    "BLOCK_TOKENS_MAX": (prefix.BLOCK_TOKENS_MAX, "`block_tokens`"),
    "MEDIA_MAX": (prefix.MEDIA_MAX, "one sequence"),
    "BLOCKS_MAX": (schema.BLOCKS_MAX, "one sequence"),
    "prefix_tokens_max": (SETTINGS["limits.prefix_tokens_max"].default, "one sequence"),
    "LAYOUTS_MAX": (trees.LAYOUTS_MAX, "one namespace"),
    "LANE_WORDS": (layout.LANE_WORDS, "what a client holds at once"),
    "prefix_wait_s": (SETTINGS["limits.prefix_wait_s"].default, "after a restart"),
}


@pytest.mark.parametrize("name", list(LIMITS))
def test_each_limit_stands_in_the_table_as_it_is(name: str) -> None:
    value, of = LIMITS[name]
    row = next(line for line in TABLE.splitlines() if line.startswith(f"| {of} |"))
    # Tokens a block are written without a comma, as they are typed.
    written = {f"{value:,}", str(value), f"{value:g}"}
    assert written & set(re.findall(r"[\d,]*\d", row)), row
