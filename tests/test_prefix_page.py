"""The table of limits of docs/prefix_cache.md has every limit that a user of cached sequences may run into."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tensord.client.prefix import put as prefix_put
from tensord.client.prefix import tokens as prefix_tokens
from tensord.daemon.config.config import Config
from tensord.daemon.config.settings import settings_of
from tensord.daemon.prefix import blocks, index, matching, nodes, query, snapshots, trees
from tensord.ipc.messages import schema
from tensord.shm.payloads import prefix
from tensord.shm.ring import layout

TABLE = (Path(__file__).parents[1] / "docs" / "prefix_cache.md").read_text().split("## Bad input")[1].split("\n## ")[0]
SETTINGS = {key: default for key, _, default in settings_of(Config) if key.startswith("limits.prefix_")}
LIMITS: dict[str, tuple[Any, str]] = {
    "BLOCK_TOKENS_MIN": (prefix.BLOCK_TOKENS_MIN, "`block_tokens`"),
    "BLOCK_TOKENS_MAX": (prefix.BLOCK_TOKENS_MAX, "`block_tokens`"),
    "MEDIA_MAX": (prefix.MEDIA_MAX, "one sequence"),
    "BLOCKS_MAX": (schema.BLOCKS_MAX, "one sequence"),
    "prefix_tokens_max": (SETTINGS["limits.prefix_tokens_max"], "one sequence"),
    "LAYOUTS_MAX": (trees.LAYOUTS_MAX, "one namespace"),
    "LANE_WORDS": (layout.LANE_WORDS, "what a client holds at once"),
    "prefix_wait_s": (SETTINGS["limits.prefix_wait_s"], "after a restart"),
}
NO_LIMITS = {
    "RECORD_BYTES_MAX": "follows from the others",
    "TOKEN_MAX": "said of tokens, as 2³² − 1",
    "REPEATS_MAX": "said of puts that lose a race",
    "LOOKS_MAX": "bounds work",
    "USES_MAX": "bounds memory",
    "PATH_MAX": "bounds work",
    "HELD_TOKENS_MAX": "bounds memory",
    "TREES_MAX": "numbers of 16 bits; its refusal says all",
}
MODULES = (prefix, blocks, index, matching, nodes, query, snapshots, trees, prefix_put, prefix_tokens)


@pytest.mark.parametrize("name", list(LIMITS))
def test_each_limit_stands_in_the_table_as_it_is(name: str) -> None:
    value, of = LIMITS[name]
    row = next(line for line in TABLE.splitlines() if line.startswith(f"| {of} |"))
    # Tokens a block are written without a comma, as they are typed.
    written = {f"{value:,}", str(value), f"{value:g}"}
    assert written & set(re.findall(r"[\d,]*\d", row)), row


def test_no_limit_of_cached_sequences_is_missing_from_the_table() -> None:
    names = {name for module in MODULES for name in vars(module) if re.fullmatch(r"[A-Z][A-Z_]*_MAX", name)}
    own = {name for module in MODULES for name in re.findall(r"^([A-Z][A-Z_]*_MAX): Final", source(module), re.M)}
    assert own <= names
    assert own - NO_LIMITS.keys() <= LIMITS.keys(), "a limit that the page does not have"
    assert {key.removeprefix("limits.") for key in SETTINGS} <= LIMITS.keys()


def source(module: object) -> str:
    return Path(str(vars(module)["__file__"])).read_text()
