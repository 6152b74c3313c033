"""What a run of the benchmark gives: rows of every peer, in the form that is written down."""

from __future__ import annotations

from pathlib import Path

import pytest
from peers import PUT_OPS, READ_OPS, harness
from peers.harness import SIZES, Row

pytest.importorskip("lmdb")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return harness.run(["copy", "lmdb"], [SIZES["64K"], SIZES["1M"]], rounds=1, seconds=0.01)


def test_every_peer_is_measured_in_each_of_its_operations_and_sizes(rows: list[Row]) -> None:
    batches = {op for op in READ_OPS if op.startswith("get_many")}
    wanted = {("copy", "copy", size) for size in (SIZES["64K"], SIZES["1M"])}
    wanted |= {("lmdb", op, SIZES["64K"]) for op in (*READ_OPS, *PUT_OPS)}
    wanted |= {("lmdb", op, SIZES["1M"]) for op in {*READ_OPS, *PUT_OPS} - batches}
    assert {(row.peer, row.op, row.bytes) for row in rows} == wanted
    assert len(rows) == len(wanted)
    for row in rows:
        assert 0 < row.median_us <= row.p99_us, row


def test_the_table_has_a_line_for_each_operation_and_size(rows: list[Row]) -> None:
    lines = harness.rows_table(rows, ["copy", "lmdb"]).splitlines()
    assert lines[0].split()[-2:] == ["copy", "lmdb"]
    assert [line.split()[:2] for line in lines if line.startswith("copy")] == [
        ["copy", "64K"],
        ["copy", "1M"],
    ]
    assert len(lines) == 2 + len({(row.op, row.bytes) for row in rows})


def test_a_worker_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    with harness.RunningPeer("copy", tmp_path / "copy") as peer:
        with pytest.raises(harness.PeerFailed, match=r"copy's writer: \w+Error: .*nonsense"):
            peer._workers["writer"].do("nonsense")
        assert peer.measure("copy", SIZES["64K"], 3, 1)
