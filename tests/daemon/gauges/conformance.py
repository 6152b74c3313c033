"""The conformance suite of all sources of gauges: what each promises whoever reads it.

The test file of a source derives `AnySource` and says how the source is given something to read. `test_registry.py`
sees to it that every registered source has such a class in `test_<name>.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import pytest

from tensord.daemon.gauges.reading import GaugeFailed, Reading, Source
from tensord.ipc.messages.modes import Tier

GIB = 1 << 30


class Stage(ABC):
    """A source, and one gauge for it to read."""

    gauge: str
    source: Source

    @abstractmethod
    def show(self, used_bytes: int, total_bytes: int) -> None:
        """From now on the gauge stands there, and is as full as that."""

    @abstractmethod
    def lose(self) -> None:
        """From now on the gauge cannot be read."""

    def read(self, now: float) -> Reading | GaugeFailed:
        """The gauge, or why it or the whole source cannot be read."""
        try:
            return self.source.read(now).get(self.gauge, GaugeFailed("not listed"))
        except GaugeFailed as failed:
            return failed

    def end(self) -> None:
        """The test is over."""
        self.source.close()


class AnySource:
    """The suite. A class derived from it has `tier`, and a fixture `set_up`, which yields a Stage."""

    tier: Tier

    @pytest.fixture
    def stage(self, set_up: Stage) -> Iterator[Stage]:
        set_up.show(3 * GIB, 80 * GIB)
        yield set_up
        set_up.end()

    def test_a_gauge_is_read_anew_each_time(self, stage: Stage) -> None:
        assert self._used(stage, 1.0) == (3 * GIB, 80 * GIB)
        stage.show(79 * GIB, 80 * GIB)
        assert self._used(stage, 2.0) == (79 * GIB, 80 * GIB)

    def test_a_gauge_that_cannot_be_read_has_no_value(self, stage: Stage) -> None:
        stage.read(1.0)
        stage.lose()
        failed = stage.read(50.0)
        assert isinstance(failed, GaugeFailed) and str(failed)

    def test_a_gauge_that_can_be_read_again_is(self, stage: Stage) -> None:
        stage.read(1.0)
        stage.lose()
        stage.read(50.0)
        stage.show(5 * GIB, 80 * GIB)
        stage.read(100.0)
        assert self._used(stage, 150.0) == (5 * GIB, 80 * GIB)

    def test_a_source_may_be_closed_at_any_time_and_read_again(self, stage: Stage) -> None:
        stage.source.close()
        stage.read(1.0)
        stage.source.close()
        stage.source.close()
        assert self._used(stage, 2.0) == (3 * GIB, 80 * GIB)

    def _used(self, stage: Stage, now: float) -> tuple[int, int]:
        reading = stage.read(now)
        assert isinstance(reading, Reading), reading
        return reading.used_bytes, reading.total_bytes
