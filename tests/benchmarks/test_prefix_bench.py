"""What the prefix cache's benchmark rests on: blocks that are what they say, a scan, rows of every operation."""

from __future__ import annotations

import json
from pathlib import Path

import prefix
import pytest
from forest import LONGEST, SHORTEST, Forest
from prefix import BARS_US, CALLS, Bench, IndexedRows, Row

from tensord.shm.payloads.prefix import PrefixRecord

SEQUENCES = 40


def test_a_run_measures_every_operation_and_stands_by_its_bars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "CALLS", dict.fromkeys(CALLS, 2))
    told = tmp_path / "rows.json"
    flags = ["--sequences", str(SEQUENCES), "--client-sequences", "3", "--rounds", "1", "--json", str(told)]
    assert prefix.main(flags) == 0
    rows = [Row(**row) for row in json.loads(told.read_text())]
    assert [row.op for row in rows] == [*CALLS]
    for row in rows:
        assert 0 < row.median_us <= row.p95_us, row
        assert row.sequences == (3 if row.op.startswith("client") else SEQUENCES)
    printed = capsys.readouterr().out
    assert "not measured" not in printed
    assert all(f"{op}, median" in printed for op in BARS_US)


def test_blocks_are_cut_and_chained_as_they_say_and_another_answer_than_the_scans_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forest = Forest(SEQUENCES, seed=3)
    index = IndexedRows(forest, 2 * forest.block_count)
    known: dict[bytes, PrefixRecord] = {}
    for number in range(SEQUENCES):
        length = len(forest.sequence(number))
        assert SHORTEST <= length <= LONGEST
        for key, record, at in forest.blocks(number):
            index.add((key, record, at))
            text = forest.sequence(number)[record.start : record.start + record.count]
            assert forest.memory[at : at + 4 * record.count] == text.tobytes()
            if record.parent is not None:
                before = known[record.parent]
                assert before.start + before.count == record.start and before.count == record.block_tokens
            known[key] = record
        path = [known[forest.key(number, block)] for block in range(-(-length // forest.block_tokens))]
        assert sum(record.count for record in path) == length
    assert len(index) == len(known) == forest.block_count
    assert sum(record.count for record in known.values()) < forest.tokens * 7 / 8  # the others are shared
    Bench(forest, index).round()
    monkeypatch.setattr(prefix, "scan", lambda *_: 3)
    with pytest.raises(RuntimeError, match="the scan 3"):
        Bench(forest, index).round()
