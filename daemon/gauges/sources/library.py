"""A source that reads GPUs through a vendor's library.

A unit is what a library lists, and what becomes a gauge: a GPU or a partition of one, by its index; or a slice of a
GPU, by its name. Slices are made and destroyed while the driver runs.

A library is opened at the first reading. If every GPU fails, it is opened again, at the earliest REOPEN_S after the
last time: a library opened before its driver was reloaded gets no answers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from ..reading import DeviceSource, GaugeAbsent, Reading, Result, failure_of

Unit = int | str
REOPEN_S: Final = 10.0
"""Seconds between two openings. Opening a library can take longer than a hundred readings."""


class LibrarySource(DeviceSource):
    """The GPUs of a library as a Source. Any exception of a call is a failure."""

    def __init__(self) -> None:
        self._opened_at: float | None = None
        self._names: dict[int, str] = {}

    @abstractmethod
    def open(self) -> None:
        """Opens the library. Raises GaugeAbsent if the library or its driver is missing."""

    @abstractmethod
    def units(self) -> Sequence[Unit]:
        """What the library lists now."""

    @abstractmethod
    def address(self, unit: int) -> str:
        """The name of a GPU, from its PCI address. Not asked for slices."""

    @abstractmethod
    def memory(self, unit: Unit) -> Reading:
        """The memory of a unit now."""

    @abstractmethod
    def shut(self) -> None:
        """Closes the library."""

    def read(self, now: float) -> Result:
        try:
            if self._opened_at is None:
                self.open()
                self._opened_at = now
            result = self._read_all(self.units())
        except Exception as error:
            self._reopen_later(now)
            raise failure_of(error) from error
        if not any(isinstance(each, Reading) for each in result.values()):
            self._reopen_later(now)
        if not result:
            raise GaugeAbsent("the library lists no GPU")
        return result

    def close(self) -> None:
        if self._opened_at is None:
            return
        self._opened_at = None
        self._names.clear()
        # A failure has been logged before, when the library was read.
        with suppress(Exception):
            self.shut()

    def _reopen_later(self, now: float) -> None:
        if self._opened_at is not None and now - self._opened_at >= REOPEN_S:
            self.close()

    def _read_all(self, units: Sequence[Unit]) -> Result:
        result: Result = {}
        for unit in units:
            name = unit if isinstance(unit, str) else f"{self.name}:{unit}"
            try:
                if not isinstance(unit, str):
                    name = self._names.get(unit) or self.address(unit)
                    self._names[unit] = name
                result[name] = self.memory(unit)
            except Exception as error:
                result[name] = failure_of(error)
        return result
