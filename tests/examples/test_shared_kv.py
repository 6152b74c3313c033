"""The demonstration of a shared prompt in transformers: it shows what went wrong. tests/transformers runs it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import shared_kv
import tiny_decoder
from conversation import SYSTEM
from shared_kv import Answer

SYSTEM_TOKENS = 1 + len(tiny_decoder.tokens_of(SYSTEM))
PROMPT = SYSTEM_TOKENS + 40
GOOD = [
    Answer("planner", PROMPT, 0, PROMPT, True, "…", []),
    Answer("coder", PROMPT, SYSTEM_TOKENS, 40, True, "…", []),
    Answer("planner", PROMPT + 60, PROMPT + 20, 40, True, "…", []),
    Answer("coder", PROMPT + 60, PROMPT + 20, 40, True, "…", []),
]


@pytest.mark.parametrize(
    ("at", "wrong", "said"),
    [
        (1, {"same": False}, "coder: the answer differs"),
        (0, {"found": 7}, "planner found 7 tokens in an empty cache"),
        (1, {"found": SYSTEM_TOKENS - 1}, "tokens of a system prompt of"),
        (2, {"found": PROMPT - 1}, "fewer than its own prompt"),
        (3, {"reasons": ["a reason"]}, "coder: a reason"),
    ],
)
def test_a_wrong_answer_or_a_missed_prefix_is_a_failure(at: int, wrong: dict[str, object], said: str) -> None:
    answers = [*GOOD[:at], replace(GOOD[at], **wrong), *GOOD[at + 1 :]]  # type: ignore[arg-type]
    (failure,) = shared_kv.failures(answers)
    assert said in failure


def test_without_transformers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiny_decoder, "best_kind", lambda: "torch")
    assert shared_kv.main([]) == 2
    assert "pip install '.[transformers]'" in capsys.readouterr().err
