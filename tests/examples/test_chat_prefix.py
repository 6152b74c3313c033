"""The demonstration of a shared prefix: what is continued says what it would have said from nothing."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import chat_prefix
import pytest
import tiny_decoder
from conversation import AGENTS, Conversation, draw
from tiny_decoder import AGENT, BEGIN, PICTURE, PICTURE_TOKENS, Keys

PROMPT, AT = 200, 101


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


def _asked(picture: int = 0) -> Conversation:
    """A short one, of PROMPT tokens with the picture at AT."""
    before = tiny_decoder.tokens_of("Say what you see, in a word or in two. " * 3)[: AT - 1]
    asked = tiny_decoder.tokens_of("How many rings are there in it?" * 2)[: PROMPT - AT - PICTURE_TOKENS - 1]
    return Conversation([BEGIN, *before, *[PICTURE] * PICTURE_TOKENS, *asked, AGENT], AT, draw(picture))


@pytest.fixture(scope="module")
def said() -> chat_prefix.Generated:
    return chat_prefix.generate(tiny_decoder.decoder("numpy"), _asked(), [], 0)


@pytest.mark.parametrize("cut", [1, AT - 1, AT, AT + PICTURE_TOKENS, AT + PICTURE_TOKENS + 5])
def test_going_on_from_a_token_says_the_same(said: chat_prefix.Generated, cut: int) -> None:
    past: Keys = [(key[:, :cut], value[:, :cut]) for key, value in said.keys]
    again = chat_prefix.generate(tiny_decoder.decoder("numpy"), _asked(), past, cut)
    assert again.tokens == said.tokens
    assert chat_prefix.difference(again.keys, said.keys) < chat_prefix.DIFFERENCE_MAX
    assert again.computed == said.computed - cut
    assert again.pictures == (cut <= AT)


def test_a_changed_prefix_changes_the_generated_tokens(said: chat_prefix.Generated) -> None:
    # so that wrong keys and values would show
    past: Keys = [(key[:, 1:101], value[:, 1:101]) for key, value in said.keys]
    wrong = chat_prefix.generate(tiny_decoder.decoder("numpy"), _asked(), past, 100)
    assert wrong.tokens != said.tokens
    assert chat_prefix.difference(wrong.keys, said.keys) > chat_prefix.DIFFERENCE_MAX


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_on_torch_it_is_the_same_model(said: chat_prefix.Generated) -> None:
    generated = chat_prefix.generate(tiny_decoder.decoder("torch"), _asked(), [], 0)
    assert generated.tokens == said.tokens
    assert chat_prefix.difference(generated.keys, said.keys) < chat_prefix.DIFFERENCE_MAX
