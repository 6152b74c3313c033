"""A request may name its agent: its blocks belong to it, and the replacement policy learns of its turns and its end."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tensord.client.vllm.kv import hints
from tensord.ipc.messages import control as messages

from ...daemon_process import until
from .conftest import BLOCK_TOKENS, KVStand, asked, fresh_text

RUNS, TURN_ENDED, FINISHED = "its agent runs", "its agent's turn has ended", "its agent has finished"


def known(kv: KVStand, key: bytes) -> tuple[str, list[str]]:
    """The agent of an entry, and the words in which the replacement policy describes the entry."""
    found: dict[str, Any] = kv.daemon.ask(partial(messages.WhyQuery, key=key))
    return found["entry"]["agent"], found["standing"]["like"]


def described(kv: KVStand, keys: set[bytes], words: str) -> None:
    """Returns when the policy describes all these entries so."""
    until(lambda: all(words in known(kv, key)[1] for key in keys), f"the policy knows: {words}")


def turn(agent: Any, **more: Any) -> dict[str, Any]:
    """The kv_transfer_params of a request of the agent."""
    return {"tensord.agent": agent, **more}


@pytest.mark.parametrize("about", [{"params": {"tensord.agent": "planner"}}, {"session": "planner"}], ids=str)
def test_blocks_belong_to_the_requests_agent_whose_turn_ends_with_the_request(
    kv: KVStand, about: dict[str, Any]
) -> None:
    """Named by kv_transfer_params or by vLLM's session_id."""
    text = fresh_text()
    right, keys = kv.store(kv.first, text=text, **about)
    assert len(keys) >= len(text) // BLOCK_TOKENS
    assert {known(kv, key)[0] for key in keys} == {"planner"}
    described(kv, keys, TURN_ENDED)
    # The agent is no part of a key.
    answer, computed = asked(kv.second, text=text)
    assert answer == right
    assert computed <= 2 * BLOCK_TOKENS


def test_an_agent_ends_with_the_request_that_says_so_and_runs_again_with_its_next_request(kv: KVStand) -> None:
    text = fresh_text()
    right, keys = kv.store(kv.first, text=text, params=turn("comes back", **{"tensord.agent_ends": True}))
    described(kv, keys, FINISHED)
    kv.second.add(text=text, params=turn("comes back"))
    described(kv, keys, RUNS)
    until(lambda: right in kv.second.step().values(), "the answer")
    kv.settled(kv.second)
    described(kv, keys, TURN_ENDED)


def test_a_turn_ends_with_the_last_of_an_agents_requests_and_the_agent_with_it(kv: KVStand) -> None:
    _, keys = kv.store(kv.first, text=fresh_text(), params=turn("many"))
    described(kv, keys, TURN_ENDED)
    ending = kv.first.add(text=fresh_text(), tokens=1, params=turn("many", **{"tensord.agent_ends": True}))
    lasting = kv.first.add(text=fresh_text(), tokens=64, params=turn("many"))
    until(lambda: ending in kv.first.step(), "the first of them ends")
    _, other = kv.store(kv.second, text=fresh_text(), params=turn("witness"))
    described(kv, other, TURN_ENDED)
    assert all(TURN_ENDED in known(kv, key)[1] for key in keys), "it ended while a request of it was running"
    until(lambda: lasting in kv.first.step(), "the last of them ends")
    kv.settled(kv.first)
    described(kv, keys, FINISHED)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"params": turn(7)}, "tensord.agent in kv_transfer_params is"),
        ({"params": turn("x" * 10_000)}, "tensord.agent in kv_transfer_params is"),
        ({"params": turn("\ud800")}, "tensord.agent in kv_transfer_params is"),
        ({"params": turn("", **{"tensord.agent_ends": "yes"})}, "tensord.agent_ends in kv_transfer_params is 'yes'"),
        ({"params": {"tensord.agent_ends": True}}, "tensord.agent_ends in kv_transfer_params is 'True'"),
        ({"params": {"tensord.agent_end": True}}, "'tensord.agent_end' in kv_transfer_params is unknown"),
        ({"session_id": "s" * 500}, "session_id"),
    ],
)
def test_an_invalid_hint_is_logged_once_and_names_no_agent(
    about: Any, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hints, "_warned", set())
    for _ in range(2):
        assert hints.hints_of(about.get("params"), about.get("session_id")).agent == ""
    assert caplog.text.count(f"tensord: {said}") == 1


@pytest.mark.parametrize(("tiers", "loads"), [([{"medium": "STORAGE"}], False), ([{"medium": "CPU"}], True)])
def test_vllms_kv_load_tiers_decide_whether_a_request_loads(kv: KVStand, tiers: Any, loads: bool) -> None:
    text = fresh_text()
    right, _ = kv.store(kv.first, text=text)
    answer, computed = asked(kv.second, text=text, params={"kv_load_tiers": tiers})
    assert answer == right
    assert (computed <= 2 * BLOCK_TOKENS) == loads
