"""The drill of a whole day on one card: with the governor no allocation fails, and a failed expectation is named."""

from __future__ import annotations

import json
from pathlib import Path

import one_card
import pytest
from card_programs import Tally
from one_card import Day, Seen


def seen(change: dict[str, int], *, alone: bool = False) -> Seen:
    """A run without a failed expectation, with `change` made to one of its days."""
    without = Tally(requests=9, served=7, out_of_memory=2)
    governed = Tally(requests=9, served=9, offloaded=4, fetched=3)
    for name, value in change.items():
        setattr(without if alone else governed, name, value)
    return Seen(Day({"chat": without}), Day({"chat": governed}))


def test_three_programs_run_out_of_memory_alone_and_never_with_the_governor(tmp_path: Path) -> None:
    told = tmp_path / "seen.json"
    assert one_card.main(["--minutes", "0.1", "--json", str(told)]) == 0
    days = json.loads(told.read_text())
    alone, governed = (
        Day({name: Tally(**counts) for name, counts in days[day]["programs"].items()}) for day in ("alone", "governed")
    )
    assert Seen(alone, governed).failures == []
    assert alone.sums.requests == governed.sums.requests == governed.sums.served
    assert alone.sums.served + alone.sums.out_of_memory == alone.sums.requests
    assert governed.sums.hits > alone.sums.hits
    assert governed.programs["images"].served == governed.programs["images"].requests > 0


def test_nothing_is_amiss_in_a_good_run() -> None:
    assert seen({}).failures == []


@pytest.mark.parametrize(("change", "alone"), [
    ({"out_of_memory": 0}, True),
    ({"wrong": 1}, True),
    ({"out_of_memory": 1}, False),
    ({"refused": 1}, False),
    ({"offloaded": 0}, False),
    ({"fetched": 0}, False),
    ({"wrong": 1}, False),
])  # fmt: skip
def test_each_failed_expectation_is_named(change: dict[str, int], alone: bool) -> None:
    assert len(seen(change, alone=alone).failures) == 1


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_a_day_without_length_is_refused(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        one_card.main(["--minutes", minutes])
    assert "--minutes" in capsys.readouterr().err
