"""The demonstration of three hosts: each photograph comes from where it was encoded."""

from __future__ import annotations

import cluster
import hosts_network
import pytest


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
