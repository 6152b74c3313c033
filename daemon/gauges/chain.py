"""Chooses the source of each gauge, with failover. Pure: results in, samples and log lines out.

Owns: the last reading of each source, its consecutive failures, and which failures were logged. Does not own the
sources, nor the consequences of samples.

The sources of a tier have an order, best first. A gauge is read from its first source that has not failed STALE_AFTER
times in a row. While that source has failed less often, its last reading is used, with the time at which that reading
began. If all sources have failed that often, the source used last stays in use, and the gauge is stale. After one good
reading of a better source, that source is in use again.

A failure is logged once: when it begins, or when a failing source becomes needed because no better one works. It has
ended, and the end is logged, after RECOVERED_AFTER good readings in a row. So an intermittent failure is one line.

Invariants: every gauge has a reading; the failure of a source is logged as long as a gauge depends on that source.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ...ipc.modes import Tier
from ..core.governor.effects import GovernorLog
from ..core.governor.events import Sample
from .reading import GaugeAbsent, GaugeFailed, Reading

STALE_AFTER: Final = 3
RECOVERED_AFTER: Final = 3
_WHOLE: Final = ""

Results = Mapping[str, Mapping[str, Reading | GaugeFailed] | GaugeFailed]
"""By source: its readings, or why it could read nothing."""


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

    def take(self, results: Results, now: float) -> tuple[tuple[Sample, ...], list[GovernorLog]]:
        """Takes the results of all sources for a sample that began at `now`.

        Returns:
            A sample for each gauge, and lines for the log.
        """
        lines: list[GovernorLog] = []
        for source in self._sources:
            result = results[source]
            if isinstance(result, GaugeFailed):
                self._fail_whole(source, result)
            else:
                lines += self._read(source, result, now)
        lines += self._log_faults()
        return tuple(self._samples()), lines

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
            shown = {**reading.shown, **({"failure": known.why} if known.failures else {})}
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
            if by_source[source].failures < STALE_AFTER:
                return source, False
        last = self._counting.get(gauge)
        return last if last in by_source else known[0], True

    def _is_needed(self, source: str, gauge: str) -> bool:
        """True if no better source of the gauge works. A whole source is needed if one of its gauges needs it, or if it
        has read no gauge yet."""
        if gauge == _WHOLE:
            read = self._of(source)
            return not read or any(self._is_needed(source, each) for each in read)
        better = self._sources[: self._sources.index(source)]
        by_source = self._gauges.get(gauge, {})
        return not any(each in by_source and by_source[each].failures < STALE_AFTER for each in better)

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
