"""A card that is a folder: its capacity is enforced across processes, and what a killed process held is free again.

    FOLDER/lock                 flock around every change
    FOLDER/gauges               NAME USED TOTAL, a line a card: what the daemon's `file` gauges read
    FOLDER/cards/NAME/capacity  bytes
    FOLDER/cards/NAME/PID-X     the bytes that one opener holds, and under flock(LOCK_EX) for as long as it lives

Owns: the account of the bytes. Does not own any memory: fake_vram.py does, and takes what it needs here first.

Invariants: what live openers hold never sums to more than the capacity. A share whose lock can be had belongs to
nobody: whoever looks next removes it, as a driver frees the memory of a process that ended, however it ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

from ..errors import DeviceFull, UsageError

_NAME: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_DIGITS: Final = 20


class FakeCard:
    """One process's opening of a card, and what this process holds of it. Safe to use from several threads; a child
    process opens it anew.

    Args:
        folder: where cards stand; made if it is not there. Several cards share the folder's gauge file.
        name: the card's, and its gauge's.
        capacity_bytes: how much it has; None: as whoever opened it first said.

    Raises:
        UsageError: a name that no gauge can have, or another capacity than the card has.

    Example:
        >>> import tempfile
        >>> from tensord.testing.fake_card import FakeCard
        >>> card = FakeCard(tempfile.mkdtemp(), "card0", 1 << 20)
        >>> card.reading()                                         # used and total bytes
        (0, 1048576)
    """

    def __init__(self, folder: str | os.PathLike[str], name: str, capacity_bytes: int | None = None) -> None:
        if not _NAME.fullmatch(name) or name in (".", ".."):
            raise UsageError(f"a card called {name!r}; up to 64 letters, digits and . _ : - make a name")
        self.name = name
        self.folder = Path(folder)
        self._place = self.folder / "cards" / name
        self._place.mkdir(parents=True, exist_ok=True)
        self._held_bytes = 0
        self._occupied_bytes = 0
        self._closed: Any = None
        self._share = self._place / f"{os.getpid()}-{secrets.token_hex(4)}"
        with self._locked():
            self.capacity_bytes = self._agreed(capacity_bytes)
            fd = os.open(self._share, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            # Nobody sees the file before it is locked: whoever looks holds the folder's lock.
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._fd = fd
            self._write(0)
            self._tell()
        self._closed = weakref.finalize(self, _closed, self._share, fd)
        _cards.add(self)

    # ---- what it shows

    @property
    def gauge_file(self) -> Path:
        """The file for the daemon's `gauges.file`."""
        return self.folder / "gauges"

    @property
    def held_bytes(self) -> int:
        """What this opening holds, what it occupies included."""
        return self._held_bytes + self._occupied_bytes

    def reading(self) -> tuple[int, int]:
        """(used, total) bytes of the whole card, all processes that live."""
        with self._locked():
            return self._used_bytes(), self.capacity_bytes

    def refresh(self) -> tuple[int, int]:
        """Writes the gauge file anew, as nobody does when a process was killed or never closed its card. Returns what
        `reading` does."""
        with self._locked():
            return self._tell(), self.capacity_bytes

    # ---- what changes it

    def take(self, wanted_bytes: int) -> None:
        """Takes so many bytes of the card.

        Raises:
            DeviceFull: it has less; nothing was taken.
        """
        with self._locked():
            self._fits(wanted_bytes)
            self._held_bytes += wanted_bytes
            self._write(self.held_bytes)
            self._tell()

    def give(self, given_bytes: int) -> None:
        """Gives so many bytes back."""
        if not 0 <= given_bytes <= self._held_bytes:
            raise UsageError(f"{given_bytes} bytes were to go back to {self.name}, and {self._held_bytes} are held")
        with self._locked():
            self._held_bytes -= given_bytes
            self._write(self.held_bytes)
            self._tell()

    def occupy(self, occupied_bytes: int) -> None:
        """From now on holds exactly so many bytes besides what was taken: an engine's own use. 0 ends it.

        Raises:
            DeviceFull: the card has less; what was occupied before still is.
        """
        if occupied_bytes < 0:
            raise UsageError(f"occupied_bytes is {occupied_bytes}; it is 0 or more")
        with self._locked():
            self._fits(occupied_bytes - self._occupied_bytes)
            self._occupied_bytes = occupied_bytes
            self._write(self.held_bytes)
            self._tell()

    def close(self) -> None:
        """Gives back all that this opening holds."""
        if self._closed.alive:
            with self._locked():
                self._closed()
                self._held_bytes = self._occupied_bytes = 0
                self._tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside; all of it under the folder's lock

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # No fork meanwhile: the child's copy of the descriptor would hold the folder's lock for as long as it lives.
        with _no_fork:
            closed = self._closed
            if closed is not None and not closed.alive:
                raise UsageError(f"{self.name} was closed, or opened before a fork; open it anew in this process")
            fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield
            finally:
                os.close(fd)

    def _agreed(self, capacity_bytes: int | None) -> int:
        path = self._place / "capacity"
        if not path.exists():
            if capacity_bytes is None or capacity_bytes <= 0:
                raise UsageError(f"{self.name} is new; capacity_bytes says how much it has, not {capacity_bytes}")
            path.write_text(f"{capacity_bytes}\n")
        known = int(path.read_text())
        if capacity_bytes not in (None, known):
            raise UsageError(f"{self.name} has {known} bytes, not {capacity_bytes}; open it with that, or with None")
        return known

    def _fits(self, wanted_bytes: int) -> None:
        free_bytes = self.capacity_bytes - self._used_bytes()
        if wanted_bytes > free_bytes:
            raise DeviceFull(
                f"{self.name} has {free_bytes} of its {self.capacity_bytes} bytes free, {wanted_bytes} are needed; "
                "drop tensors and give their memory back"
            )

    def _used_bytes(self) -> int:
        used_bytes = 0
        for share in self._place.iterdir():
            if share.name == "capacity":
                continue
            if share == self._share:
                used_bytes += self.held_bytes
                continue
            try:
                fd = os.open(share, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # its opener has just closed it
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                share.unlink(missing_ok=True)
            except BlockingIOError:
                used_bytes += int(os.pread(fd, _DIGITS, 0))
            finally:
                os.close(fd)
        return used_bytes

    def _write(self, held_bytes: int) -> None:
        os.pwrite(self._fd, f"{held_bytes:0{_DIGITS}}".encode(), 0)

    def _tell(self) -> int:
        """Writes this card's line of the gauge file, in one step as its readers see it."""
        used_bytes = self._used_bytes()
        lines = self.gauge_file.read_text().splitlines() if self.gauge_file.exists() else []
        others = [line for line in lines if line.split()[:1] != [self.name]]
        draft = self.folder / "gauges.draft"
        draft.write_text("\n".join([*others, f"{self.name} {used_bytes} {self.capacity_bytes}"]) + "\n")
        draft.replace(self.gauge_file)
        return used_bytes


def _closed(share: Path, fd: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        share.unlink()
    os.close(fd)


_cards: Final[weakref.WeakSet[FakeCard]] = weakref.WeakSet()
_no_fork: Final = threading.RLock()


def _in_child() -> None:
    # A child would hold its parent's locks for as long as it lives, and the parent's share would outlive the parent.
    for card in list(_cards):
        if card._closed.detach():
            os.close(card._fd)
    _no_fork.release()


os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_in_child)
