"""The soak: a short one finds nothing, and what is made wrong or lost behind its workers' backs is reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soak
from soaking.host import Host
from soaking.ledger import STORED, namespace

import tensord

from ..daemon_process import until


def test_a_short_soak_with_kills_finds_nothing_and_says_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "soak.json"
    status = soak.main(["--minutes", "0.1", "--seed", "2", "--json", str(path)])
    report = json.loads(path.read_text())
    assert (status, report["ok"]) == (0, True), report
    assert report["kills"] and report["payloads_checked"]
    assert not any(amount for leaked in report["leaked"].values() for amount in leaked.values())
    assert json.loads(capsys.readouterr().out) == report


def test_an_entry_that_is_gone_and_one_that_is_another_are_reported() -> None:
    with Host("test", 64 << 20, 1, seed=3, lossy=False) as host:
        [ledger] = host.ledgers

        def is_reported() -> bool:
            for row in ledger.rows:
                if row[1] == STORED:
                    key = ledger.key(int(row[0]))
                    host.client.evict(key)
                    if row[0] % 2:
                        host.client.put(key, np.zeros(64, np.uint64))
            return host.counted()["lost"] > 0 and host.counted()["wrong"] > 0

        until(is_reported, "both to be reported")
        assert {fault.partition(":")[0] for fault in host.faults()} == {"lost", "wrong"}
        assert not host.ended_by_itself()


def test_every_leak_of_a_worker_is_reported() -> None:
    with (
        Host("test", 64 << 20, 0, seed=3, lossy=False) as host,
        tensord.Client(host.folder / "control.sock") as left_over,
    ):
        assert left_over.put(bytes(31) + b"e", np.zeros(64, np.uint64), wait=True).state == "stored"
        lease, claim = left_over.get(bytes(31) + b"e"), left_over.claim(bytes(31) + b"c")
        assert lease is not None
        until(lambda: claim.state == "compute", "the claim")
        # A query has an inbox.
        sequences = tensord.PrefixCache(left_over, namespace(1), block_tokens=16)
        sequences.put(range(32), [tensord.NormalLayer(np.zeros((32, 1), np.uint8))], wait=True)
        assert sequences.match(range(33)) is not None
        leaked = host.leaked(patience_s=0.1)
        lease.release()
    assert {name for name, amount in leaked.items() if amount} == leaked.keys()
