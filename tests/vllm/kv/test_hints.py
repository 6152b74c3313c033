"""A request may name its agent: its blocks belong to the agent, and the replacement policy learns of the turn's end."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tensord.ipc import messages

from ...daemon_process import until
from .conftest import BLOCK_TOKENS, KVStand, asked, fresh_text

TURN_ENDED = "its agent's turn has ended"


def known(kv: KVStand, key: bytes) -> tuple[str, list[str]]:
    """The agent of an entry, and the words in which the replacement policy describes the entry."""
    found: dict[str, Any] = kv.daemon.ask(partial(messages.WhyQuery, key=key))
    return found["entry"]["agent"], found["standing"]["like"]


def test_blocks_belong_to_the_requests_agent_whose_turn_ends_with_the_request(kv: KVStand) -> None:
    text = fresh_text()
    right, keys = kv.store(kv.first, text=text, params={"tensord.agent": "planner"})
    assert len(keys) >= len(text) // BLOCK_TOKENS
    assert {known(kv, key)[0] for key in keys} == {"planner"}
    until(lambda: all(TURN_ENDED in known(kv, key)[1] for key in keys), "the policy knows that the turn has ended")
    # The agent is no part of a key.
    answer, computed = asked(kv.second, text=text)
    assert answer == right
    assert computed <= 2 * BLOCK_TOKENS


@pytest.mark.parametrize("name", [None, 7, ["planner"], "x" * 10_000, "\ud800"])
def test_a_request_with_an_invalid_name_is_answered_and_its_blocks_belong_to_no_agent(kv: KVStand, name: Any) -> None:
    text = fresh_text()
    answer, keys = kv.store(kv.first, text=text, params={"tensord.agent": name})
    assert answer == kv.plain.generate(text=text)
    assert {known(kv, key)[0] for key in keys} == {""}
    assert "tensord.agent in kv_transfer_params is" in kv.first.log
