"""What the prefix cache's benchmark rests on: blocks that are what they say, a scan, rows of every operation."""

from __future__ import annotations

import json
from pathlib import Path

import prefix
import pytest
from prefix import BARS_US, CALLS, Bench, Row
from sequences.forest import LONGEST, SHORTEST, TAG, Forest
from sequences.rows import IndexedRows

from tensord.shm.payloads.prefix import MEDIA_BYTES, PrefixRecord, packed_media

SEQUENCES = 40


@pytest.fixture(scope="module")
def forest() -> Forest:
    return Forest(SEQUENCES, seed=3)


def indexed(forest: Forest) -> tuple[IndexedRows, int]:
    """An index of all sequences, with room for more, and the number of their blocks."""
    rows = IndexedRows(forest.memory, 2 * forest.block_count, 1)
    return rows, prefix.build(forest, rows)[0]


def test_a_run_measures_every_operation_and_stands_by_its_bars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "CALLS", dict.fromkeys(CALLS, 2))
    told = tmp_path / "rows.json"
    flags = ["--sequences", str(SEQUENCES), "--client-sequences", "3", "--rounds", "1", "--json", str(told)]
    assert prefix.main(flags) == 0
    rows = [Row(**row) for row in json.loads(told.read_text())]
    assert [row.op for row in rows] == [*CALLS, "rebuild_first_match", "rebuild_whole"]
    for row in rows:
        assert 0 < row.median_us <= row.p95_us, row
        assert row.sequences == (3 if row.op.startswith(("client", "rebuild_first", "rebuild_whole")) else SEQUENCES)
    printed = capsys.readouterr().out
    assert "not measured" not in printed
    for op in BARS_US:
        assert f"{op}, median" in printed
    assert "index memory" in printed


def test_blocks_are_cut_and_chained_as_they_say(forest: Forest) -> None:
    known: dict[bytes, PrefixRecord] = {}
    for number in range(SEQUENCES):
        length = len(forest.sequence(number))
        assert SHORTEST <= length <= LONGEST
        for key, record, at in forest.blocks(number):
            assert key[: len(TAG)] == TAG and key not in known
            text = forest.sequence(number)[record.start : record.start + record.count]
            assert forest.read(at, 4 * record.count) == text.tobytes()
            items = len(record.media) * MEDIA_BYTES
            assert forest.read(at - items, items) == packed_media(record.media)
            if record.parent is None:
                assert record.start == 0
            else:
                before = known[record.parent]
                assert before.start + before.count == record.start and before.count == record.block_tokens
            known[key] = record
        path = [known[forest.key(number, block)] for block in range(-(-length // forest.block_tokens))]
        assert sum(record.count for record in path) == length
        assert tuple(item for record in path for item in record.media) == forest.media.get(number, ())
    assert sum(record.count for record in known.values()) < forest.tokens * 7 / 8  # the others are shared
    assert any(record.media for record in known.values())


@pytest.mark.parametrize("kind", ["going_on", "deep", "branching", "unknown"])
def test_the_scan_finds_what_the_index_finds(forest: Forest, kind: str) -> None:
    index, blocks = indexed(forest)
    assert len(index) == blocks == forest.block_count
    for _ in range(5):
        record, folded = getattr(forest, kind)()
        scanned = prefix.scan(forest, (record, folded))
        assert scanned == index.match(TAG, record, folded).offset
        assert (scanned > SHORTEST // 2) == (kind != "unknown")


def test_another_answer_than_the_scans_ends_the_run(forest: Forest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "CALLS", dict.fromkeys(CALLS, 1))
    index, _ = indexed(forest)
    monkeypatch.setattr(prefix, "scan", lambda *_: 3)
    with pytest.raises(RuntimeError, match="the scan 3"):
        Bench(forest, index, None).round()
