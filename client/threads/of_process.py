"""Objects that belong to this process, and end with a `with` block."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NoReturn, Self


class OfThisProcess:
    """Cannot be pickled or copied."""

    __slots__ = ()
    _instead: ClassVar[str]
    """What to do in another process."""

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(f"a {kind} belongs to this process, so it cannot be pickled or copied: {self._instead}")


class Releasable(OfThisProcess):
    """Is released at the end of a `with` block."""

    __slots__ = ()

    @abstractmethod
    def release(self) -> None:
        """Releases it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.release()


class Closable(OfThisProcess):
    """Is closed at the end of a `with` block."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Closes it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
