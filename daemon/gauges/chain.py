"""Chooses the source of each gauge, with failover. Pure: results in, samples and log lines out.

The sources of a tier have an order, best first. A gauge is read from its first usable source: one that has not failed
STALE_AFTER times in a row, does not hang, and whose last reading began at most `stale_s` ago. The last reading of a
usable source is used, with the time at which it began. If no source is usable, the source used last stays in use, and
the gauge is stale. After one good reading of a better source, that source is in use again.

A failing source is logged once, when it begins to fail or to be needed: no better source reads one of its gauges, or it
has read none. Its end is logged after RECOVERED_AFTER good answers in a row. So an intermittent failure is one line.

Invariants: every gauge has a reading; a failing source that a gauge depends on is logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ...ipc.messages.modes import Tier
from ..governor.forms.events import GovernorLog, Sample, SourceState
from .reading import GaugeAbsent, GaugeFailed, Reading, SourceAnswer

STALE_AFTER: Final = 3
"""Failures in a row after which a source is not usable for a gauge."""
STALE_S: Final = 6.0
"""Seconds after its beginning at which a reading is too old to be used, whatever its source does meanwhile."""
RECOVERED_AFTER: Final = 3
_FAILURES_SHOWN: Final = 4


@dataclass(slots=True)
class _Known:
    """A source's last reading of a gauge, the time at which it began, and the failures since."""

    reading: Reading
    began_at: float
    failures: int = 0
    why: str = ""


@dataclass(slots=True)
class _Source:
    """What a source has answered. `gauges`: its readings. `unread`: gauges that failed before they were ever read, with
    the reasons. `whole`: why its last answer had no gauge. `hangs_since`: when the reading that hangs began. `found`:
    it has read a gauge once. `good`: answers in a row without a failure. `logged`: that it fails."""

    gauges: dict[str, _Known] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    whole: GaugeFailed | None = None
    hangs_since: float | None = None
    found: bool = False
    good: int = 0
    logged: bool = False
    state: SourceState | None = None

    def take(self, answer: SourceAnswer) -> None:
        """Takes an answer to a reading."""
        self.whole = None
        if isinstance(answer.result, GaugeFailed):
            self.whole = answer.result
            self.fail(str(self.whole))
        else:
            before, self.gauges, self.unread = self.gauges, {}, {}
            for gauge, got in answer.result.items():
                known = before.get(gauge)
                if isinstance(got, Reading):
                    self.gauges[gauge] = _Known(got, answer.began_at if got.began_at is None else got.began_at)
                elif known is not None:
                    self.gauges[gauge] = _Known(known.reading, known.began_at, known.failures + 1, str(got))
                else:
                    self.unread[gauge] = str(got)
        self.found |= bool(self.gauges)
        self.good = 0 if self.failures() else self.good + 1

    def fail(self, why: str, least: int = 0) -> None:
        """None of its gauges could be read, or none `least` times."""
        for known in self.gauges.values():
            known.failures, known.why = max(known.failures + 1, least), why

    def failures(self) -> list[str]:
        """Why it fails, or its gauges do; empty if none does."""
        if self.whole is not None:
            return [str(self.whole)]
        failing = {gauge: known.why for gauge, known in self.gauges.items() if known.failures}
        return [f"{gauge}: {why}" for gauge, why in {**failing, **self.unread}.items()]


