"""What a run of the benchmark gives: rows of every peer, in the form that is written down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self, get_args

import harness
import pytest
from harness import SIZES, Row
from peers import PUT_OPS, READ_OPS, Op

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


def test_the_json_is_a_list_of_rows(rows: list[Row], tmp_path: Path) -> None:
    harness.write_json(tmp_path / "rows.json", rows)
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [Row(**row) for row in written] == rows
    assert {*written[0]} == {"peer", "op", "bytes", "median_us", "p99_us"}


def test_the_table_has_a_line_for_each_operation_and_size(rows: list[Row]) -> None:
    lines = harness.rows_table(rows, ["copy", "lmdb"]).splitlines()
    assert lines[0].split()[-2:] == ["copy", "lmdb"]
    assert [line.split()[:2] for line in lines if line.startswith("copy")] == [
        ["copy", "64K"],
        ["copy", "1M"],
    ]
    assert len(lines) == 2 + len({(row.op, row.bytes) for row in rows})


def test_each_operation_has_a_line_of_the_table() -> None:
    rows = [Row("tensord", op, SIZES["64K"], 1.0, 2.0) for op in get_args(Op)]
    lines = harness.rows_table(rows, ["tensord"]).splitlines()
    assert [line.split()[0] for line in lines[2:]] == [*get_args(Op)]


def test_a_row_is_of_all_samples_together() -> None:
    samples = [float(n) for n in range(1000, 102_000, 1000)]
    assert harness._row("lmdb", "get", 64, samples) == Row("lmdb", "get", 64, 51.0, 100.0)


class _Fake:
    """Stands for a running peer: keeps what it is asked, and its samples are how often it was."""

    asked: ClassVar[list[tuple[str, str, int]]] = []

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.ops = name, ("get", "get_consume", "put_return")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.asked.append((self.name, "end", 0))

    def warm(self, sizes: Sequence[int]) -> None:
        self.asked.append((self.name, "warm", sum(sizes)))

    def prepare_reads(self, value_bytes: int) -> None:
        self.asked.append((self.name, "prepare", value_bytes))

    def prepare_puts(self, value_bytes: int) -> None:
        self.asked.append((self.name, "prepare", value_bytes))

    def measure(self, op: str, value_bytes: int, calls: int, seconds: float) -> list[float]:
        self.asked.append((self.name, op, value_bytes))
        return [1000.0 * self.asked.count(self.asked[-1])]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    monkeypatch.setattr(harness, "RunningPeer", _Fake)
    monkeypatch.setattr(_Fake, "asked", [])
    return _Fake.asked


def test_a_row_is_of_all_rounds(asked: list[tuple[str, str, int]]) -> None:
    rows = harness.run(["a", "b"], [SIZES["64K"]], rounds=3, seconds=1)
    assert {row.median_us for row in rows} == {2.0}
    assert len(rows) == 6


def test_peers_meet_each_operation_side_by_side_after_warming_and_preparing(
    asked: list[tuple[str, str, int]],
) -> None:
    harness.run(["a", "b"], [SIZES["64K"], SIZES["1M"]], rounds=8, seconds=1)
    both = SIZES["64K"] + SIZES["1M"]
    assert asked[:2] == [("a", "warm", both), ("b", "warm", both)]
    assert sorted(asked[-2:]) == [("a", "end", 0), ("b", "end", 0)]
    measured = [one for one in asked[2:-2] if one[1] != "prepare"]
    pairs = [*zip(measured[::2], measured[1::2], strict=True)]
    assert all(first[1:] == second[1:] and first[0] != second[0] for first, second in pairs)
    assert {first[0] for first, _ in pairs} == {"a", "b"}
    for number, (name, what, size) in enumerate(asked):
        if what in ("get", "put_return"):
            assert asked[number - 1] == (name, "prepare", size)


def test_a_worker_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    with harness.RunningPeer("copy", tmp_path / "copy") as peer:
        with pytest.raises(harness.PeerFailed, match=r"copy's writer: \w+Error: .*nonsense"):
            peer._workers["writer"].do("nonsense")
        assert peer.measure("copy", SIZES["64K"], 3, 1)


def test_a_worker_that_ends_is_named_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 7\n")
    script.chmod(0o755)
    worker = harness.Worker(str(script), "copy", "writer", tmp_path / "gone")
    with pytest.raises(harness.PeerFailed, match="copy's writer ended with exit code 7"):
        worker.ready()
    worker.close()
