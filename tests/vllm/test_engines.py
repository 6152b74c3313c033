"""What engines that share a daemon promise: the answers of an engine without one, and no picture encoded twice."""

from __future__ import annotations

from pathlib import Path

from .conftest import Stand, StartEngine, encoding, fresh


def test_answers_are_those_of_an_engine_without_the_connector_and_vllms_metrics_count_hits(stand: Stand) -> None:
    picture = fresh()
    right = stand.plain.generate(picture)
    encoded, _ = stand.encode(stand.first, picture)
    assert encoded == right
    before = stand.second.ask("metrics")["vllm:ec_tensord_hits"]
    with encoding(stand.second) as by_second:
        assert stand.second.generate(picture) == right
        assert by_second() == 0
    assert stand.second.ask("metrics")["vllm:ec_tensord_hits"] == before + 1
    assert stand.first.generate() == stand.plain.generate()


def test_each_of_an_engines_ranks_has_what_another_engine_of_as_many_encoded(
    stand: Stand, model: Path, start_engine: StartEngine
) -> None:
    pictures = [fresh() for _ in range(3)]
    options = {"separate": True, "tensor_parallel_size": 2}
    with start_engine(model, socket=stand.daemon.socket, **options) as one:
        one.wait_up()
        stand.attached(one, clients=3)
        right = {picture: stand.encode(one, picture)[0] for picture in pictures}
    # Entries outlive engines.
    with start_engine(model, socket=stand.daemon.socket, **options) as other:
        other.wait_up()
        stand.attached(other, clients=3)
        for picture in pictures:
            assert other.generate(picture) == right[picture]
        assert other.encoded() == 0
        with encoding(stand.first) as by_first:
            # Half of each sum was made on each rank: the last bits differ.
            narrow = stand.first.generate(pictures[0])
            assert by_first() == 1
        assert narrow == stand.plain.generate(pictures[0])
        stand.unpinned()