class Chain:
    """One tier's sources by name, best first. A single source was configured by name; a warning is logged if it is
    absent."""

    def __init__(self, tier: Tier, sources: Sequence[str]) -> None:
        self._tier = tier
        self._sources = {name: _Source() for name in sources}
        self._samples: dict[str, Sample] = {}

    def take(
        self, answers: Mapping[str, SourceAnswer], hanging: Mapping[str, float], now: float, stale_s: float = STALE_S
    ) -> tuple[tuple[Sample, ...], list[GovernorLog]]:
        """Takes the answers of sources that have come since the last call. `hanging`: the sources that hang, with the
        times at which their readings began. Returns a sample for each gauge, and lines for the log."""
        lines: list[GovernorLog] = []
        for name, source in self._sources.items():
            found = source.found
            source.hangs_since = None if name in answers else hanging.get(name)
            if name in answers:
                source.take(answers[name])
            elif source.hangs_since is not None:
                # Its gauges need a good reading: an error that ends the hang makes no old reading usable again.
                source.good = 0
                source.fail(_why_hanging(source.hangs_since, now), STALE_AFTER)
            if source.found and not found:
                lines.append(self._line("info", "gauges found", name, gauges=[*source.gauges]))
        gauges = dict.fromkeys(gauge for source in self._sources.values() for gauge in source.gauges)
        self._samples = {gauge: self._sample(gauge, now, stale_s) for gauge in gauges}
        for name, source in self._sources.items():
            source.state = self._state(name, source, now)
            lines += self._log_failure(source.state, source)
        return tuple(self._samples.values()), lines

    def states(self) -> list[SourceState]:
        """As of the last `take`."""
        return [source.state for source in self._sources.values() if source.state is not None]

    def check_invariants(self) -> None:
        for name, source in self._sources.items():
            if not source.good and source.failures() and self._is_needed(name, source):
                assert source.logged, f"{name} fails, and it was not logged"

    def _sample(self, gauge: str, now: float, stale_s: float) -> Sample:
        """A gauge's reading from the source that is in use: the first usable one; without one, that of the last
        time."""
        known = {name: source.gauges[gauge] for name, source in self._sources.items() if gauge in source.gauges}
        unusable = {name: _why_unusable(each, now, stale_s) for name, each in known.items()}
        usable = next((name for name, why in unusable.items() if not why), None)
        last = self._samples[gauge].source if gauge in self._samples else ""
        name = usable or (last if last in known else next(iter(known)))
        each = known[name]
        why = unusable[name] or each.why
        shown = {**each.reading.shown, **({"failure": why} if why else {})}
        sizes = each.reading.used_bytes, each.reading.total_bytes
        return Sample(gauge, self._tier, *sizes, name, each.began_at, stale=usable is None, shown=shown)

    def _state(self, name: str, source: _Source, now: float) -> SourceState:
        state: Literal["ok", "failing", "hanging", "absent", "waiting"]
        failures, problem = source.failures(), False
        if source.hangs_since is not None:
            state, problem, failures = "hanging", True, [_why_hanging(source.hangs_since, now)]
        elif not failures:
            state = "ok" if source.good else "waiting"
        elif isinstance(source.whole, GaugeAbsent) and not source.found:
            state, problem = "absent", len(self._sources) == 1
        else:
            # A gauge that was read before is stale, or has another source. One that never was is shown nowhere else.
            state, problem = "failing", bool(source.unread) or not source.gauges
        since = now if source.state is None or source.state.state != state else source.state.since
        since = since if source.hangs_since is None else source.hangs_since
        return SourceState(name, self._tier, state, since, "; ".join(failures[:_FAILURES_SHOWN]), problem)

    def _is_needed(self, name: str, source: _Source) -> bool:
        """True if no better source reads one of its gauges, or if it has read none."""
        order = list(self._sources)
        better = set(order[: order.index(name)])
        samples = [self._samples[gauge] for gauge in source.gauges]
        return not samples or any(sample.stale or sample.source not in better for sample in samples)

    def _log_failure(self, state: SourceState, source: _Source) -> Iterator[GovernorLog]:
        name = state.source
        if source.logged and source.good >= RECOVERED_AFTER:
            source.logged = False
            if source.found:
                yield self._line("info", "gauge can be read again", name)
        elif not source.logged and state.state in ("absent", "failing", "hanging") and self._is_needed(name, source):
            source.logged = True
            absent = state.state == "absent"
            event = "gauge source absent; not used" if absent else "gauge cannot be read"
            yield self._line("info" if absent and not state.problem else "warning", event, name, why=state.why)

    def _line(self, level: str, event: str, source: str, **more: object) -> GovernorLog:
        return GovernorLog(level, event, {"tier": self._tier.value, "source": source, **more})


def _why_unusable(known: _Known, now: float, stale_s: float) -> str:
    """Why a source's last reading of a gauge is not to be used; "" if it is."""
    if known.failures >= STALE_AFTER:
        return known.why
    age_s = now - known.began_at
    return f"its last reading began {age_s:.3g} s ago" if age_s > stale_s else ""


def _why_hanging(since: float, now: float) -> str:
    return f"no answer for {now - since:.3g} s"
