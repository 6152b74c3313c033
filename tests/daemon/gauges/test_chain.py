from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.gauges.chain import GONE_S, RECOVERED_AFTER, STALE_S, Chain
from tensord.daemon.gauges.reading import GaugeAbsent, GaugeFailed, Reading, SourceAnswer
from tensord.daemon.governor.forms.events import GovernorLog, Sample, SourceState
from tensord.ipc.messages.modes import Tier

Results = Mapping[str, Mapping[str, Reading | GaugeFailed] | GaugeFailed]
CARD = "0000:65:00.0"
OTHER = "0000:66:00.0"
LOST = GaugeFailed("GPU is lost")
DEAD = GaugeFailed("the driver does not answer")


class Told:
    """A chain, with the time going on by 2 s a sample, and all that was logged."""

    def __init__(self, *sources: str) -> None:
        self.chain = Chain(Tier.DEVICE, sources)
        self.now = 0.0
        self.lines: list[GovernorLog] = []

    def take(self, results: Results, hanging: Mapping[str, float] | None = None) -> dict[str, Sample]:
        """Takes what the sources answer to a reading that began now. One that is left out has not answered."""
        self.now += 2.0
        answers = {
            source: SourceAnswer(dict(got) if isinstance(got, Mapping) else got, self.now)
            for source, got in results.items()
        }
        samples, self.states, lines = self.chain.take(answers, hanging or {}, self.now)
        self.lines += lines
        self.chain.check_invariants()
        assert len({sample.gauge for sample in samples}) == len(samples), "a gauge appears once"
        return {sample.gauge: sample for sample in samples}

    def state(self, source: str) -> SourceState:
        return next(each for each in self.states if each.source == source)

    def told(self, *levels: str) -> list[tuple[str, str]]:
        return [(e.event, e.fields["source"]) for e in self.lines if e.level in levels]


def used(used_bytes: int) -> Reading:
    return Reading(used_bytes, 100)


@pytest.mark.parametrize(
    ("results", "hanging", "why"),
    [
        ({"nvidia": {CARD: LOST}}, {}, "GPU is lost"),
        ({"nvidia": DEAD}, {}, str(DEAD)),
        ({}, {"nvidia": 1.0}, "no answer for"),
        ({"nvidia": {}}, {}, ""),
    ],
    ids=["fails", "source fails", "hangs", "is not listed"],
)
def test_a_gauge_keeps_its_last_value_as_of_when_it_was_read_and_is_stale_by_its_age(
    results: Results, hanging: Mapping[str, float], why: str
) -> None:
    told = Told("nvidia")
    told.take({"nvidia": {CARD: Reading(7, 100, {"of": "x"}, began_at=2.0)}})
    for _ in range(5):
        sample = told.take(results, hanging)[CARD]
        assert (sample.used_bytes, sample.began_at, sample.source) == (7, 2.0, "nvidia")
        assert sample.stale == (told.now - 2.0 > STALE_S)
        assert why in sample.shown.get("failure", "") and sample.shown["of"] == "x", "status says why"
    assert sample.stale and sample.shown["failure"]
    told.now += GONE_S
    assert (CARD in told.take(results, hanging)) == (results != {"nvidia": {}})
    late = Reading(8, 100, began_at=told.now - 10.0)
    assert told.take({"nvidia": {CARD: late}})[CARD].stale, "an answer that comes late is as old as its beginning"
    assert not told.take({"nvidia": {CARD: used(9)}})[CARD].stale


@pytest.mark.parametrize(
    ("results", "hanging", "why"),
    [
        ({"nvidia": {CARD: LOST, OTHER: used(1)}}, {}, f"{CARD}: GPU is lost"),
        ({"nvidia": DEAD}, {}, str(DEAD)),
        ({"nvidia": GaugeAbsent("no driver")}, {}, "no driver"),
        ({}, {"nvidia": 1.0}, "no answer for 3 s"),
    ],
    ids=["a gauge fails", "the source fails", "its driver is gone", "it hangs"],
)
def test_a_failure_is_logged_once_and_so_is_its_end(results: Results, hanging: Mapping[str, float], why: str) -> None:
    told = Told("nvidia")
    good = {"nvidia": {CARD: used(1), OTHER: used(1)}}
    for taken in (good, *[results] * 10, *[good] * 10, results):
        told.take(taken, hanging if taken is results else None)
    assert told.told("warning", "info") == [
        ("gauges found", "nvidia"),
        ("gauge cannot be read", "nvidia"),
        ("gauge can be read again", "nvidia"),
        ("gauge cannot be read", "nvidia"),
    ]
    assert told.lines[1].fields["why"] == why


