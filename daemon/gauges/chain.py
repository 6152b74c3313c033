"""Chooses the source of each gauge, with failover. Pure: results in, samples and log lines out.

The sources of a tier have an order, best first. A gauge is read from the first source whose last reading of it began at
most `stale_s` ago, whatever the source does meanwhile. Without such a source the latest reading of any is used, and the
gauge is stale. A gauge that its source does not list any more is gone after GONE_S.

A failing source is logged once, when it begins to fail. Its end is logged after RECOVERED_AFTER good answers in a row.
So an intermittent failure is one line.

Invariants: every gauge has a reading; a failing source is logged. Of a source, the reading that began last counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ...ipc.messages.modes import Tier
from ..governor.forms.events import GovernorLog, Sample, SourceState
from .reading import GaugeAbsent, GaugeFailed, Reading, SourceAnswer

STALE_S: Final = 6.0
"""Seconds after its beginning at which a reading is too old to be used."""
GONE_S: Final = 120.0
"""Seconds after its last reading at which a gauge is forgotten that its source does not list: a slice of a GPU that was
destroyed, a device whose owners have ended."""
RECOVERED_AFTER: Final = 3
_FAILURES_SHOWN: Final = 4


@dataclass(slots=True)
class _Known:
    """A source's last reading of a gauge, the time at which it began, and why the source cannot read it since."""

    reading: Reading
    began_at: float
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
        self.whole = answer.result if isinstance(answer.result, GaugeFailed) else None
        result = {} if isinstance(answer.result, GaugeFailed) else answer.result
        self.unread = {}
        for known in self.gauges.values():
            known.why = "" if self.whole is None else str(self.whole)
        for gauge, got in result.items():
            before = self.gauges.get(gauge)
            if isinstance(got, Reading):
                began_at = answer.began_at if got.began_at is None else got.began_at
                if before is None or before.began_at <= began_at:
                    self.gauges[gauge] = _Known(got, began_at)
            elif before is not None:
                before.why = str(got)
            else:
                self.unread[gauge] = str(got)
        if self.whole is None:
            ended = answer.began_at - GONE_S
            kept = {name: known for name, known in self.gauges.items() if name in result or known.began_at >= ended}
            self.gauges = kept
        self.found |= bool(self.gauges)
        self.good = 0 if self.failures() else self.good + 1

    def failures(self) -> list[str]:
        """Why it fails, or its gauges do; empty if none does."""
        if self.whole is not None:
            return [str(self.whole)]
        failing = {gauge: known.why for gauge, known in self.gauges.items() if known.why}
        return [f"{gauge}: {why}" for gauge, why in {**failing, **self.unread}.items()]


class Chain:
    """One tier's sources by name, best first. A single source was configured by name; a warning is logged if it is
    absent."""

    def __init__(self, tier: Tier, sources: Sequence[str]) -> None:
        self._tier = tier
        self._sources = {name: _Source() for name in sources}

    def take(
        self, answers: Mapping[str, SourceAnswer], hanging: Mapping[str, float], now: float, stale_s: float = STALE_S
    ) -> tuple[list[Sample], list[SourceState], list[GovernorLog]]:
        """Takes the answers of sources that have come since the last call. `hanging`: the sources that hang, with the
        times at which their readings began. Returns a sample for each gauge, the state of each source, and lines for
        the log."""
        lines: list[GovernorLog] = []
        for name, source in self._sources.items():
            found = source.found
            source.hangs_since = None if name in answers else hanging.get(name)
            if name in answers:
                source.take(answers[name])
            elif source.hangs_since is not None:
                source.good = 0
            if source.found and not found:
                lines.append(self._line("info", "gauges found", name, gauges=[*source.gauges]))
            source.state = self._state(name, source, now)
            lines += self._log_failure(source.state, source)
        gauges = dict.fromkeys(gauge for source in self._sources.values() for gauge in source.gauges)
        states = [source.state for source in self._sources.values() if source.state is not None]
        return [self._sample(gauge, now, stale_s) for gauge in gauges], states, lines

    def check_invariants(self) -> None:
        for name, source in self._sources.items():
            assert source.good or source.logged or not source.failures(), f"{name} fails, and it was not logged"

    def _sample(self, gauge: str, now: float, stale_s: float) -> Sample:
        """A gauge's reading from the first source that has a fresh one; without one, the latest reading."""
        known = {name: source.gauges[gauge] for name, source in self._sources.items() if gauge in source.gauges}
        usable = next((name for name, each in known.items() if now - each.began_at <= stale_s), None)
        name = usable or max(known, key=lambda name: known[name].began_at)
        each, hangs_since = known[name], self._sources[name].hangs_since
        why = each.why if hangs_since is None else _why_hanging(hangs_since, now)
        if usable is None and not why:
            why = f"its last reading began {now - each.began_at:.3g} s ago"
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

    def _log_failure(self, state: SourceState, source: _Source) -> Iterator[GovernorLog]:
        name = state.source
        if source.logged and source.good >= RECOVERED_AFTER:
            source.logged = False
            if source.found:
                yield self._line("info", "gauge can be read again", name)
        elif not source.logged and state.state in ("absent", "failing", "hanging"):
            source.logged = True
            absent = state.state == "absent"
            event = "gauge source absent; not used" if absent else "gauge cannot be read"
            yield self._line("info" if absent and not state.problem else "warning", event, name, why=state.why)

    def _line(self, level: str, event: str, source: str, **more: object) -> GovernorLog:
        return GovernorLog(level, event, {"tier": self._tier.value, "source": source, **more})


def _why_hanging(since: float, now: float) -> str:
    return f"no answer for {now - since:.3g} s"
