"""A fake card, represented by a folder. Its capacity is enforced across processes; a killed process's bytes become
free.

    FOLDER/lock                 flock around every change
    FOLDER/gauges               NAME USED TOTAL, one line a card: input of the daemon's `file` gauges
    FOLDER/cards/NAME/capacity  bytes
    FOLDER/cards/NAME/PID-X     the bytes that one opener holds; the opener holds flock(LOCK_EX) on it while it lives

Owns: the account of the bytes. Does not own: any memory. fake_vram.py owns it, and reserves its bytes here first.

Invariants: the bytes of live openers never exceed the capacity. A share file whose lock is free has no opener any more,
and the next reader removes it, as a driver frees the memory of a process however the process ended.
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
    """One process's handle on a card, and the bytes that the process holds. Thread-safe. A child process opens the card
    anew.

    Args:
        folder: the folder of the cards; created if missing. All cards in a folder share its gauge file.
        name: the name of the card and of its gauge.
        capacity_bytes: the card's capacity; None to use the capacity that the first opener gave.

    Raises:
        UsageError: the name is not valid for a gauge, or the card has another capacity.

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
            self.capacity_bytes = self._checked_capacity(capacity_bytes)
            fd = os.open(self._share, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            # No process sees the file before it is locked, since every reader holds the folder's lock.
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._fd = fd
            self._write(0)
            self._write_gauge()
        self._closed = weakref.finalize(self, _closed, self._share, fd)
        _cards.add(self)

    # ---- queries

    @property
    def gauge_file(self) -> Path:
        """The path for the daemon's setting `gauges.file`."""
        return self.folder / "gauges"

    @property
    def held_bytes(self) -> int:
        """Bytes that this handle holds, occupied bytes included."""
        return self._held_bytes + self._occupied_bytes

    def reading(self) -> tuple[int, int]:
        """(used, total) bytes of the whole card, over all live processes."""
        with self._locked():
            return self._used_bytes(), self.capacity_bytes

    def refresh(self) -> tuple[int, int]:
        """Writes the gauge file again, for cases in which no process does: a process was killed, or never closed its
        card. Returns (used, total) bytes like `reading`."""
        with self._locked():
            return self._write_gauge(), self.capacity_bytes

    # ---- changes

    def take(self, wanted_bytes: int) -> None:
        """Reserves `wanted_bytes` of the card.

        Raises:
            DeviceFull: the card has fewer free bytes; nothing has changed.
        """
        with self._locked():
            self._check_room(wanted_bytes)
            self._held_bytes += wanted_bytes
            self._write(self.held_bytes)
            self._write_gauge()

    def give(self, given_bytes: int) -> None:
        """Returns `given_bytes` to the card."""
        if not 0 <= given_bytes <= self._held_bytes:
            raise UsageError(f"{given_bytes} bytes were to go back to {self.name}, and {self._held_bytes} are held")
        with self._locked():
            self._held_bytes -= given_bytes
            self._write(self.held_bytes)
            self._write_gauge()

    def occupy(self, occupied_bytes: int) -> None:
        """Sets the bytes held in addition to those of `take`, for example an engine's own use. 0 ends the occupation.

        Raises:
            DeviceFull: the card has fewer free bytes; the former occupation stays.
        """
        if occupied_bytes < 0:
            raise UsageError(f"occupied_bytes is {occupied_bytes}; it is 0 or more")
        with self._locked():
            self._check_room(occupied_bytes - self._occupied_bytes)
            self._occupied_bytes = occupied_bytes
            self._write(self.held_bytes)
            self._write_gauge()

    def close(self) -> None:
        """Returns all bytes that this handle holds. Idempotent."""
        if self._closed.alive:
            with self._locked():
                self._closed()
                self._held_bytes = self._occupied_bytes = 0
                self._write_gauge()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- private; called under the folder's lock

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # Forks wait meanwhile: a child's copy of the descriptor would hold the folder's lock as long as the child
        # lives.
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

    def _checked_capacity(self, capacity_bytes: int | None) -> int:
        path = self._place / "capacity"
        if not path.exists():
            if capacity_bytes is None or capacity_bytes <= 0:
                raise UsageError(f"{self.name} is new; capacity_bytes says how much it has, not {capacity_bytes}")
            path.write_text(f"{capacity_bytes}\n")
        known = int(path.read_text())
        if capacity_bytes not in (None, known):
            raise UsageError(f"{self.name} has {known} bytes, not {capacity_bytes}; open it with that, or with None")
        return known

    def _check_room(self, wanted_bytes: int) -> None:
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

    def _write_gauge(self) -> int:
        """Writes this card's line of the gauge file. Readers see the old or the new file."""
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
    # A child would hold its parent's locks as long as it lives, so the parent's share would outlive the parent.
    for card in list(_cards):
        if card._closed.detach():
            os.close(card._fd)
    _no_fork.release()


os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_in_child)
