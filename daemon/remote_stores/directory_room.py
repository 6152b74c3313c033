"""The bound on the bytes of a directory, and eviction of the objects that were used longest ago.

Several processes and hosts write into one directory, and none of them keeps a table of it. Each process estimates the
bytes: the total of its last scan, its own puts since, and files that other writers have begun. A thread of its own
scans after each sixteenth of the limit that the process has put, and when the estimate is near the limit. It evicts by
the times of the files, which a read renews at most once a minute, until LOW of the limit is used. Before each scan, and
every SWEEP_S, it counts the files in tmp/ anew, and removes those of killed writers.

Owns: the estimate, the thread, and the removal of old objects and of files that a killed writer left. Does not own: the
reading and writing of objects (`directory`).

Limits: until the first scan has ended, an estimate has this process's puts only. Between two scans, the directory may
exceed its limit by a sixteenth for each other process that writes. A scan reads the whole directory, twice if it
evicts.

Invariant: no call of the file system is made under the lock. So also while one hangs, `close` ends, and a put waits for
room no longer than until its deadline.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np

from ...errors import TierFull, TierTimedOut, TierTooLarge

TMP: Final = "tmp"
LEFTOVER_S: Final = 3600.0
"""The age of a file in tmp/ from which on its writer is taken for dead. Clocks of hosts differ by less."""
SWEEP_S: Final = 600.0
"""The longest time between two looks into tmp/."""
LOW: Final = 0.9
"""The share of the limit to which a scan evicts."""
_HIGH: Final = 0.95
_JOIN_S: Final = 5.0
_SCAN_SHARE: Final = 16


class DirectoryRoom:
    """At most `limit_bytes` of objects in the folders of `base`, files in tmp/ included.

    `writer`: what the names of this process's files in tmp/ begin with.
    """

    def __init__(self, base: Path, limit_bytes: int, writer: str) -> None:
        self.limit_bytes = limit_bytes
        self._base = base
        self._writer = writer
        self._changed = threading.Condition()
        self._scanned_bytes = 0
        self._put_bytes = 0  # since the last scan began; the scan may have counted some of them too
        self._writing: list[tuple[str, int]] = []  # path and size of each object that this process writes now
        self._begun_bytes = 0  # of other writers in tmp/
        self._waiting: list[int] = []  # the sizes of objects that wait for room
        self._evicting = ""  # the path of the object that the thread removes now
        self._scans = 0
        self._scan_asked = False
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def used_bytes(self) -> int:
        """The estimate of the bytes in the directory. It counts no puts of other processes since the last scan."""
        return self._scanned_bytes + self._put_bytes + self._writing_bytes + self._begun_bytes

    @property
    def _writing_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self._writing)

    @contextmanager
    def writing(self, path: Path, size_bytes: int, deadline: float) -> Iterator[None]:
        """Counts an object that is written to `path` within the block, and does not evict it meanwhile. Waits for
        eviction if the limit would be exceeded.

        Raises:
            TierTooLarge: the object is larger than the limit.
            TierFull: eviction has made no room for it by the deadline.
            TierTimedOut: by the deadline the file system has not removed the object in whose place it is written.
        """
        if size_bytes > self.limit_bytes:
            raise TierTooLarge(
                f"dir://{self._base.parent}: an object of {size_bytes} bytes is larger than the limit of "
                f"{self.limit_bytes} bytes; raise `bytes` in the URL"
            )
        with self._changed:
            self._make_room(size_bytes, deadline)
            self._writing.append((str(path), size_bytes))
        written_bytes = 0
        try:
            self._wait_until_gone(str(path), deadline)
            yield
            written_bytes = size_bytes
        finally:
            with self._changed:
                self._writing.remove((str(path), size_bytes))
                self._put_bytes += written_bytes
                due = self._put_bytes > self.limit_bytes // _SCAN_SHARE
                if due or self.used_bytes > self.limit_bytes * _HIGH:
                    self._ask()

    def close(self) -> None:
        """Ends the thread. A scan that is under way ends at its next folder. One that hangs is left behind."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(_JOIN_S)

    def _make_room(self, size_bytes: int, deadline: float) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tensord-directory", daemon=True)
            self._thread.start()
            self._ask()
        scans = self._scans
        self._waiting.append(size_bytes)
        try:
            while self.used_bytes + size_bytes > self.limit_bytes and not self._closed:
                self._ask()
                left_s = deadline - time.monotonic()
                # A scan that was under way did not know what is wanted. The second one did.
                if left_s <= 0 or self._scans >= scans + 2:
                    raise TierFull(
                        f"dir://{self._base.parent}: {self.used_bytes} of {self.limit_bytes} bytes are used, and "
                        f"eviction has made no room for {size_bytes} more; raise `bytes` in the URL, or the deadline"
                    )
                self._changed.wait(left_s)
        finally:
            self._waiting.remove(size_bytes)

    def _wait_until_gone(self, path: str, deadline: float) -> None:
        """Waits while the object at `path` is being evicted."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._evicting != path, max(0.0, deadline - time.monotonic())):
                raise TierTimedOut(
                    f"dir://{self._base.parent}: the file system has not removed {path} by the deadline: look at the "
                    "file system and its server"
                )

    def _ask(self) -> None:
        self._scan_asked = True
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._scan_asked or self._closed, SWEEP_S)
                if self._closed:
                    return
                asked, self._scan_asked = self._scan_asked, False
            with suppress(OSError):  # the puts meet the same fault, and report it
                self._begun_bytes = self._sweep()
            if asked:
                self._scan_once()

    def _scan_once(self) -> None:
        with self._changed:
            self._scanned_bytes += self._put_bytes
            self._put_bytes = 0
        with suppress(OSError):
            self._scanned_bytes = self._scan()
        with self._changed:
            self._scans += 1
            self._changed.notify_all()

    def _sweep(self) -> int:
        """Removes files of killed writers. The bytes of other writers' files that remain in tmp/."""
        oldest, begun_bytes = time.time() - LEFTOVER_S, 0
        for entry, about in self._files(TMP):
            if about.st_mtime < oldest:
                _remove(entry)
            elif not entry.name.startswith(self._writer):
                begun_bytes += about.st_size
        return begun_bytes

    def _scan(self) -> int:
        """Removes old objects if there is no room for those that are written or wait. The bytes of objects that
        remain."""
        times, sizes = array("q"), array("q")
        for folder in self._folders():
            for _, about in self._files(folder):
                times.append(about.st_mtime_ns)
                sizes.append(about.st_size)
        total_bytes, begun_bytes = sum(sizes), self._begun_bytes
        # One that is written now may be in its place already, or an older one of its key.
        in_place = {path: _size_bytes(path) for path in self._written_to()}
        with self._changed:
            # After the walk, so that an object whose write has ended meanwhile is not counted twice.
            free_bytes = max(self._waiting, default=0) + self._writing_bytes
            in_place_bytes = sum(in_place.get(path, 0) for path in self._written_to())
        used_bytes, most_bytes = total_bytes - in_place_bytes + begun_bytes, self.limit_bytes - free_bytes
        if self._closed or not sizes or used_bytes <= min(self.limit_bytes * _HIGH, most_bytes):
            return total_bytes
        excess_bytes = min(total_bytes, used_bytes - min(int(self.limit_bytes * LOW), most_bytes))
        order = np.argsort(np.frombuffer(times, np.int64), kind="stable")
        freed = np.cumsum(np.frombuffer(sizes, np.int64)[order])
        last = times[order[min(int(np.searchsorted(freed, excess_bytes)), len(order) - 1)]]
        return total_bytes - self._evict(last, excess_bytes)

    def _evict(self, last_ns: int, excess_bytes: int) -> int:
        """Removes objects whose time is at most `last_ns`, until `excess_bytes` are free. The bytes that were freed."""
        freed_bytes = 0
        for folder in self._folders():
            for entry, about in self._files(folder):
                if about.st_mtime_ns <= last_ns and freed_bytes < excess_bytes and self._remove_old(entry, last_ns):
                    freed_bytes += about.st_size
        return freed_bytes

    def _remove_old(self, entry: os.DirEntry[str], last_ns: int) -> bool:
        """Removes an object, unless it was replaced since its time was read, or is being. Whether it is gone."""
        with self._changed:
            if entry.path in self._written_to():
                return False
            self._evicting = entry.path
        try:
            with suppress(FileNotFoundError):
                if os.lstat(entry.path).st_mtime_ns > last_ns:
                    return False
                os.unlink(entry.path)
            return True
        finally:
            with self._changed:
                self._evicting = ""
                self._changed.notify_all()

    def _written_to(self) -> set[str]:
        with self._changed:
            return {path for path, _ in self._writing}

    def _folders(self) -> list[str]:
        """The folders of objects. In a random order, so that processes which evict at once begin at different ones."""
        with suppress(FileNotFoundError), os.scandir(self._base) as found:
            names = [entry.name for entry in found if len(entry.name) == 2 and entry.is_dir(follow_symlinks=False)]
            return [names[number] for number in np.random.default_rng().permutation(len(names))]
        return []

    def _files(self, folder: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        if self._closed:
            return
        with suppress(FileNotFoundError), os.scandir(self._base / folder) as found:
            for entry in found:
                with suppress(FileNotFoundError):  # another process has evicted it
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode):
                        yield entry, about


def _remove(entry: os.DirEntry[str]) -> None:
    with suppress(FileNotFoundError):
        os.unlink(entry.path)


def _size_bytes(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
