"""The demonstration of three hosts: each photograph comes from where it was encoded, and a wrong one is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cluster
import hosts_network
import pytest
from chat_prefix import Turn
from cluster import Looked


def test_three_hosts_share_the_encodings_of_one_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Not in namespaces of the network: make test-remote has those.
    monkeypatch.setattr(hosts_network, "missing", lambda: "the test asks for no namespaces")
    monkeypatch.setattr("sys.argv", ["cluster.py", "--photographs", "9"])
    assert cluster.main() == 0
    printed = capsys.readouterr().out
    assert "0 wrong" in printed
    assert "3 prompts: " in printed


@pytest.mark.parametrize(("wrong", "fetched"), [(1, 3), (0, 0)])
def test_a_wrong_embedding_or_a_host_that_read_nothing_is_a_failure(wrong: int, fetched: int) -> None:
    status: dict[str, Any] = {"remote": {"fetched": fetched}, "remote_read_bytes": 0, "remote_written_bytes": 0}
    assert cluster.tell(3, [(Looked(encoded=["a"], wrong=wrong), status)]) == 1
    assert cluster.tell(3, [(Looked(encoded=["a"]), {**status, "remote": {"fetched": 1}})]) == 0


def test_an_answer_that_differs_or_a_prompt_that_is_computed_twice_is_a_failure() -> None:
    first = Turn("planner", 100, 0, 120, 120, 1, 1, True, 0.0, 119, "")
    later = Turn("coder", 100, 90, 30, 120, 0, 1, True, 0.0, 119, "")
    assert cluster.tell_turns([first, later]) == 0
    assert cluster.tell_turns([first, replace(later, same_tokens=False)]) == 1
    assert cluster.tell_turns([first, replace(later, matched=0)]) == 1
