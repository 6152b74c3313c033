"""Chooses the source of each gauge, with failover. Pure: results in, samples and log lines out.

Owns: the last reading of each source, its consecutive failures, and which failures were logged. Does not own the
sources, nor the consequences of samples.

The sources of a tier have an order, best first. A gauge is read from its first usable source: one that has not failed
STALE_AFTER times in a row, does not hang, and whose last reading began at most `stale_s` ago. The last reading of a
usable source is used, with the time at which it began. If no source is usable, the source used last stays in use, and
the gauge is stale. After one good reading of a better source, that source is in use again.

A failure is logged once: when it begins, or when a failing source becomes needed because no better one works. It has
ended, and the end is logged, after RECOVERED_AFTER good readings in a row. So an intermittent failure is one line.

Invariants: every gauge has a reading; the failure of a source is logged as long as a gauge depends on that source.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ...ipc.messages.modes import Tier
from ..governor.forms.effects import GovernorLog
from ..governor.forms.events import Sample, SourceState
from .reading import GaugeAbsent, GaugeFailed, Reading, SourceAnswer

STALE_AFTER: Final = 3
"""Failures in a row after which a source is not usable for a gauge."""
STALE_S: Final = 6.0
"""Seconds after its beginning at which a reading is too old to be used, whatever its source does meanwhile."""
RECOVERED_AFTER: Final = 3
_WHOLE: Final = ""
_FAULTS_SHOWN: Final = 4


@dataclass(slots=True)
class _Known:
    """A source's last reading of a gauge, the time at which it began, and the number of failures since."""

    reading: Reading
    began_at: float
    failures: int = 0
    why: str = ""


@dataclass(slots=True)
class _Fault:
    """A failure of a source, or of one of its gauges. `logged`: it is in the log. `good`: readings in a row since."""

    why: GaugeFailed
    logged: bool = False
    good: int = 0


