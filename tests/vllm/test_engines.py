"""What engines that share a daemon promise: the answers of an engine without one, and no picture encoded twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..daemon_process import until
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


def test_a_call_that_changes_the_model_ends_sharing_and_says_so_once_and_how_to_resume(
    stand: Stand, model: Path, start_engine: StartEngine
) -> None:
    with start_engine(model, socket=stand.daemon.socket) as one:
        one.wait_up()
        stand.attached(one)
        # Doubled and halved: the weights are what they were at last.
        for factor in (2, 0.5):
            picture = fresh()
            right, key = stand.encode(stand.first, picture)
            one.ask("apply_model", factor=factor)
            if factor == 2:
                until(lambda key=key: not {key} & stand.keys(), "what was shared to be dropped")  # type: ignore[misc]
            with encoding(one) as by_one:
                assert (one.generate(picture) == right) == (factor != 2)
                assert by_one() == 1
            stand.quiet()
        assert one.log.count("it shares no encoder outputs") == 1
        assert "To share again, restart it from files" in one.log


@pytest.mark.parametrize("calls", [["reset_encoder_cache"], ["sleep", "wake_up"]])
def test_sharing_goes_on_after_resets_and_a_sleep_that_keep_the_weights(stand: Stand, calls: list[str]) -> None:
    for _ in range(2):
        old, new = fresh(), fresh()
        stand.encode(stand.first, old)
        for call in calls:
            stand.second.ask("engine", method=call)
        with encoding(stand.second) as by_second:
            assert stand.second.generate(old) == stand.plain.generate(old)
            assert by_second() == 0
        stand.encode(stand.second, new)
        with encoding(stand.first) as by_first:
            assert stand.first.generate(new) == stand.plain.generate(new)
            assert by_first() == 0
        # Its own cache was emptied: the connector finds the output again.
        stand.second.ask("engine", method=calls[0])
        with encoding(stand.second) as by_second:
            if "sleep" in calls:
                stand.second.ask("engine", method="wake_up")
            stand.second.generate(new)
            assert by_second() == 0


def test_an_engine_in_processes_of_its_own_shares_with_one_in_a_single_process(
    stand: Stand, model: Path, start_engine: StartEngine
) -> None:
    mine, theirs = fresh(), fresh()
    with start_engine(model, socket=stand.daemon.socket, separate=True) as apart:
        apart.wait_up()
        stand.attached(apart, clients=2)
        stand.encode(stand.first, mine)
        assert apart.generate(mine) == stand.plain.generate(mine)
        assert apart.encoded() == 0
        answered, _ = stand.encode(apart, theirs)
        assert answered == stand.plain.generate(theirs)
        with encoding(stand.second) as by_second:
            assert stand.second.generate(theirs) == answered
            assert by_second() == 0
        stand.daemon.kill()
        unseen = fresh()
        assert apart.generate(unseen) == stand.plain.generate(unseen)
        assert apart.finish() == 0


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