def test_a_source_that_fails_and_recovers_repeatedly_is_logged_once() -> None:
    told = Told("nvidia")
    for turn in range(20):
        told.take({"nvidia": {CARD: used(1) if turn % 3 else LOST}})
    assert RECOVERED_AFTER == 3
    assert told.told("warning") == [("gauge cannot be read", "nvidia")]
    assert told.told("info") == [("gauges found", "nvidia")]


@pytest.mark.parametrize(("used_bytes", "total_bytes"), [(-1, 100), (1, 0), (1, -1), (-1, -1)])
def test_a_reading_that_cannot_be_true_cannot_be_made(used_bytes: int, total_bytes: int) -> None:
    with pytest.raises(GaugeFailed, match=f"{used_bytes} of {total_bytes}"):
        Reading(used_bytes, total_bytes)


def test_every_source_says_what_it_does_since_when_and_whether_a_person_must_look() -> None:
    told = Told("amd", "nvidia", "sysfs", "owners")
    told.take({"amd": GaugeAbsent("no driver"), "nvidia": {CARD: used(1)}, "owners": {}})
    assert [(each.state, each.problem) for each in told.states] == [
        ("absent", False),
        ("ok", False),
        ("waiting", False),
        ("ok", False),
    ]
    told.take({"nvidia": {CARD: used(1)}}, {"sysfs": 2.5})
    assert told.state("sysfs") == SourceState("sysfs", Tier.DEVICE, "hanging", 2.5, "no answer for 1.5 s", problem=True)
    assert told.state("nvidia").since == 2.0
    told.take({"nvidia": {CARD: LOST}})
    assert told.state("nvidia") == SourceState("nvidia", Tier.DEVICE, "failing", 6.0, f"{CARD}: GPU is lost")


def test_a_source_or_a_gauge_that_was_never_read_is_a_problem_since_no_stale_gauge_shows_it() -> None:
    told = Told("amd", "nvidia")
    samples = told.take({"amd": DEAD, "nvidia": {CARD: used(1), "nvidia:1": LOST}})
    assert set(samples) == {CARD}, "no value is made up for it"
    assert told.told("warning") == [("gauge cannot be read", "amd"), ("gauge cannot be read", "nvidia")]
    assert told.state("amd").problem
    assert told.state("nvidia").problem and told.state("nvidia").why == "nvidia:1: GPU is lost"
    told.take({"amd": {OTHER: used(1)}, "nvidia": {CARD: used(1), "nvidia:1": used(1)}})
    assert not told.state("amd").problem and not told.state("nvidia").problem


def test_an_absent_source_is_left_out_with_one_line_and_a_problem_only_where_it_was_asked_for_by_name() -> None:
    for sources, level in ((("amd",), "warning"), (("amd", "owners"), "info")):
        told = Told(*sources)
        for _ in range(5):
            told.take({"amd": GaugeAbsent("no driver"), "owners": {}})
        assert told.state("amd").problem == (level == "warning")
        assert [(line.level, line.event) for line in told.lines] == [(level, "gauge source absent; not used")]


SOURCES = ("first", "second", "third")
ONE_RESULT = st.one_of(
    st.just(DEAD),
    st.just(GaugeAbsent("not here")),
    st.dictionaries(st.sampled_from([CARD, OTHER]), st.one_of(st.just(LOST), st.integers(0, 100).map(used))),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.fixed_dictionaries(dict.fromkeys(SOURCES, ONE_RESULT)), max_size=25))
def test_the_chosen_samples_agree_with_a_plain_model_of_the_rules(rounds: list[Results]) -> None:
    """The model keeps every source's last reading of each gauge."""
    told = Told(*SOURCES)
    last: dict[tuple[str, str], tuple[float, Reading]] = {}
    for results in rounds:
        samples = told.take(results)
        for source in SOURCES:
            result = results[source]
            for gauge, got in result.items() if isinstance(result, Mapping) else ():
                if isinstance(got, Reading):
                    last[source, gauge] = told.now, got
        for gauge in (CARD, OTHER):
            found = [source for source in SOURCES if (source, gauge) in last]
            assert (gauge in samples) == bool(found)
            if found:
                fresh = [source for source in found if told.now - last[source, gauge][0] <= STALE_S]
                counts = fresh[0] if fresh else max(found, key=lambda source: last[source, gauge][0])
                sample, (began_at, reading) = samples[gauge], last[counts, gauge]
                assert (sample.source, sample.used_bytes) == (counts, reading.used_bytes)
                assert (sample.began_at, sample.stale) == (began_at, not fresh)
