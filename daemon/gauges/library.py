"""A source that reads GPUs through a vendor's library.

Owns: when a library is opened and closed, and the names of the GPUs that it has listed. Does not own the calls of a
library (amd.py, nvidia.py).

A library is opened at the first reading. If every GPU fails, it is opened again, at the earliest REOPEN_S after the
last time: a library opened before its driver was reloaded gets no answers.

Invariant: a GPU that was listed once is in every later result, as a failure if it cannot be read.
"""

from __future__ import annotations

from typing import Final, Protocol

from .reading import GaugeAbsent, GaugeFailed, Reading, Result

REOPEN_S: Final = 10.0
"""Seconds between two openings. Opening a library can take longer than a hundred readings."""


class Library(Protocol):
    """A vendor's library, opened or not. Any exception is a failure of the call."""

    @property
    def name(self) -> str:
        """As in Source."""
        ...

    def open(self) -> None:
        """Opens the library. Raises GaugeAbsent if the library or its driver is missing."""

    def count(self) -> int:
        """The number of GPUs that the library lists."""

    def address(self, index: int) -> str:
        """The name of a GPU, from its PCI address."""

    def read(self, index: int) -> Reading:
        """The memory of a GPU now."""

    def shut(self) -> None:
        """Closes the library."""


class LibrarySource:
    """The GPUs of a library as a Source."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._opened_at: float | None = None
        self._names: dict[int, str] = {}
        self._listed: dict[str, None] = {}

    @property
    def name(self) -> str:
        """As in Source."""
        return self._library.name

    def read(self, now: float) -> Result:
        """As in Source."""
        if self._opened_at is None:
            self._open(now)
        try:
            result = self._read_all(self._library.count())
        except Exception as error:
            self._reopen_later(now)
            raise error if isinstance(error, GaugeFailed) else GaugeFailed(one_line(error)) from error
        if not any(isinstance(each, Reading) for each in result.values()):
            self._reopen_later(now)
        if not result:
            raise GaugeAbsent("the library lists no GPU")
        return result

    def close(self) -> None:
        """As in Source."""
        if self._opened_at is None:
            return
        self._opened_at = None
        self._names.clear()
        try:
            self._library.shut()
        except Exception:
            # The library has failed before, and that failure was logged when it was read.
            return

    def _open(self, now: float) -> None:
        try:
            self._library.open()
        except GaugeFailed:
            raise
        except Exception as error:
            raise GaugeFailed(one_line(error)) from error
        self._opened_at = now

    def _reopen_later(self, now: float) -> None:
        if self._opened_at is not None and now - self._opened_at >= REOPEN_S:
            self.close()

    def _read_all(self, count: int) -> Result:
        result: Result = {}
        for index in range(count):
            name = f"{self.name}:{index}"
            try:
                name = self._name(index)
                if name not in result:  # partitions of one card may share its address
                    result[name] = self._library.read(index)
            except GaugeFailed as failed:
                result[name] = failed
            except Exception as error:
                result[name] = GaugeFailed(one_line(error))
        for name in self._listed:
            result.setdefault(name, GaugeFailed("the driver no longer lists this GPU"))
        return result

    def _name(self, index: int) -> str:
        if index not in self._names:
            self._names[index] = self._library.address(index)
            self._listed[self._names[index]] = None
        return self._names[index]


def one_line(error: Exception) -> str:
    """An exception in one line, with its type: many exceptions of bindings have no useful text."""
    return " ".join(f"{type(error).__name__}: {error}".split())
