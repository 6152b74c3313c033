"""Which source's reading counts, gauge by gauge. Pure: results in, samples and log lines out.

Owns: last readings, failures in a row, what was told of them. Does not own sources, nor what samples lead to.

Of the sources that have read a gauge, the first counts that has not failed STALE_AFTER times in a row; while it fails
less often, its last reading stands, as of when it was begun. Where all have failed so often, what counted last goes on
counting, and is stale. One good reading brings a better source back.

A failure is told once: when it begins, or when a source is needed that has been failing unseen behind a better one. It
has ended, and is told as ended, after RECOVERED_AFTER good readings in a row; so one that comes and goes is one line.

Invariant: every gauge has a reading; a source that fails is told as long as anything depends on it.
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
"""By source: what it read; or why it could read nothing."""


@dataclass(slots=True)
class _Known:
    """What a source last said of a gauge, when it was begun, and how often it has failed since."""

    reading: Reading
    began_at: float
    failures: int = 0
    why: str = ""


@dataclass(slots=True)
class _Fault:
    """A failure of a source, or of one gauge of it. `good`: readings in a row since."""

    why: GaugeFailed
    told: bool = False
    good: int = 0


class Chain:
    """One tier's sources, best first.

    Args:
        sources: their names. One that stands alone was asked for by name: a warning says so if it is not there.
    """

    def __init__(self, tier: Tier, sources: Sequence[str]) -> None:
        self._tier = tier
        self._sources = tuple(sources)
        self._gauges: dict[str, dict[str, _Known]] = {}
        self._counting: dict[str, str] = {}
        self._faults: dict[tuple[str, str], _Fault] = {}
        self._seen: set[str] = set()

    def take(self, results: Results, now: float) -> tuple[tuple[Sample, ...], list[GovernorLog]]:
        """What every source said at a sample that was begun at `now`.

        Returns:
            A sample for each gauge that there is, and what the operator is told.
        """
        lines: list[GovernorLog] = []
        for source in self._sources:
            result = results[source]
            if isinstance(result, GaugeFailed):
                self._fail_whole(source, result)
            else:
                lines += self._read(source, result, now)
        lines += self._tell()
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
                assert fault.told, f"{source} fails {gauge!r}, and nobody was told"

    # ---- what a source said

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
                "info", "gauges", {"tier": self._tier.value, "source": source, "gauges": [*self._of(source)]}
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

    # ---- which counts

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
        """Whether nothing better than `source` can be had; for a whole source: of any gauge that it has read."""
        if gauge == _WHOLE:
            read = self._of(source)
            return not read or any(self._is_needed(source, each) for each in read)
        better = self._sources[: self._sources.index(source)]
        by_source = self._gauges.get(gauge, {})
        return not any(each in by_source and by_source[each].failures < STALE_AFTER for each in better)

    # ---- what is told

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
        if fault.told:
            yield self._line("info", "gauge reads again", source, gauge, {})

    def _tell(self) -> Iterator[GovernorLog]:
        for (source, gauge), fault in self._faults.items():
            if fault.told or fault.good or not self._is_needed(source, gauge):
                continue
            fault.told = True
            why = {"why": str(fault.why)}
            if isinstance(fault.why, GaugeAbsent) and source not in self._seen:
                alone = len(self._sources) == 1
                yield self._line("warning" if alone else "info", "gauge source left out", source, gauge, why)
            else:
                yield self._line("warning", "gauge fails", source, gauge, why)

    def _line(self, level: str, event: str, source: str, gauge: str, more: dict[str, str]) -> GovernorLog:
        named = {"gauge": gauge} if gauge else {}
        return GovernorLog(level, event, {"tier": self._tier.value, "source": source, **named, **more})
