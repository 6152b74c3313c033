"""The demonstration of engines on three hosts shows what went wrong. tests/vllm runs it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny_decoder
from cluster_engines import BLOCK_TOKENS, Asked, tell
from conversation import SYSTEM

SYSTEM_TOKENS = 1 + len(tiny_decoder.tokens_of(SYSTEM))
PROMPT = SYSTEM_TOKENS + 40
BLOCKS = SYSTEM_TOKENS // BLOCK_TOKENS
GOOD = [Asked(PROMPT, PROMPT, 8, 0, True), *[Asked(PROMPT, PROMPT - BLOCKS * BLOCK_TOKENS, 8, BLOCKS, True)] * 2]


def test_hosts_that_compute_their_own_questions_only_are_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell(GOOD) == 0
    assert f"{3 * PROMPT} without tensord" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [{"same": False}, {"first": PROMPT}, {"fetched": 0}])
def test_a_wrong_answer_or_a_prompt_that_is_computed_twice_is_a_failure(wrong: dict[str, int]) -> None:
    assert tell([*GOOD[:2], replace(GOOD[2], **wrong)]) == 1  # type: ignore[arg-type]
