"""GPUs that a vendor's library counts and reads: which is which, and what becomes of one that is lost.

Owns: when a library is opened and closed, and the names of the GPUs that it has listed. Does not own how a library is
asked: that is amd.py and nvidia.py.

A library is opened at the first reading, and anew when every GPU failed, REOPEN_S after it was opened at the earliest:
a driver that was reloaded answers nothing to whoever opened the former one.

Invariant: a GPU that was listed once is in every later result, if only as a failure.
"""

from __future__ import annotations

from typing import Final, Protocol

from .reading import GaugeAbsent, GaugeFailed, Reading, Result

REOPEN_S: Final = 10.0
"""Opening can take longer than a hundred readings."""


class Library(Protocol):
    """A vendor's library, opened or not. Any exception is a failure of what was asked."""

    @property
    def name(self) -> str:
        """As in Source."""
        ...

    def open(self) -> None:
        """Raises GaugeAbsent where there is no such library, or no driver beneath it."""

    def count(self) -> int:
        """How many GPUs it lists."""

    def address(self, index: int) -> str:
        """A GPU's name, of its PCI address."""

    def read(self, index: int) -> Reading:
        """A GPU's memory, now."""

    def shut(self) -> None:
        """The end of what open began."""


class LibrarySource:
    """A library's GPUs, as a Source."""

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
            raise error if isinstance(error, GaugeFailed) else GaugeFailed(told(error)) from error
        if not any(isinstance(each, Reading) for each in result.values()):
            self._reopen_later(now)
        if not result:
            raise GaugeAbsent("it lists no GPU")
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
            # Of a library that fails anyway; what it failed with was told when it was read.
            return

    def _open(self, now: float) -> None:
        try:
            self._library.open()
        except GaugeFailed:
            raise
        except Exception as error:
            raise GaugeFailed(told(error)) from error
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
                if name not in result:  # parts of one card may share its address
                    result[name] = self._library.read(index)
            except GaugeFailed as failed:
                result[name] = failed
            except Exception as error:
                result[name] = GaugeFailed(told(error))
        for name in self._listed:
            result.setdefault(name, GaugeFailed("the driver does not list it any more"))
        return result

    def _name(self, index: int) -> str:
        if index not in self._names:
            self._names[index] = self._library.address(index)
            self._listed[self._names[index]] = None
        return self._names[index]


def told(error: Exception) -> str:
    """An exception in one line, with its type: bindings raise many that say nothing without it."""
    return " ".join(f"{type(error).__name__}: {error}".split())