class Chain:
    """One tier's sources, best first.

    Args:
        sources: their names. A single source was configured by name; a warning is logged if it is absent.
    """

    def __init__(self, tier: Tier, sources: Sequence[str]) -> None:
        self._tier = tier
        self._sources = tuple(sources)
        self._gauges: dict[str, dict[str, _Known]] = {}
        self._counting: dict[str, str] = {}
        self._faults: dict[tuple[str, str], _Fault] = {}
        self._seen: set[str] = set()
        self._hanging: dict[str, float] = {}
        self._answered: set[str] = set()
        self._states: dict[str, SourceState] = {}
        self._now = 0.0
        self._stale_s = STALE_S

    def take(
        self,
        answers: Mapping[str, SourceAnswer],
        hanging: Mapping[str, float],
        now: float,
        stale_s: float = STALE_S,
    ) -> tuple[tuple[Sample, ...], list[GovernorLog]]:
        """Takes the answers of sources that have come since the last call. `hanging`: the sources that hang,
        with the times at which their readings began.

        Returns:
            A sample for each gauge, and lines for the log.
        """
        self._now, self._stale_s = now, stale_s
        self._hanging = {source: began_at for source, began_at in hanging.items() if source not in answers}
        self._answered.update(answers)
        lines: list[GovernorLog] = []
        for source in self._sources:
            answer = answers.get(source)
            if answer is None:
                if source in self._hanging:
                    self._hang(source)
            elif isinstance(answer.result, GaugeFailed):
                self._fail_whole(source, answer.result)
            else:
                lines += self._read(source, answer.result, answer.began_at)
        lines += self._log_faults()
        self._note_states()
        return tuple(self._samples()), lines

    def states(self) -> list[SourceState]:
        """What each source does, as of the last call of `take`."""
        return [self._states[source] for source in self._sources if source in self._states]

    def check_invariants(self) -> None:
        """For tests."""
        for gauge, by_source in self._gauges.items():
            assert by_source, f"gauge {gauge} has no reading"
            assert all(known.failures >= 0 for known in by_source.values())
            assert set(by_source) <= set(self._sources)
        assert set(self._counting) <= set(self._gauges)
        for (source, gauge), fault in self._faults.items():
            if not fault.good and self._is_needed(source, gauge):
                assert fault.logged, f"{source} fails {gauge!r}, and it was not logged"

    # ---- results of a source

    def _fail_whole(self, source: str, why: GaugeFailed) -> None:
        self._fault(source, _WHOLE, why)
        for known in self._of(source).values():
            known.failures += 1
            known.why = str(why)

    def _hang(self, source: str) -> None:
        why = GaugeFailed(self._why_hanging(source))
        self._fault(source, _WHOLE, why)
        for known in self._of(source).values():
            # Its gauges need a good reading: an error that ends the hang makes no old reading usable again.
            known.failures = max(STALE_AFTER, known.failures)
            known.why = str(why)

    def _read(self, source: str, result: Mapping[str, Reading | GaugeFailed], now: float) -> Iterator[GovernorLog]:
        yield from self._good(source, _WHOLE)
        for gauge in self._gone(source, result):
            self._forget(source, gauge)
        for gauge, got in result.items():
            if isinstance(got, GaugeFailed):
                self._fault(source, gauge, got)
                known = self._gauges.get(gauge, {}).get(source)
                if known is not None:
                    known.failures += 1
                    known.why = str(got)
            else:
                began_at = now if got.began_at is None else got.began_at
                self._gauges.setdefault(gauge, {})[source] = _Known(got, began_at)
                yield from self._good(source, gauge)
        if source not in self._seen and self._of(source):
            self._seen.add(source)
            yield GovernorLog(
                "info", "gauges found", {"tier": self._tier.value, "source": source, "gauges": [*self._of(source)]}
            )

    def _gone(self, source: str, result: Container[str]) -> set[str]:
        failing = {gauge for each, gauge in self._faults if each == source and gauge != _WHOLE}
        return {gauge for gauge in failing.union(self._of(source)) if gauge not in result}

    def _of(self, source: str) -> dict[str, _Known]:
        return {gauge: by_source[source] for gauge, by_source in self._gauges.items() if source in by_source}

    def _forget(self, source: str, gauge: str) -> None:
        self._faults.pop((source, gauge), None)
        by_source = self._gauges.get(gauge, {})
        by_source.pop(source, None)
        if not by_source:
            self._gauges.pop(gauge, None)
            self._counting.pop(gauge, None)

    # ---- the source in use

    def _samples(self) -> Iterator[Sample]:
        for gauge, by_source in self._gauges.items():
            source, stale = self._chosen(gauge)
            self._counting[gauge] = source
            known = by_source[source]
            reading = known.reading
            why = self._why_unusable(known) or (known.why if known.failures else "")
            shown = {**reading.shown, **({"failure": why} if why else {})}
            yield Sample(
                gauge,
                self._tier,
                reading.used_bytes,
                reading.total_bytes,
                source,
                known.began_at,
                stale=stale,
                shown=shown,
            )

    def _chosen(self, gauge: str) -> tuple[str, bool]:
        by_source = self._gauges[gauge]
        known = [source for source in self._sources if source in by_source]
        for source in known:
            if not self._why_unusable(by_source[source]):
                return source, False
        last = self._counting.get(gauge)
        return last if last in by_source else known[0], True

    def _why_unusable(self, known: _Known) -> str:
        """Why the source's last reading of a gauge is not to be used; "" if it is."""
        if known.failures >= STALE_AFTER:
            return known.why
        age_s = self._now - known.began_at
        return f"its last reading began {age_s:.3g} s ago" if age_s > self._stale_s else ""

    def _is_needed(self, source: str, gauge: str) -> bool:
        """True if no better source of the gauge works. A whole source is needed if one of its gauges needs it, or if it
        has read no gauge yet."""
        if gauge == _WHOLE:
            read = self._of(source)
            return not read or any(self._is_needed(source, each) for each in read)
        better = self._sources[: self._sources.index(source)]
        by_source = self._gauges.get(gauge, {})
        return not any(each in by_source and not self._why_unusable(by_source[each]) for each in better)

    # ---- what each source does

    def _note_states(self) -> None:
        for source in self._sources:
            new, old = self._state(source), self._states.get(source)
            if old is not None and old.state == new.state != "hanging":
                new = replace(new, since=old.since)
            self._states[source] = new

    def _state(self, source: str) -> SourceState:
        state = partial(SourceState, source, self._tier)
        if source in self._hanging:
            return state("hanging", self._hanging[source], self._why_hanging(source), problem=True)
        faults = {
            gauge: fault.why for (each, gauge), fault in self._faults.items() if each == source and not fault.good
        }
        if not faults:
            return state("ok" if source in self._answered else "waiting", self._now)
        whole = faults.get(_WHOLE)
        if isinstance(whole, GaugeAbsent) and source not in self._seen:
            return state("absent", self._now, str(whole), problem=len(self._sources) == 1)
        said = [f"{gauge}: {why}" if gauge else str(why) for gauge, why in faults.items()]
        # A gauge that was read before is stale, or has another source. One that never was read is shown nowhere else.
        unread = any(gauge not in self._gauges if gauge else not self._of(source) for gauge in faults)
        return state("failing", self._now, "; ".join(said[:_FAULTS_SHOWN]), problem=unread)

    def _why_hanging(self, source: str) -> str:
        return f"no answer for {self._now - self._hanging[source]:.3g} s"

    # ---- log lines

    def _fault(self, source: str, gauge: str, why: GaugeFailed) -> None:
        fault = self._faults.setdefault((source, gauge), _Fault(why))
        fault.why = why
        fault.good = 0

    def _good(self, source: str, gauge: str) -> Iterator[GovernorLog]:
        fault = self._faults.get((source, gauge))
        if fault is None:
            return
        fault.good += 1
        if fault.good < RECOVERED_AFTER:
            return
        del self._faults[source, gauge]
        if fault.logged:
            yield self._line("info", "gauge can be read again", source, gauge, {})

    def _log_faults(self) -> Iterator[GovernorLog]:
        for (source, gauge), fault in self._faults.items():
            if fault.logged or fault.good or not self._is_needed(source, gauge):
                continue
            fault.logged = True
            why = {"why": str(fault.why)}
            if isinstance(fault.why, GaugeAbsent) and source not in self._seen:
                alone = len(self._sources) == 1
                yield self._line("warning" if alone else "info", "gauge source absent; not used", source, gauge, why)
            else:
                yield self._line("warning", "gauge cannot be read", source, gauge, why)

    def _line(self, level: str, event: str, source: str, gauge: str, more: dict[str, str]) -> GovernorLog:
        named = {"gauge": gauge} if gauge else {}
        return GovernorLog(level, event, {"tier": self._tier.value, "source": source, **named, **more})
